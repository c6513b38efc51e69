"""States of torch's Adam and AdamW: taking over in the middle of training, and handing back."""

from .errors import CheckpointError


def load(optimizer, entries):
    """Take over what torch's optimizer has: ``step``, ``exp_avg``, ``exp_avg_sq``.

    Parameters
    ----------
    entries : dict of int to dict
        By the engine's index; one without an entry begins anew.
    """
    if entries:
        raise CheckpointError("this state_dict is not one of zerofp8's")
    reset(optimizer)


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
