"""The Adam that zerofp8 takes as a template, from DeepSpeed's config or the user's optimizer."""

import torch

from ..errors import ConfigError

_HYPER = ("lr", "betas", "eps", "weight_decay")
# DeepSpeed's and Apex's own, which have Adam's parameter groups. Decoupled decay is an attribute.
_CONVERTED = ("FusedAdam", "DeepSpeedCPUAdam")


def from_config(parameters, written):
    """For a config with an ``optimizer`` section.

    Parameters
    ----------
    parameters : iterable of torch.nn.Parameter or dict
    written : dict
        The config as `settings.for_zerofp8` gives it.
    """
    section = written.get("optimizer") or {}
    if section.get("type") not in ("Adam", "AdamW"):
        raise ConfigError("/optimizer/type", repr(section.get("type")), "Adam or AdamW",
                          "choose one of these")
    params = section["params"]
    options = {k: params[k] for k in _HYPER if params.get(k, "auto") != "auto"}
    if not params.get("torch_adam"):
        options.setdefault("weight_decay", 0.0)  # as DeepSpeed's own Adam; torch's AdamW has 0.01
    kind = torch.optim.AdamW if params["adam_w_mode"] else torch.optim.Adam
    return kind(list(parameters), **options)


def from_client(optimizer):
    """For an optimizer that the user has made; shares its parameter groups with it.

    Schedulers that were made for it go on to work: they write into the same dicts.
    """
    name = type(optimizer).__name__
    if name not in _CONVERTED:
        return optimizer  # torch's Adam and AdamW, or refused by initialize
    for i, group in enumerate(optimizer.param_groups):
        if not group.get("bias_correction", True):
            raise ConfigError(f"param_groups[{i}][\"bias_correction\"]", "False", "True",
                              "moments are always corrected for their start at zero")
    decoupled = bool(getattr(optimizer, "adam_w_mode", True))
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    return kind(optimizer.param_groups,
                **{k: optimizer.defaults[k] for k in _HYPER if k in optimizer.defaults})
