"""From a path or dict to settings, with the values that only the model and the template know."""

import json
import logging
import os
import re

import torch

from . import _C
from .errors import ConfigError, UnsupportedError
from .parameters import DTYPES, as_tuple

logger = logging.getLogger("zerofp8")

_ADAM_KEYS = ("lr", "eps", "weight_decay")


def level_of(config, opt_level):
    """MS-AMP's third argument is the level: ``initialize(model, optimizer, "O1")``.

    Returns
    -------
    config, opt_level
        With a level in the config's place moved to its own.
    """
    if not isinstance(config, str) or not re.fullmatch(r"O\d", config):
        return config, opt_level
    if opt_level not in (None, config):
        raise ConfigError("opt_level", f"{config} as the third argument and {opt_level} by name",
                          "one of the two", "remove one")
    return None, config


def refuse_transformer_engine(use_te):
    """MS-AMP's argument that replaces the model's layers."""
    if use_te:
        raise UnsupportedError("use_te", str(use_te), "False",
                               "zerofp8 does not replace layers: remove it")


def load(config, parameters):
    """Parse `config`.

    Parameters
    ----------
    config : str, os.PathLike, dict or None
        Path of a JSON file, or its contents. None: defaults, with the model's dtype.
    parameters : list of NamedParameter
    """
    if isinstance(config, _C.Config):
        return config
    if config is None:
        narrow = {DTYPES[n.parameter.dtype] for n in parameters} - {"fp32"}
        config = {name: {"enabled": True} for name in narrow}
    if isinstance(config, dict):
        try:
            text = json.dumps(config)
        except TypeError as error:
            raise ConfigError("config", f"a dict that is no JSON ({error})",
                              "numbers, strings, booleans, lists and dicts",
                              "convert the value") from None
        return _C.Config.parse(text, "dict")
    if isinstance(config, (str, os.PathLike)):
        return _C.Config.from_file(os.fspath(config))
    raise ConfigError("config", type(config).__name__, "a path, a dict or None",
                      "pass one of these")


def check_against_template(config, template, options):
    """A value of the file's /optimizer that differs from the template's is an error.

    Parameters
    ----------
    config : zerofp8._C.Config
    template : torch.optim.Optimizer
    options : list of zerofp8._C.AdamOptions
        Of each of its parameter groups.
    """
    written = json.loads(config.canonical())
    section = written.get("optimizer") or {}
    params = section.get("params") or {}
    defaults = template.defaults
    for key in _ADAM_KEYS:
        value = params.get(key)
        if isinstance(value, (int, float)) and float(defaults[key]) != float(value):
            _refuse(f"/optimizer/params/{key}", value, float(defaults[key]))
    betas = params.get("betas")
    if isinstance(betas, list) and [float(b) for b in defaults["betas"]] != betas:
        _refuse("/optimizer/params/betas", betas, list(defaults["betas"]))
    if "type" in section or "adam_w_mode" in params:
        # DeepSpeed's own rule for a bare "Adam" is decoupled; the template says what runs.
        decoupled = params.get("adam_w_mode", section.get("type") != "Adam")
        if any(o.decoupled != decoupled for o in options):
            _refuse("/optimizer/type", section.get("type", "adam_w_mode"),
                    type(template).__name__)


def _refuse(pointer, written, given):
    raise ConfigError(pointer, f"{written}, but the optimizer passed to initialize says {given}",
                      "the same value in both", "remove it from the config, or change one")


def resolve(config, layout_sizes, opt_level, options, parameters=()):
    """Settings that will run.

    Parameters
    ----------
    config : zerofp8._C.Config
    layout_sizes : tuple of int
        Data ranks, pipeline stages, tensor ranks.
    opt_level : {"O0", "O1", "O2", "O3"} or None
    options : list of zerofp8._C.AdamOptions
        Of the template's groups; the first one is shown in the plan.
    parameters : list of NamedParameter
        Their dtype decides, whatever the flags of the config say.
    """
    data, pipeline, tensor = layout_sizes
    known = {"weight": _dtype_of(parameters, pipeline * tensor), "assume_auto": True}
    if not options:
        return _C.resolve(config, data, pipeline, tensor, opt_level, **known)
    return _C.resolve(_with_template(config, options[0]), data, pipeline, tensor, opt_level,
                      options[0], **known)


def _dtype_of(parameters, slices):
    """The model's dtype: its 16-bit one, beside which parameters may be FP32.

    A stage or slice that has FP32 parameters alone may be a part of a 16-bit model: None.
    """
    dtypes = {DTYPES[n.parameter.dtype] for n in parameters}
    narrow = sorted(dtypes - {"fp32"})
    if len(narrow) > 1:
        raise ConfigError("model", "bf16 and fp16 parameters", "one 16-bit dtype",
                          "convert the model")
    if narrow:
        return narrow[0]
    return "fp32" if dtypes and slices == 1 else None


def _with_template(config, options):
    """The config with the template's algorithm, and "auto" for what else the template says."""
    written = json.loads(config.canonical())
    section = written.setdefault("optimizer", {})
    params = section["params"] = dict(section.get("params") or {})
    section["type"] = "AdamW" if options.decoupled else "Adam"
    params["adam_w_mode"] = options.decoupled
    for key in (*_ADAM_KEYS, "betas"):
        params[key] = "auto"
    return _C.Config.parse(json.dumps(written), config.source)


def description(options):
    """What runs, e.g. for the log: a bare "Adam" is Adam with L2 decay."""
    names = sorted({"AdamW" if o.decoupled else "Adam (L2 decay)" for o in options})
    return " and ".join(names) + f", {len(options)} group(s), first {as_tuple(options[0])[1:]}"


def log_choices(settings):
    """What the config says and does not happen as written."""
    for warning in settings.warnings:
        logger.warning("zerofp8: %s", warning)
    if settings.assumed:
        logger.warning("zerofp8: \"auto\" that nothing fills here, taken as: %s",
                       ", ".join(settings.assumed))


def threads():
    """Threads of this rank's kernels."""
    return max(1, torch.get_num_threads())
