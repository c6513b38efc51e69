"""``state_dict`` and ``load_state_dict``: the whole state, in torch's layout."""

from itertools import chain

import torch

from . import reduce_groups, torch_state
from .errors import CheckpointError
from .parameters import adam_options
from .state_part import load_part
from .weights import digest
from .whole_state import FRESH, Places, WholeState, dtypes_of, pack, unpack

_HYPER = ("lr", "betas", "eps", "weight_decay")
_OF_THE_LAYOUT = ("params", *reduce_groups.KEYS)  # keys of param_groups that are not loaded


def places_of(optimizer):
    """Where each parameter's pieces lie in its whole state, in the engine's order."""
    s = optimizer.settings
    return [Places(dtypes_of(s, n.parameter), n.parameter.numel(), s.block_size)
            for n in optimizer._parameters]


def torchs_order(optimizer):
    """The engine's index of each parameter, in the order of ``param_groups``."""
    return [optimizer._index[id(p)] for p in chain(*(g["params"] for g in optimizer.param_groups))]


def state_dict(optimizer):
    """The whole state, on any rank.

    ``state`` by index of the parameter, in torch's order: ``step``; ``exp_avg``, ``exp_avg_sq`` and
    ``master`` as bytes (codes, then scales); ``zerofp8``, what else belongs to them.
    """
    watch = optimizer._watch
    # State that was loaded before the model's weights must not follow the weights of before.
    awaited = watch.awaited()
    if awaited is None:
        watch.look()
    optimizer._watch.check()
    fresh = optimizer._shards.is_fresh()
    places = places_of(optimizer)
    whole = WholeState(places) if fresh else optimizer._shards.whole(places)
    weights = FRESH if fresh else bytes.fromhex(awaited or digest(optimizer._parameters))
    counters, states = optimizer._engine.counters(), {}
    for i, index in enumerate(torchs_order(optimizer)):
        states[i] = {"step": torch.tensor(float(counters["steps"][index])), **whole.entries[index],
                     "zerofp8": pack(counters, index, weights, _about(optimizer, index))}
    return {"state": states, "param_groups": packed_groups(optimizer)}


def packed_groups(optimizer):
    """``param_groups`` with numbers in place of parameters."""
    groups, first = [], 0
    for group in optimizer.param_groups:
        kept = {k: v for k, v in group.items() if k not in _OF_THE_LAYOUT}
        groups.append({**kept, "params": list(range(first, first + len(group["params"])))})
        first += len(group["params"])
    return groups


def packed_entry(optimizer, index):
    """``state_dict()["state"][i]["zerofp8"]`` of a parameter, of this moment."""
    weights = bytes.fromhex(optimizer._watch.awaited() or digest(optimizer._parameters))
    return pack(optimizer._engine.counters(), index, weights, _about(optimizer, index))


def _about(optimizer, index):
    named = optimizer._parameters[index]
    return {"name": named.key, "shape": list(named.parameter.shape),
            "block": optimizer.settings.block_size, "weight": str(named.parameter.dtype),
            "dtypes": dtypes_of(optimizer.settings, named.parameter)}


def load_state_dict(optimizer, saved):
    """Check everything, then copy bytes: of this format, of one rank's part, or of torch's Adam."""
    if "zerofp8" in saved:
        return load_part(optimizer, saved)
    _check_groups(optimizer, saved)
    entries = {}  # by the engine's index
    numbers = chain(*(g["params"] for g in saved["param_groups"]))
    for number, index in zip(numbers, torchs_order(optimizer)):
        if number in saved["state"]:
            entries[index] = saved["state"][number]
    if any("zerofp8" in e for e in entries.values()):
        _load_whole(optimizer, entries)
        load_groups(optimizer, saved["param_groups"])
        return
    torch_state.check(optimizer._parameters, entries)
    load_groups(optimizer, saved["param_groups"])
    optimizer._push_groups()
    torch_state.write(optimizer, entries)


def _check_groups(optimizer, saved):
    absent = [k for k in ("state", "param_groups") if k not in saved]
    if absent:
        raise CheckpointError(f"state_dict: has no key \"{absent[0]}\"")
    theirs, ours = ([len(g["params"]) for g in groups]
                    for groups in (saved["param_groups"], optimizer.param_groups))
    if theirs != ours:
        raise CheckpointError(f"state_dict: parameter groups of {theirs} parameters, here of {ours}")
    for i, (group, theirs) in enumerate(zip(optimizer.param_groups, saved["param_groups"])):
        adam_options({**group, **theirs}, i, optimizer._decoupled)


def load_groups(optimizer, saved):
    """Hyper-parameters and whatever else the saved groups have; a tensor lr stays the same one."""
    for group, theirs in zip(optimizer.param_groups, saved):
        for key, value in theirs.items():
            if key in _OF_THE_LAYOUT:
                continue
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(float(value))
            else:
                group[key] = value


def _load_whole(optimizer, entries):
    engine, places = optimizer._engine, places_of(optimizer)
    counters, weights, digests = engine.counters(), None, set()
    for index, named in enumerate(optimizer._parameters):
        if index not in entries:
            if named.parameter.requires_grad:
                raise CheckpointError(f"state_dict: has nothing of parameter \"{named.name}\"")
            continue  # torch.distributed.checkpoint leaves frozen parameters out
        run, weights = _check_entry(optimizer, index, entries[index], places[index])
        counters["steps"][index], counters["guard_c"][index] = run.pop("step"), run.pop("guard_c")
        counters.update(run)
        digests.add(weights)
    if len(digests) > 1:
        raise CheckpointError("state_dict: its parameters are of different saves")
    if weights == FRESH:
        return torch_state.reset(optimizer, counters)
    pieces, values = engine.state_pieces(), []
    kept = {}
    for number, (index, name, _, size) in enumerate(pieces):
        if index in entries:
            kind, begin = places[index].of(name)
            part = entries[index][kind][begin:begin + size]
            values.append(part.cpu().contiguous().numpy())
        else:
            kept[number] = len(values)
            values.append(None)
    for number, data in zip(kept, engine.read_pieces(list(kept))):
        values[number] = data
    with optimizer._shards.loading():
        engine.write_pieces(values)
        engine.restore_counters(counters)
    optimizer._watch.loaded(weights.hex())


def _check_entry(optimizer, index, entry, places):
    named = optimizer._parameters[index]
    if "zerofp8" not in entry:
        raise CheckpointError(f"state_dict: state of parameter \"{named.name}\" has no \"zerofp8\"")
    run, weights, about = unpack(entry["zerofp8"], f"state of parameter \"{named.name}\"")
    for key, ours in _about(optimizer, index).items():
        if about.get(key) != ours:
            raise CheckpointError(
                f"state_dict: {key} of parameter \"{named.name}\" was {about.get(key)}, here it is "
                f"{ours}; a state_dict is for the same model and formats: use the same config and "
                "opt_level, or save torch_state_dict(), which is FP32")
    for kind, size in places.sizes.items():
        found = entry.get(kind)
        if found is None or found.dtype != torch.uint8 or found.numel() != size:
            shown = ("is missing" if found is None else
                     f"is {found.numel()} x {found.dtype}, not {size} bytes")
            raise CheckpointError(f"state_dict: {kind} of parameter \"{named.name}\" {shown}")
    return run, weights


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
