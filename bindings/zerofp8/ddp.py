"""DistributedDataParallel around a model that zerofp8 trains: its reduction is taken out.

accelerate, Hugging Face's Trainer and Lightning wrap models by default. The wrapper stays, with all
that it does beside: it broadcasts buffers, has ``no_sync()``, moves inputs. Its reducer, which
would average ``p.grad`` a second time and holds buckets of the model's size, is given back.
"""

import logging
import weakref
from types import SimpleNamespace

import torch
from torch.nn.parallel import DistributedDataParallel

from .errors import ConfigError, UnsupportedError

logger = logging.getLogger("zerofp8")
_MARK = "_ddp_params_and_buffers_to_ignore"
_takers = weakref.WeakSet()  # of all optimizers: what they take nobody else reduces
_HINTS = {
    "DistributedDataParallel": "",
    "DataParallel": "start one process per device (torchrun): trainers use DataParallel where one "
                    "process sees several; or set CUDA_VISIBLE_DEVICES to one",
    "FullyShardedDataParallel": "use DDP or no wrapper: zerofp8 shards (accelerate: no fsdp_plugin;"
                                " Trainer: no fsdp=; Lightning: strategy=\"ddp\")",
}


def register(taker):
    """Parameters of this GradientTaker are zerofp8's until it is closed."""
    _takers.add(taker)


def takers_of(parameters):
    """The GradientTakers, not closed yet, that have any of these."""
    wanted = {id(n.parameter) for n in parameters}
    return [t for t in list(_takers) if any(id(n.parameter) in wanted for n in t.parameters)]


def forget(taker):
    """It was closed."""
    _takers.discard(taker)


def inner(model):
    """The module inside a DistributedDataParallel, or the model itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def check_wrappers(model):
    """Refuse wrappers that shard, or whose reduction cannot be taken out.

    Raises
    ------
    ConfigError
        Which wrapper or option of it, and how to tell the trainer.
    """
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            _check_options(module)
        elif (kind := type(module).__name__) in _HINTS:
            raise ConfigError("model", f"a module wrapped in {kind}, which reduces gradients itself",
                              "the bare module",
                              _HINTS[kind] or "remove the wrapper: zerofp8 reduces and shards")


def _check_options(ddp):
    given, fix = None, None
    if getattr(ddp, "_comm_hooks", None):
        given = "a communication hook"
        fix = ("remove it (accelerate: ddp_comm_hook; Lightning: ddp_comm_hook); the dtype of "
               "the wire is /communication_data_type")
    elif ddp.mixed_precision is not None:
        given, fix = "mixed_precision", "use torch.autocast, or a model in bf16"
    elif ddp._delay_all_reduce_params:
        given, fix = "delay_all_reduce_named_params", "remove the argument"
    elif ddp._join_config.enable:
        raise _no_join()
    if given:
        raise ConfigError("model", f"DistributedDataParallel with {given}",
                          "DistributedDataParallel whose reduction zerofp8 can take over", fix)


def look(taker):
    """In a forward pass: silence the DistributedDataParallel that has called, if there is one."""
    ddp = DistributedDataParallel._active_ddp_module
    if ddp is not None:
        silence(ddp, taker)


def silence_all(model, taker):
    """The same for wrappers that a model had before ``initialize``."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            silence(module, taker)


@torch._disable_dynamo  # what follows is not for a compiler's eyes
def silence(ddp, taker):
    """Take what `taker` has out of a wrapper's reduction; the rest is reduced as before.

    Its hooks are removed and its buckets freed. Where other parameters are left (another
    optimizer's), a reducer of these alone is made.
    """
    if ddp in taker.silenced:
        return
    _check_options(ddp)
    taker.silenced.add(ddp)
    ours = {id(n.parameter) for t in _takers for n in t.parameters}
    names = {n: p for n, p in ddp.module.named_parameters() if p.requires_grad}
    rest = [n for n, p in names.items() if id(p) not in ours and n not in ddp.parameters_to_ignore]
    if not isinstance(ddp.reducer, _NoReducer):
        ddp.reducer._remove_autograd_hooks()
    # The logger holds the reducer; when both are gone, so are the buckets.
    ddp.logger, ddp.reducer = _NoLogger(), _NoReducer(taker)
    if rest:
        ddp.parameters_to_ignore |= {n for n, p in names.items() if id(p) in ours}
        parameters, sparse = ddp._build_params_for_reducer()
        ddp._ddp_init_helper(parameters, sparse, ddp._build_debug_param_to_name_mapping(parameters),
                             ddp.static_graph)
    logger.info("zerofp8: DistributedDataParallel reduces %s now: zerofp8 does%s",
                f"{len(rest)} parameters" if rest else "nothing",
                " the others" if rest else "; its buckets are freed")


def mark(model, taker):
    """Let a wrapper that comes after ``initialize`` make buckets for the smallest parameter alone.

    It wants one at least. The others' weights are not sent again either.
    """
    trained = sorted((n for n in taker.parameters if n.parameter.requires_grad),
                     key=lambda n: n.parameter.numel())
    names = [n.name for n in trained[1:]]
    if names and torch.distributed.is_available() and torch.distributed.is_initialized():
        already = list(getattr(model, _MARK, []))
        setattr(model, _MARK, _Ignored(already + names + [f"_orig_mod.{n}" for n in names], taker))


class _Ignored(list):
    """Empty in copies of the model, which zerofp8 does not train, and when the taker is closed."""

    def __init__(self, names, taker):
        super().__init__(names)
        self._taker = weakref.ref(taker)

    def __iter__(self):
        return super().__iter__() if self._taker() in _takers else iter(())

    def __reduce_ex__(self, protocol):
        return list, ()


class _NoReducer:
    """Has what DistributedDataParallel calls in forward and backward passes, and does nothing."""

    def __init__(self, taker):
        self._taker = weakref.ref(taker)

    def prepare_for_forward(self):
        pass

    def prepare_for_backward(self, outputs):
        if self._taker() not in _takers:
            raise UnsupportedError(
                "DistributedDataParallel", "a wrapper whose reduction a closed optimizer of "
                "zerofp8's had taken over", "one that reduces", "wrap the module anew: "
                "DistributedDataParallel(wrapper.module)")

    def _rebuild_buckets(self):
        return False

    def _delay_all_reduce(self):
        pass

    def _remove_autograd_hooks(self):
        pass

    def _set_static_graph(self):
        pass

    def _set_forward_pass_work_handle(self, work, divide):
        raise _no_join()


class _NoLogger:
    """Has nothing to log of a reducer, and refuses what would need one."""

    def set_runtime_stats_and_log(self):
        pass

    def set_error_and_log(self, text):
        pass

    def _set_static_graph(self):
        pass

    def _get_ddp_logging_data(self):
        return SimpleNamespace(strs_map={}, ints_map={})

    def _set_uneven_input_join(self):
        raise _no_join()

    def _set_comm_hook_name(self, name):
        raise UnsupportedError(
            "DistributedDataParallel", f"the communication hook {name}", "none",
            "remove it: zerofp8 reduces; the dtype of the wire is /communication_data_type")


def _no_join():
    return UnsupportedError(
        "Join", "uneven inputs (torch.distributed.algorithms.Join, DistributedDataParallel.join)",
        "the same number of steps on all ranks",
        "let the sampler drop the last batches (drop_last=True) or repeat some, or let a rank "
        "without a batch run one whose loss is multiplied by 0")
