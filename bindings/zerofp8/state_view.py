"""``optimizer.state``: what this rank holds, decoded when it is asked for."""

import weakref
from collections.abc import MutableMapping

import torch

from .errors import UnsupportedError
from .state import packed_entry
from .whole_state import dtypes_of

_MOMENTS = ("exp_avg", "exp_avg_sq")


_HOOKS = ("step_pre", "step_post", "state_dict_pre", "state_dict_post", "load_state_dict_pre",
          "load_state_dict_post")


def carry_hooks(template, optimizer):
    """Hooks that were registered on the template are the optimizer's; their handles stay good."""
    for kind in _HOOKS:
        name = f"_optimizer_{kind}_hooks"
        setattr(optimizer, name, getattr(template, name))


class _ReadOnly(MutableMapping):
    """A mapping whose writes say where state is written instead."""

    def _refuse(self, *unused):
        raise UnsupportedError(
            "optimizer.state", "a write: state is held in the engine, in its own formats",
            "reading", "load_state_dict() or load() writes state; full_state(p) gives it whole")

    __setitem__ = __delitem__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse


class StateView(_ReadOnly):
    """By parameter, for all of them, from the start.

    Code that asks whether there is state (torch.distributed.checkpoint) takes no step to make it.
    """

    def __init__(self, optimizer):
        self._optimizer = weakref.ref(optimizer)

    def _parameters(self):
        optimizer = self._optimizer()
        return [] if optimizer is None else [n.parameter for n in optimizer._parameters]

    def __getitem__(self, parameter):
        optimizer = self._optimizer()
        index = None if optimizer is None else optimizer._index.get(id(parameter))
        if index is None:
            raise KeyError(parameter)
        return ParameterState(optimizer, index)

    def __contains__(self, parameter):
        return any(parameter is p for p in self._parameters())

    def __iter__(self):
        return iter(self._parameters())

    def __len__(self):
        return len(self._parameters())

    def __repr__(self):
        return f"StateView({len(self)} parameters: step, exp_avg, exp_avg_sq each)"


class ParameterState(_ReadOnly):
    """``step``, ``exp_avg``, ``exp_avg_sq`` of one parameter as FP32 tensors.

    Of the parameter's shape where all of it is here, else with one dimension: this rank's elements
    (none where other ranks have it). ``master``, too, where weights have more bits than the model
    holds. ``zerofp8`` is what else ``state_dict`` keeps of it.
    """

    def __init__(self, optimizer, index):
        self._optimizer, self._index = optimizer, index

    def __iter__(self):
        named = self._optimizer._parameters[self._index]
        master = ["master"] if "master" in dtypes_of(self._optimizer.settings, named.parameter) else []
        return iter(["step", *_MOMENTS, *master, "zerofp8"])

    def __len__(self):
        return sum(1 for _ in self)

    def __getitem__(self, key):
        if key not in list(self):
            raise KeyError(key)
        engine = self._optimizer._engine
        if key == "step":
            return torch.tensor(float(engine.step_of(self._index)))
        if key == "zerofp8":
            return packed_entry(self._optimizer, self._index)
        if key == "master":
            self._optimizer._watch.look()
        parts = engine.own_state(self._index, key)
        like = self._optimizer._parameters[self._index].parameter
        values = [torch.frombuffer(bytearray(data), dtype=torch.float32) for _, data in parts]
        whole = torch.cat(values) if values else torch.zeros(0)
        if whole.numel() == like.numel():
            whole = whole.reshape(like.shape)
        return whole.to(like.device)

    def __setitem__(self, key, value):
        # Lightning writes what it has read, "moved" to the device where it is.
        if key not in list(self) or not _same(self[key], value):
            self._refuse()

    def __repr__(self):
        return f"ParameterState({', '.join(self)} of parameter {self._index})"


def _same(held, given):
    if isinstance(held, torch.Tensor):
        return isinstance(given, torch.Tensor) and torch.equal(held, given.to(held.device))
    if isinstance(held, dict):
        return isinstance(given, dict) and held.keys() == given.keys() and all(
            _same(value, given[key]) for key, value in held.items())
    return held == given
