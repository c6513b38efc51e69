"""The state of a training in other programs' files, as numbers in FP32.

Readers give a `Training`; what writes one is in `convert`.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from . import tensor_files
from .errors import CheckpointError


@dataclass
class Training:
    """Weights, Adam's state and hyper-parameters, by the parameters' names.

    Attributes
    ----------
    weights : dict of str to torch.Tensor
        In the model's order.
    state : dict of str to dict
        ``step``, ``exp_avg``, ``exp_avg_sq``; empty where a source has none.
    groups : list of dict
        ``param_groups``, with names under ``params``.
    """

    weights: dict
    state: dict = field(default_factory=dict)
    groups: list = field(default_factory=list)


def kind_of(path):
    """Which kind of checkpoint a path is: "zerofp8", "deepspeed", "universal", "file"."""
    path = Path(path)
    if path.is_file():
        return "file"
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no such file or folder")
    folder = newest(path)
    if (folder / "index.json").exists():
        return "zerofp8"
    if (folder / "zero").is_dir():
        return "universal"
    if list(folder.glob("*_optim_states.pt")) or list(folder.glob("mp_rank_*_model_states.pt")):
        return "deepspeed"
    raise CheckpointError(f"{path}: is no checkpoint that zerofp8 knows (looked for index.json, "
                          "*_optim_states.pt, mp_rank_*_model_states.pt, zero/)")


def newest(path):
    """The checkpoint that ``latest`` names in this folder, or the folder itself."""
    path = Path(path)
    for name in ("latest", "latest_universal"):
        latest = path / name
        if latest.is_file():
            named = path / latest.read_text(errors="replace").strip()
            if named.is_dir():
                return named
    steps = sorted(p.parent for p in path.glob("step-*/index.json"))
    return steps[-1] if steps and not (path / "index.json").exists() else path


def of_torch(saved, weights, place):
    """A ``state_dict`` of torch's Adam or AdamW and the model's weights.

    Parameters
    ----------
    saved : dict
        By index, or by names as ``get_optimizer_state_dict`` gives it.
    weights : dict of str to torch.Tensor
        In the order of the model's parameters; what is no parameter (buffers) may be among them.
    """
    groups = saved["param_groups"]
    numbers = [p for g in groups for p in g["params"]]
    if all(isinstance(n, str) for n in numbers):
        names = {n: n for n in numbers}
    else:
        fits = [n for n, t in weights.items() if t.is_floating_point()]
        if len(groups) > 1 or len(fits) != len(numbers):
            raise CheckpointError(
                f"{place}: holds parameters by number, in {len(groups)} groups of {len(numbers)}, and "
                f"the weights are {len(fits)} floating tensors; allowed: one group, in the order of "
                "the weights; save it by names (torch's get_optimizer_state_dict)")
        names = dict(zip(numbers, fits))
    state = {names[n]: dict(e) for n, e in saved["state"].items()}
    for name, entry in state.items():
        if name not in weights or entry["exp_avg"].shape != weights[name].shape:
            raise CheckpointError(f"{place}: state of \"{name}\" does not fit the weights")
    named = [{**g, "params": [names[n] for n in g["params"]]} for g in groups]
    return Training({n: weights[n] for g in named for n in g["params"]}, state, named)


def of_deepspeed(path, trust=False):
    """A folder of ZeRO stage 1 or 2: ``mp_rank_00_model_states.pt`` and ``*_optim_states.pt``."""
    folder = newest(path)
    models = sorted(folder.glob("mp_rank_*_model_states.pt"))
    if len(models) != 1:
        raise CheckpointError(f"{folder}: has {len(models)} files mp_rank_*_model_states.pt; allowed: "
                              "one (no tensor parallelism)")
    shapes = tensor_files.load(models[0], trust).get("param_shapes")
    files = sorted(folder.glob("*_optim_states.pt"), key=_rank_of)
    if not files or shapes is None:
        raise CheckpointError(f"{folder}: has no *_optim_states.pt, or no param_shapes; allowed: a "
                              "checkpoint of ZeRO stage 1 or 2")
    parts = [tensor_files.load(f, trust)["optimizer_state_dict"] for f in files]
    if any(p.get("zero_stage", 3) > 2 for p in parts) or "base_optimizer_state" not in parts[0]:
        raise CheckpointError(f"{folder}: is not of ZeRO stage 1 or 2; make a universal checkpoint of "
                              "it (ds_to_universal.py)")
    result = Training({})
    for group, names in enumerate(shapes):
        base = [p["base_optimizer_state"] for p in parts]
        flat = {"weight": torch.cat([p["single_partition_of_fp32_groups"][group] for p in parts])}
        for kind in ("exp_avg", "exp_avg_sq"):
            flat[kind] = torch.cat([b["state"][group][kind] for b in base])
        step, at = base[0]["state"][group].get("step", 0), 0
        for name, shape in names.items():
            count = shape.numel()
            cut = {k: v[at:at + count].reshape(shape) for k, v in flat.items()}
            result.weights[name] = cut.pop("weight")
            result.state[name] = {"step": torch.as_tensor(float(step)), **cut}
            at += count
        result.groups.append(_adams(base[0]["param_groups"][group], names))
    return result


def of_universal(path, trust=False):
    """DeepSpeed's universal checkpoints: a folder per parameter under ``zero``."""
    folder = newest(path) / "zero"
    result = Training({})
    for place in sorted(p for p in folder.iterdir() if (p / "fp32.pt").exists()):
        read = {k: tensor_files.load(place / f"{k}.pt", trust)
                for k in ("fp32", "exp_avg", "exp_avg_sq") if (place / f"{k}.pt").exists()}
        values = {k: (v["param"] if isinstance(v, dict) else v) for k, v in read.items()}
        step = place / "step.pt"
        count = tensor_files.load(step, trust) if step.exists() else 0
        result.weights[place.name] = values.pop("fp32")
        result.state[place.name] = {"step": torch.as_tensor(float(count)), **values}
    state = folder / "optimizer_state.pt"
    if state.exists():
        groups = tensor_files.load(state, trust)["param_groups"]
        if len(groups) == 1:
            result.groups = [_adams(groups[0], result.weights)]
    if not result.groups:
        result.groups = [{"params": list(result.weights)}]
    return result


def _adams(group, names):
    kept = {k: group[k] for k in ("lr", "betas", "eps", "weight_decay") if k in group}
    return {**kept, "params": list(names)}


def _rank_of(path):
    """zero_pp_rank_10_... comes after zero_pp_rank_9_...; bf16_ or fp16_ may stand before."""
    digits = path.name.partition("zero_pp_rank_")[2].partition("_")[0]
    return int(digits) if digits.isdigit() else 0
