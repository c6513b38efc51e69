"""Answers for ``deepspeed.utils.safe_get_full_fp32_param``, ``..._optimizer_state``, ``..._grad``.

These ask each parameter: one with ``_hp_mapping`` is asked ``get_full_hp_param(key)`` for its master
weight (key None) or a moment, and ``get_full_hp_grad()`` for its gradient. All are collective over
the data ranks. ``safe_set_full_fp32_param`` and ``..._optimizer_state`` take the whole tensor on
every rank. ``safe_set_full_grad`` and the ``safe_*_local_*`` ones are refused.
"""

import weakref

from ..errors import UnsupportedError

_KINDS = {None: "master", "fp32": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_NAMES = ("_hp_mapping", "get_full_hp_param", "get_full_hp_grad", "set_full_hp_param",
          "set_full_hp_grad")


class _Mapping:
    """Says that the parameter can be asked; DeepSpeed's addresses in flat buffers do not exist."""

    def __getattr__(self, name):
        raise UnsupportedError(f"deepspeed.utils (_hp_mapping.{name})", "a fragment of a flat buffer",
                               "safe_get_full_fp32_param, safe_get_full_optimizer_state, "
                               "safe_get_full_grad", "use one of these")


def attach(optimizer, parameters):
    """Let `parameters` answer for `optimizer`, a ``zerofp8.Optimizer``, which they do not hold."""
    owner = weakref.ref(optimizer)
    for p in parameters:
        me = weakref.ref(p)  # a parameter that held itself would live until the next collection

        def get_full_hp_param(optim_state_key=None, me=me):
            return owner().full_state(me(), _kind_of(optim_state_key))

        def set_full_hp_param(value, optim_state_key=None, me=me):
            owner().set_full_state(me(), _kind_of(optim_state_key), value)

        def get_full_hp_grad(me=me):
            return owner().full_gradient(me())

        def refuse(*unused):
            raise UnsupportedError(
                "deepspeed.utils.safe_set_full_grad", "a gradient", "reading it",
                "change the loss: gradients are taken and added up as backward makes them")

        p._hp_mapping = _Mapping()
        p.get_full_hp_param, p.get_full_hp_grad = get_full_hp_param, get_full_hp_grad
        p.set_full_hp_param, p.set_full_hp_grad = set_full_hp_param, refuse


def _kind_of(key):
    if key not in _KINDS:
        raise UnsupportedError("deepspeed.utils.safe_*_full_optimizer_state", f"\"{key}\"",
                               "exp_avg, exp_avg_sq", "ask for one of these")
    return _KINDS[key]


def detach(parameters):
    """Take back what ``attach`` has given."""
    for p in parameters:
        for name in _NAMES:
            if hasattr(p, name):
                delattr(p, name)
