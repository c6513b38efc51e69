"""``install`` and ``uninstall``: which names of DeepSpeed are bound to what."""

import functools
import logging
from pathlib import Path

from .. import configs, parameters, reduce_groups
from ..errors import UnsupportedError
from ..initialize import start
from ..integrations import INTEGRATIONS
from . import interface, settings, template

logger = logging.getLogger("zerofp8")
_originals = []  # (owner, name, value) in the order of rebinding
_options = {"timeout": 600.0}
_FOLDER = "zerofp8"  # in DeepSpeed's folder of a checkpoint


def installed():
    """Whether ``install`` was called, and ``uninstall`` not yet."""
    return bool(_originals)


def install(timeout=600.0):
    """Let ``deepspeed.initialize`` make engines that train with zerofp8.

    Call it on every rank, once, before ``deepspeed.initialize``. Engines that exist already must
    not be used any more.

    Parameters
    ----------
    timeout : float
        Seconds after which a collective of zerofp8 is a CommError.

    Raises
    ------
    UnsupportedError
        There is no DeepSpeed, or it lacks a name that is relied on; tested versions are listed.
    """
    found = interface.check()
    _options["timeout"] = timeout
    if installed():
        return
    if found not in interface.TESTED_VERSIONS:
        logger.warning("zerofp8: DeepSpeed %s has all names that are needed, but only %s were "
                       "tested", found, ", ".join(interface.TESTED_VERSIONS))
    import deepspeed.runtime.engine as engine
    import deepspeed.runtime.pipe.engine as pipe
    from deepspeed.runtime.config import DeepSpeedConfig

    from .bridge import EngineOptimizer

    # Both engines ask by type whether an optimizer takes the gradients itself.
    _rebind(engine, "BF16_Optimizer", EngineOptimizer)
    _rebind(pipe, "BF16_Optimizer", EngineOptimizer)
    _rebind(DeepSpeedConfig, "__init__", _config_init)
    for method in (_do_sanity_check, _do_optimizer_sanity_check, _configure_basic_optimizer,
                   _configure_bf16_optimizer, _configure_zero_optimizer, _save_zero_checkpoint,
                   _load_zero_checkpoint):
        _rebind(engine.DeepSpeedEngine, method.__name__, method)


def uninstall():
    """Give DeepSpeed its names back; engines made in between must not be used any more."""
    while _originals:
        owner, name, value = _originals.pop()
        setattr(owner, name, value)


def _rebind(owner, name, value):
    original = getattr(owner, name)
    _originals.append((owner, name, original))
    if not isinstance(value, type):
        value = functools.wraps(original)(value)
    setattr(owner, name, value)


def _original(name):
    return next(value for _, n, value in _originals if n == name)


# -- methods of DeepSpeedConfig and DeepSpeedEngine ----------------------------------------------


def _config_init(self, config, mpu=None, *args, **kwargs):
    written = settings.read(config)
    settings.check(written, mpu)
    self.zerofp8 = written
    _original("__init__")(self, settings.for_deepspeed(written), mpu, *args, **kwargs)


def _do_sanity_check(self):
    """DeepSpeed refuses fp16 on CPUs without fast instructions for it; torch computes it anyway."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        return _original("_do_sanity_check")(self)
    accelerator.is_fp16_supported = lambda: True
    try:
        return _original("_do_sanity_check")(self)
    finally:
        del accelerator.is_fp16_supported


def _do_optimizer_sanity_check(self, basic_optimizer):
    from deepspeed.runtime.constants import BFLOAT16

    return BFLOAT16  # whatever the dtypes: `_configure_bf16_optimizer` is next


def _configure_basic_optimizer(self, model_parameters):
    return template.from_config(model_parameters, settings.for_zerofp8(self._config.zerofp8))


def _configure_zero_optimizer(self, optimizer):
    """Called without an optimizer only: reference and reward models, whose engine has none."""


def _configure_bf16_optimizer(self, optimizer):
    from .bridge import EngineOptimizer

    if optimizer is None:  # DeepSpeed says so itself if the engine is told to train
        return None
    _refuse_engine(self)
    _refuse_reduce_groups(optimizer)
    mpu = self.mpu
    data, stages, tensor = self.data_parallel_group, None, None
    if self.pipeline_parallelism:
        data, stages = mpu.get_data_parallel_group(), mpu.get_pipe_parallel_group()
        _tie(self.module)
    elif mpu is not None:
        data = mpu.get_data_parallel_group()
    if mpu is not None and settings.tensor_size(mpu) > 1:
        tensor = settings.tensor_group(mpu)
    inner = start(self.module, optimizer,
                  settings.for_zerofp8(self._config.zerofp8, self), (data, stages, tensor),
                  timeout=_options["timeout"], integration=INTEGRATIONS["deepspeed"])[1]
    _announce(self, inner)
    return EngineOptimizer(inner, optimizer, data)


def _save_zero_checkpoint(self, save_path, tag):
    if self.optimizer is None:
        return
    self.optimizer.optimizer.save(Path(save_path) / str(tag) / _FOLDER)


def _load_zero_checkpoint(self, load_dir, tag, load_optimizer_states=True):
    if not load_optimizer_states:
        return False  # masters follow the weights that were loaded
    if self.optimizer is None:
        return True  # nothing was saved beside the weights
    if self.load_universal_checkpoint():
        self.optimizer.load_state_dict()
    self.optimizer.optimizer.load(Path(load_dir) / str(tag) / _FOLDER)
    return True


# -- parts of these --------------------------------------------------------------------------------


def _refuse_engine(engine):
    if engine.has_moe_layers:
        raise UnsupportedError("model", "with DeepSpeed's MoE layers", "layers that all data ranks "
                               "share", "expert parallelism is not supported under DeepSpeed yet")
    if type(engine).__name__ not in ("DeepSpeedEngine", "PipelineEngine"):
        raise UnsupportedError("deepspeed.initialize", f"a {type(engine).__name__}",
                               "DeepSpeedEngine or PipelineEngine",
                               "use one of these, or call zerofp8.deepspeed.uninstall()")
    if engine.pipeline_parallelism:
        interface.check_pipeline(engine.mpu.get_pipe_parallel_world_size(),
                                 engine.gradient_accumulation_steps())


def _refuse_reduce_groups(optimizer):
    # DeepSpeed has sent data rank 0's weights to all data ranks by now, experts' included.
    for i, group in enumerate(optimizer.param_groups):
        for key in reduce_groups.KEYS:
            if group.get(key) is not None:
                raise UnsupportedError(f"param_groups[{i}][\"{key}\"]", str(group[key]), "None",
                                       "use zerofp8.initialize in your own loop for such parameters")


def _tie(module):
    """Mark tied weights. What else a tied module has is, as in DeepSpeed, each stage's own."""
    for key, tied in module.tied_comms.items():
        if len(tied["ranks"]) == 1:
            continue
        for attribute in tied["weight_attr"]:
            weight = functools.reduce(getattr, attribute.split("."), tied["module"])
            parameters.tie(weight, f"{key}.{attribute}")


def _announce(engine, inner):
    """One line on rank 0, and the plan."""
    if engine.global_rank != 0:
        return
    s, written = inner.settings, engine._config.zerofp8
    clipping = "off" if not s.gradient_clipping else f"{s.gradient_clipping:g}"
    if "gradient_clipping" not in written and s.gradient_clipping:
        clipping += f" (default of DeepSpeed {interface.version()})"
    options = [parameters.adam_options(g, i, inner._decoupled)
               for i, g in enumerate(inner.param_groups)]
    line = (f"zerofp8 runs the optimizer of this {type(engine).__name__}: {s.opt_level}, stage "
            f"{s.stage}, {s.weight} model, {s.accumulation} accumulation "
            f"({'sharded' if s.accumulation_sharded else 'local'}), {s.gradient_wire} gradients "
            f"and {s.weight_wire} weights on the wire, gradient_clipping {clipping}, "
            f"{configs.description(options)}")
    logger.info("%s\n%s", line, inner.plan)
    if not logger.isEnabledFor(logging.INFO):
        logger.warning("%s", line)
