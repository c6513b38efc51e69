"""zerofp8's checkpoint folders: their indices, and one as `Training` and back, by an engine."""

import json
import re
from pathlib import Path

import torch

from .errors import CheckpointError
from .training_files import Training, newest

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def indices(path):
    """``index.json`` and each ``model-NNNNN.json`` of a folder."""
    folder = newest(path)
    try:
        run = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        models = [json.loads((folder / m["name"]).read_text(encoding="utf-8"))
                  for m in run["models"]]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder}: is damaged or not written by zerofp8: {error}") from None
    return run, models


def read(path, order=None):
    """A folder as `Training`.

    Parameters
    ----------
    order : list of str, optional
        Names in the model's order, which a folder does not hold; default: sorted.
    """
    from .initialize import initialize
    run, models = indices(path)
    parameters = {name: p for m in models for name, p in m["parameters"].items()}
    cut = [n for n in parameters if re.match(r"(stage\d+\.)?tensor\d+-of-", n)]
    if cut:
        raise CheckpointError(f"{path}: holds tensor slices (\"{cut[0]}\"), which are not put together")
    names = [n for n in order or () if n in parameters]
    names += [n for n in parameters if n not in names]
    model = module_of({n: torch.zeros(parameters[n]["shape"], dtype=_DTYPES[parameters[n]["dtype"]])
                       for n in names})
    own = dict(model.named_parameters())
    # Which parameter is in which group is not in a folder; their numbers are.
    groups = [{"params": [own[n] for n in names] if i == 0 else []} for i in range(len(run["groups"]))]
    model, optimizer = initialize(model, torch.optim.AdamW(groups), config_of(models[0]))
    optimizer.load(newest(path))
    if len(groups) == 1:
        packed = optimizer.torch_state_dict()
        hyper = {k: v for k, v in packed["param_groups"][0].items() if k != "params"}
    else:
        packed, hyper = optimizer.torch_state_dict(), {}
    state = {names[i]: entry for i, entry in packed["state"].items()}
    weights = optimizer.master_weights()
    optimizer.close()
    return Training({n: weights[n] for n in names}, state, [{**hyper, "params": names}])


def write(training, folder, config, opt_level=None, dtype=None):
    """A `Training` as a folder of one rank, which any number of ranks loads."""
    from .initialize import initialize
    model = module_of({n: w if dtype is None else w.to(dtype) for n, w in training.weights.items()})
    own = dict(model.named_parameters())
    template = torch.optim.AdamW([{**g, "params": [own[n] for n in g["params"]]}
                                  for g in training.groups])
    model, optimizer = initialize(model, template, config, opt_level=opt_level,
                                  loss_is_divided=False)
    numbers = {n: i for i, n in enumerate(n for g in training.groups for n in g["params"])}
    saved = optimizer.state_dict()
    optimizer.load_state_dict({"state": {numbers[n]: e for n, e in training.state.items()},
                               "param_groups": saved["param_groups"]})
    optimizer.load_masters({n: w.float() for n, w in training.weights.items()})
    optimizer.save(folder)
    optimizer.close()


def config_of(model):
    """A config whose formats are those of a checkpoint, from its ``model-NNNNN.json``."""
    form, parameters = model["format"], model["parameters"].values()
    kept = [p for p in parameters if p["fp32_moments"] and len(p["shape"]) > 1]
    exact = any(p["fp32_moments"] for p in parameters)
    most = max((torch.Size(p["shape"]).numel() for p in kept), default=0)
    ours = {"exp_avg_dtype": form["exp_avg"], "exp_avg_sq_dtype": form["exp_avg_sq"].split()[0],
            "block_size": form["block_size"], "fp32_moments_below": most + 1 if exact else 0}
    if form["weight"] != "fp32":
        ours["master_weights"] = form["master"]
    return {"bf16": {"enabled": form["weight"] == "bf16"}, "fp16": {"enabled": form["weight"] == "fp16"},
            "zerofp8": ours}


def module_of(tensors):
    """A module whose parameters have these names."""
    root = torch.nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        at = root
        for part in path:
            if part not in at._modules:
                at.add_module(part, torch.nn.Module())
            at = at._modules[part]
        at.register_parameter(last, torch.nn.Parameter(tensor.detach().clone().contiguous()))
    return root


def files_of(path):
    """Names and sizes of a folder's files."""
    return [(p.name, p.stat().st_size) for p in sorted(Path(newest(path)).iterdir()) if p.is_file()]
