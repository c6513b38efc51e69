"""``state_dict`` and ``load_state_dict``: this rank's shard as tensors of bytes."""

import torch

from . import reduce_groups
from .errors import CheckpointError
from .weights import digest

_FORMAT = 1
_HYPER = ("lr", "betas", "eps", "weight_decay")
_OF_THE_LAYOUT = ("params", *reduce_groups.KEYS)  # keys of param_groups that are not loaded


def state_dict(optimizer):
    """In torch's layout: ``state`` by index of the parameter, ``param_groups``, and ``zerofp8``.

    A state's tensors are codes, scales and remainder bits as they lie in memory, under
    ``component@first element``.
    """
    parameters, engine = optimizer._parameters, optimizer._engine
    # State that was loaded before the model's weights must not follow the weights of before.
    awaited = optimizer._watch.awaited()
    if awaited is None:
        optimizer._watch.look()
    index = {id(n.parameter): i for i, n in enumerate(parameters)}
    counters = engine.counters()
    states = {i: {"step": torch.tensor(float(t))} for i, t in enumerate(counters["steps"])}
    for (parameter, name, _, _), data in zip(engine.state_pieces(), engine.read_pieces()):
        states[parameter][name] = _as_tensor(data)
    groups = [{**{k: v for k, v in g.items() if k not in _OF_THE_LAYOUT},
               "params": [index[id(p)] for p in g["params"]]} for g in optimizer.param_groups]
    return {"state": states, "param_groups": groups,
            "zerofp8": {"format": _FORMAT, "counters": counters, "weights": awaited or digest(parameters),
                        **_identity(optimizer)}}


def load_state_dict(optimizer, saved):
    """Check everything, then copy bytes."""
    ours = saved.get("zerofp8")
    if ours is None:
        raise CheckpointError("this state_dict is not one of zerofp8's: it has no key \"zerofp8\"")
    for key, value in {"format": _FORMAT, **_identity(optimizer)}.items():
        if ours.get(key) != value:
            raise CheckpointError(
                f"state_dict: {key.replace('_', ' ')} was {ours.get(key)}, here it is {value}; "
                "a state_dict is for the same ranks and settings: use save() and load() to change "
                "the number of ranks")
    pieces = optimizer._engine.state_pieces()
    for parameter, name, _, size in pieces:
        found = saved["state"].get(parameter, {}).get(name)
        if found is None or found.dtype != torch.uint8 or found.numel() != size:
            shown = ("is missing" if found is None else
                     f"is {found.numel()} x {found.dtype}, not {size} bytes")
            raise CheckpointError(
                f"state_dict: {name} of parameter "
                f"\"{optimizer._parameters[parameter].name}\" {shown}")
    if len(saved["param_groups"]) != len(optimizer.param_groups):
        raise CheckpointError(f"state_dict: {len(saved['param_groups'])} parameter groups, here "
                              f"{len(optimizer.param_groups)}")
    optimizer._engine.write_pieces(
        [saved["state"][parameter][name].cpu().contiguous().numpy()
         for parameter, name, _, _ in pieces])
    optimizer._engine.restore_counters(ours["counters"])
    optimizer._watch.loaded(ours["weights"])
    for group, theirs in zip(optimizer.param_groups, saved["param_groups"]):
        group.update({k: v for k, v in theirs.items() if k not in _OF_THE_LAYOUT})


def _identity(optimizer):
    """What has to be the same where a state_dict is loaded."""
    s, engine = optimizer.settings, optimizer._engine
    return {"data_ranks": s.data_ranks, "data_rank": engine.data_rank(), "stage": s.stage,
            "dtypes": [s.weight, s.master, s.exp_avg, s.exp_avg_sq],
            "shapes": [[n.key, list(n.parameter.shape)] for n in optimizer._parameters]}


def pull_groups(engine, groups):
    """Hyper-parameters of a loaded checkpoint into ``param_groups``."""
    for i, group in enumerate(groups):
        options = engine.get_group(i)
        values = (options.lr, (options.beta1, options.beta2), options.eps, options.weight_decay)
        for key, value in zip(_HYPER, values):
            if key == "lr" and isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(value)
            else:
                group[key] = value


def _as_tensor(data):
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
