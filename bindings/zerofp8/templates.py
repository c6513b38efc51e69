"""Other packages' Adams as templates: DeepSpeed's and Apex's, which have torch's parameter groups."""

import torch

from .errors import ConfigError

HYPER = ("lr", "betas", "eps", "weight_decay")
# By name, so that neither package is imported. Whether decay is decoupled is an attribute.
_CONVERTED = ("FusedAdam", "DeepSpeedCPUAdam")


def from_client(optimizer):
    """For an optimizer that the user has made; shares its parameter groups with it.

    Schedulers that were made for it go on to work: they write into the same dicts.
    """
    name = type(optimizer).__name__
    if name not in _CONVERTED:
        return optimizer  # torch's Adam and AdamW, or refused by initialize
    if optimizer.state:
        raise ConfigError("optimizer", f"a {name} that has stepped already", "a fresh one",
                          "call initialize before the first step")
    for i, group in enumerate(optimizer.param_groups):
        if not group.get("bias_correction", True):
            raise ConfigError(f"param_groups[{i}][\"bias_correction\"]", "False", "True",
                              "moments are always corrected for their start at zero")
    decoupled = bool(getattr(optimizer, "adam_w_mode", True))
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    return kind(optimizer.param_groups,
                **{k: optimizer.defaults[k] for k in HYPER if k in optimizer.defaults})
