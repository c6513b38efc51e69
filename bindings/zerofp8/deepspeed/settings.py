"""One ds_config.json, read by both: what DeepSpeed is shown, and what zerofp8 runs."""

import base64
import copy
import json
import os

from .. import _C
from ..errors import ConfigError, UnsupportedError

# Asks for parts of DeepSpeed that bring an optimizer or a reduction of their own.
_REFUSED = (
    ("/sequence_parallel_size", 1, "sequence parallelism is not supported: remove it"),
    ("/tensor_parallel/autotp_size", 1, "pass an mpu with tensor parallel groups instead"),
    ("/zero_optimization/offload_optimizer/device", "none", "DeepSpeed's engines would bring an "
     "optimizer of their own: remove it, or write your own loop"),
    ("/hybrid_engine/enabled", False, "the hybrid engine is not supported: turn it off"),
    ("/compile/deepcompile", False, "DeepCompile reduces gradients itself: turn it off"),
)


def read(config):
    """The file, dict or base64 text that ``deepspeed.initialize`` was given, as a dict."""
    if isinstance(config, dict):
        return copy.deepcopy(config)
    if os.path.exists(config):
        return json.loads(_C.Config.from_file(os.fspath(config)).canonical())
    try:
        return json.loads(base64.urlsafe_b64decode(config).decode())
    except (ValueError, TypeError, AttributeError):
        raise ConfigError("config", repr(config), "the path of a file, a dict or base64",
                          "pass one of these") from None


def check(written, mpu):
    """Refuse what zerofp8 does not run before DeepSpeed allocates anything.

    Parameters
    ----------
    written : dict
        As `read` gave it.
    mpu : object or None
        DeepSpeed's model parallel unit: the grid of a pipeline, or the user's.
    """
    for pointer, allowed, fix in _REFUSED:
        value = written
        for key in pointer[1:].split("/"):
            value = value.get(key) if isinstance(value, dict) else None
        if value not in (None, 0, allowed):
            raise UnsupportedError(pointer, str(value), str(allowed), fix)
    autocast = written.get("torch_autocast") or {}
    if autocast.get("enabled") and "16" in str(autocast.get("dtype")) \
            and "b" not in str(autocast["dtype"]):
        raise UnsupportedError("/torch_autocast/dtype", str(autocast["dtype"]), "bfloat16",
                               "use bfloat16, or /fp16 with a loss scale")
    parsed = _C.Config.parse(json.dumps(for_zerofp8(written)), "ds_config")
    _C.resolve(parsed, *_sizes(mpu), auto_adam=_C.AdamOptions(), auto_gradient_clipping=1.0,
               assume_auto=True)


def _sizes(mpu):
    """Data ranks, pipeline stages and tensor ranks."""
    import torch.distributed as dist

    if mpu is None:
        return (dist.get_world_size() if dist.is_initialized() else 1), 1, 1
    return (mpu.get_data_parallel_world_size(), _first(mpu, 1, "get_pipe_parallel_world_size"),
            tensor_size(mpu))


def _first(mpu, otherwise, *names):
    for name in names:
        if hasattr(mpu, name):
            return getattr(mpu, name)()
    return otherwise


def tensor_size(mpu):
    return _first(mpu, 1, "get_slice_parallel_world_size", "get_tensor_model_parallel_world_size",
                  "get_model_parallel_world_size")


def tensor_group(mpu):
    return _first(mpu, None, "get_slice_parallel_group", "get_tensor_model_parallel_group",
                  "get_model_parallel_group")


def for_deepspeed(written):
    """What DeepSpeed is shown.

    Always ZeRO stage 1: its paths for other stages assert (stage 2 with pipelines), clip by
    themselves (stage 0) or reduce while zerofp8 does. The stage that runs is zerofp8's.
    """
    shown = copy.deepcopy(written)
    shown.pop("zerofp8", None)
    shown.pop("gradient_accumulation_dtype", None)
    shown.setdefault("zero_optimization", {})["stage"] = 1
    for name in ("bf16", "bfloat16"):
        if name in shown:
            # Else the pipeline does not say when a micro-batch has ended.
            shown[name].pop("immediate_grad_update", None)
    return shown


def for_zerofp8(written, engine=None):
    """What zerofp8 runs: DeepSpeed's rules for "Adam" and its defaults are made explicit.

    Parameters
    ----------
    engine : deepspeed.DeepSpeedEngine, optional
        Its batch sizes and default clipping are filled in.
    """
    ours = copy.deepcopy(written)
    section = ours.get("optimizer")
    if isinstance(section, dict) and isinstance(section.get("type"), str):
        if section["type"].lower() in ("adam", "adamw"):
            params = section["params"] = dict(section.get("params") or {})
            decoupled = section["type"].lower() == "adamw" or params.get("adam_w_mode", True)
            section["type"] = "AdamW" if decoupled else "Adam"
            params["adam_w_mode"] = decoupled
    if engine is not None:
        ours["gradient_clipping"] = engine.gradient_clipping()
        ours["train_batch_size"] = engine.train_batch_size()
        ours["train_micro_batch_size_per_gpu"] = engine.train_micro_batch_size_per_gpu()
        ours["gradient_accumulation_steps"] = engine.gradient_accumulation_steps()
    return ours
