"""The Adam that zerofp8 takes as a template, from DeepSpeed's config."""

import torch

from ..errors import ConfigError
from ..templates import HYPER


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
    options = {k: params[k] for k in HYPER if params.get(k, "auto") != "auto"}
    if not params.get("torch_adam"):
        options.setdefault("weight_decay", 0.0)  # as DeepSpeed's own Adam; torch's AdamW has 0.01
    kind = torch.optim.AdamW if params["adam_w_mode"] else torch.optim.Adam
    return kind(list(parameters), **options)
