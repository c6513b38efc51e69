"""One rank's part of the state, as earlier versions gave it and as DeepSpeed's files per rank hold it."""

import torch

from . import reduce_groups
from .errors import CheckpointError
from .weights import digest

_FORMAT = 1
_OF_THE_LAYOUT = ("params", *reduce_groups.KEYS)  # keys of param_groups that are not loaded


def part(optimizer):
    """This rank's part: ``state`` by index of the parameter, ``param_groups``, and ``zerofp8``.

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


def load_part(optimizer, saved):
    """Check everything, then copy bytes."""
    ours = saved["zerofp8"]
    for key, value in {"format": _FORMAT, **_identity(optimizer)}.items():
        if ours.get(key) != value:
            raise CheckpointError(
                f"state_dict: {key.replace('_', ' ')} was {ours.get(key)}, here it is {value}; "
                "one rank's part is for the same ranks and settings: use save() and load() to change "
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
    with optimizer._shards.loading():
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


def _as_tensor(data):
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
