"""States of torch's Adam and AdamW: taking over in the middle of training, and handing back."""

import torch

from .errors import ArgumentError, CheckpointError

_MOMENTS = ("exp_avg", "exp_avg_sq")


def check(parameters, entries):
    """Refuse what is not a state of torch's Adam for these parameters.

    Parameters
    ----------
    parameters : list of NamedParameter
    entries : dict of int to dict
        ``step``, ``exp_avg``, ``exp_avg_sq`` by the engine's index; one without an entry begins anew.
    """
    for index, entry in entries.items():
        named = parameters[index]
        shape = tuple(named.parameter.shape)
        if "max_exp_avg_sq" in entry:
            raise CheckpointError(f"state of parameter \"{named.name}\" has max_exp_avg_sq (amsgrad), "
                                  "which zerofp8 does not keep; remove it to go on without")
        absent = [k for k in ("step", *_MOMENTS) if k not in entry]
        if absent:
            raise CheckpointError(f"state of parameter \"{named.name}\" has no {absent[0]} (it has "
                                  f"{', '.join(map(str, entry))}): neither zerofp8's nor torch's Adam's")
        for kind in _MOMENTS:
            found = tuple(entry[kind].shape)
            if found != shape or not entry[kind].is_floating_point():
                raise CheckpointError(f"{kind} of parameter \"{named.name}\" is {entry[kind].dtype} "
                                      f"of shape {found}; allowed: floats of shape {shape}")
        if not bool((entry["exp_avg_sq"] >= 0).all()):
            raise CheckpointError(f"exp_avg_sq of parameter \"{named.name}\" has values that are not "
                                  "0 or above")


def write(optimizer, entries):
    """Take over what torch's optimizer has: each rank encodes its own part, rounded to nearest.

    The hyper-parameters have to be the engine's already. Masters stay.
    """
    if not entries:
        reset(optimizer)
        return
    engine, steps = optimizer._engine, []
    with optimizer._shards.loading():
        for index, named in enumerate(optimizer._parameters):
            entry = entries.get(index)
            for kind in _MOMENTS:
                values = entry[kind] if entry else torch.zeros(named.parameter.shape)
                engine.set_full_state(index, kind, as_floats(values))
            steps.append(int(entry["step"]) if entry else 0)
            engine.set_step(index, steps[-1])
        engine.restore_counters({**engine.counters(), "applied": max(steps), "skipped": 0})


def of_template(template, index_of):
    """The state of an optimizer of torch's that has stepped already, by the engine's index."""
    return {index_of[id(p)]: entry for p, entry in template.state.items()
            if id(p) in index_of and len(entry) > 0}


def as_floats(values):
    """As the engine takes them."""
    return values.detach().to("cpu", torch.float32).contiguous().reshape(-1).numpy()


def reset(optimizer, counters=None):
    """State as it was at the start: zero moments, step 0, and masters that are the weights.

    Parameters
    ----------
    counters : dict, optional
        Of the engine, at that start; default: all steps 0, and the loss scale as it is.
    """
    if optimizer._shards.is_fresh():
        return
    engine = optimizer._engine
    if counters is None:
        counters = {**engine.counters(), "applied": 0, "skipped": 0, "clean_steps": 0}
        for key in ("steps", "guard_c"):
            counters[key] = [0] * len(counters[key])
    with optimizer._shards.loading():
        engine.write_pieces([bytes(size) for _, _, _, size in engine.state_pieces()])
        engine.restore_counters(counters)
    optimizer.weights_changed()


def export(optimizer, groups, order):
    """A ``state_dict`` of torch's AdamW; collective. Parameters that have not stepped have no entry.

    Parameters
    ----------
    groups : list of dict
        ``param_groups``, with numbers in place of parameters.
    order : list of int
        The engine's index of each number.
    """
    states = {}
    for number, index in enumerate(order):
        step = optimizer._engine.step_of(index)
        moments = {kind: optimizer._full(index, kind).cpu() for kind in _MOMENTS}
        if step > 0:
            states[number] = {"step": torch.tensor(float(step)), **moments}
    return {"state": states, "param_groups": groups}


def masters(optimizer):
    """FP32 weights by name; collective."""
    optimizer._watch.look()
    return {n.name: optimizer._full(i, "master").cpu() for i, n in enumerate(optimizer._parameters)}


def load_masters(optimizer, weights):
    """Weights and masters become these numbers; each rank is given all of them."""
    for named in optimizer._parameters:
        found = weights.get(named.name)
        if found is None or tuple(found.shape) != tuple(named.parameter.shape):
            shown = "missing" if found is None else f"of shape {tuple(found.shape)}"
            raise CheckpointError(f"load_masters: parameter \"{named.name}\" is {shown}; allowed: one "
                                  f"of shape {tuple(named.parameter.shape)}")
    optimizer._watch.check()
    with optimizer._shards.loading():
        for index, named in enumerate(optimizer._parameters):
            optimizer._engine.set_full_state(index, "master", as_floats(weights[named.name]))
    optimizer._watch.updated()


def set_whole(optimizer, index, kind, values):
    """One parameter's master, exp_avg or exp_avg_sq, whole, given on every rank."""
    shape = optimizer._parameters[index].parameter.shape
    if values.shape != shape:
        raise ArgumentError(f"set_full_state: given a tensor of shape {tuple(values.shape)}; "
                            f"allowed: {tuple(shape)}")
    optimizer._watch.look()
    with optimizer._shards.loading():
        optimizer._engine.set_full_state(index, kind, as_floats(values))
    if kind == "master":  # the weight, too
        optimizer._watch.updated()
