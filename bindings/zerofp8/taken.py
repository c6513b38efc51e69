"""What stands in ``p.grad`` after zerofp8 has taken the gradients."""

import torch

from .errors import TakenGradientError

_EXPLANATION = (
    "{name} was called on gradients that zerofp8 has taken and freed. Allowed: their norms of type 2 "
    "and inf, multiplying or dividing them by a number, zeroing or removing them, as "
    "torch.nn.utils.clip_grad_norm_ does. For elements use optimizer.full_gradient(parameter) "
    "between backward and step; in place of clip_grad_value_ clip by the norm, or set "
    "/gradient_clipping in the config")

_UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_
# What trainers may do with a gradient without computing with it.
_HARMLESS = {"__get__", "__set__", "__repr__", "size", "dim", "numel", "is_contiguous", "stride",
             "detach", "requires_grad_", "is_floating_point", "element_size",
             "untyped_storage", "data_ptr", "storage_offset",
             # Module._apply: what a clean-up after an exception does; weights that were replaced
             # are an error of the next step.
             "to", "_apply", "float", "double", "half", "bfloat16", "cpu", "cuda", "type",
             "share_memory_", "empty_like"}
_NORMS = {"norm", "vector_norm", "linalg_vector_norm", "_foreach_norm"}
_SCALING = {"div_", "mul_", "__imul__", "__itruediv__", "_foreach_mul_", "_foreach_div_"}


class TakenGradient(torch.Tensor):
    """A gradient of one stored element and a parameter's shape: there was a gradient, it is taken.

    What trainers ask of gradients is answered by the optimizer: norms, factors, zeroing, and
    ``GradScaler.unscale_``, see edits.py. Anything else that would compute with one raises
    TakenGradientError instead of going wrong in silence.
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name, kwargs = getattr(func, "__name__", str(func)), kwargs or {}
        if func is _UNSCALE:
            return _unscale(*args)
        if name == "detach_":  # views refuse it
            return args[0]
        if name in _HARMLESS:
            return _same_owner(super().__torch_function__(func, types, args, kwargs), args)
        if name == "_has_compatible_shallow_copy_type":
            return False  # Module._apply: another object stands in then, and this one stays as it is
        if name in _NORMS:
            return _norms(name, func, args, kwargs)
        if name in _SCALING and len(args) == 2:
            return _scale(name, func, args)
        if _zeroes(name, args, kwargs):
            return _zero(func, args)
        raise _refused(f"torch's {name}")


def _refused(name):
    return TakenGradientError(_EXPLANATION.format(name=name))


def _same_owner(result, args):
    """What ``p.grad.data`` and ``p.grad.detach()`` give stands for the same gradient."""
    if isinstance(result, TakenGradient) and args and isinstance(args[0], TakenGradient):
        for name in ("stand_ins", "index"):
            if name in args[0].__dict__:
                setattr(result, name, args[0].__dict__[name])
    return result


def _edits_of(gradient, name):
    stand_ins = gradient.__dict__.get("stand_ins")
    if stand_ins is None or stand_ins.owner() is None:  # of an optimizer that is gone, or a copy
        raise _refused(name)
    return stand_ins.owner()._edits


def _norms(name, func, args, kwargs):
    """Norms by the engine; of ordinary tensors beside them (a list of gradients) by torch."""
    kind = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
    many = isinstance(args[0], (list, tuple))
    unknown = [k for k, v in kwargs.items() if k not in ("ord", "p", "dtype")
               and v is not None and v is not False]
    found = []
    for g in (args[0] if many else [args[0]]):
        if not isinstance(g, TakenGradient):
            found += func([g], *args[1:], **kwargs) if many else [func(g, *args[1:], **kwargs)]
            continue
        edits = _edits_of(g, f"torch's {name}")
        if unknown or len(args) > 2 or edits.kind_of(kind) is None:
            raise _refused(f"torch's {name} of type {kind}")
        norm = edits.norm(g.index, edits.kind_of(kind))
        dtype = kwargs.get("dtype") or torch.float32
        found.append(torch.tensor(norm, dtype=dtype, device=g.device))
    return found if many else found[0]


def _scale(name, func, args):
    many = isinstance(args[0], (list, tuple))
    gradients = args[0] if many else [args[0]]
    factors = args[1] if isinstance(args[1], (list, tuple)) else [args[1]] * len(gradients)
    for g, factor in zip(gradients, factors):
        single = not isinstance(factor, torch.Tensor) or factor.numel() == 1
        if not isinstance(g, TakenGradient):
            func([g], [factor]) if many and isinstance(args[1], (list, tuple)) else \
                func([g], factor) if many else func(g, factor)
            continue
        if not single or isinstance(factor, TakenGradient):
            raise _refused(f"torch's {name} with a tensor of several elements")
        by = float(factor)
        if "div" in name:
            by = 1.0 / by if by != 0 else float("inf")
        _edits_of(g, f"torch's {name}").scale(g.index, by, isinstance(factor, torch.Tensor))
    return None if many else args[0]


def _zeroes(name, args, kwargs):
    if name in ("zero_", "_foreach_zero_"):
        return True
    value = args[1] if len(args) > 1 else kwargs.get("value")
    if name == "fill_":
        return not isinstance(value, TakenGradient) and float(value) == 0
    return name == "copy_" and not isinstance(value, TakenGradient) and not bool(value.any())


def _zero(func, args):
    many = isinstance(args[0], (list, tuple))
    for g in (args[0] if many else [args[0]]):
        if isinstance(g, TakenGradient):
            _edits_of(g, "zeroing").zero(g.index)
        else:
            func([g], *args[1:])
    return None if many else args[0]


class StandIns:
    """The TakenGradients of one optimizer's parameters.

    Parameters
    ----------
    parameters : list of torch.nn.Parameter
    """

    def __init__(self, parameters):
        self.owner = lambda: None    # the optimizer, which has ``_unscale``
        self._parameters = parameters
        self._placed = set()         # indices
        self._elements = {}          # by dtype and device
        self._made = {}              # by index: what a stand-in has to fit, and the stand-in
        self.looks = True            # into one-element stand-ins, for gradients that were added there
        self._bad = None             # what the optimizer has said to GradScaler

    def place(self, indices):
        """Into ``p.grad`` of these parameters where it is None; whether any has a stand-in."""
        self._bad = None
        for index in indices:
            p = self._parameters[index]
            if p.grad is None:
                p.grad = self._of(index, p)
                self._placed.add(index)
        return bool(self._placed)

    def holds(self, index):
        """Whether the stand-in of this parameter was placed; it may be gone since."""
        return index in self._placed

    def gone(self):
        """Indices of those that somebody else has removed or replaced."""
        return [i for i in self._placed
                if not isinstance(self._parameters[i].grad, TakenGradient)]

    def _of(self, index, p):
        key = (p.shape, p.dtype, p.device)
        known = self._made.get(index)
        if known is not None and known[0] == key:
            return known[1]
        # autograd adds in place to one element where several fail: such a one is not shared.
        element = self._elements.get(key[1:]) if p.numel() != 1 else None
        if element is None:
            element = torch.zeros((), dtype=p.dtype, device=p.device)
        marker = element.expand(p.shape).as_subclass(TakenGradient)
        marker.stand_ins, marker.index = self, index
        if p.numel() != 1:
            self._elements[key[1:]] = element
            self._made[index] = key, marker
        return marker

    def written(self, index):
        """Whether autograd or somebody else has added to a stand-in."""
        p = self._parameters[index]
        if not self.looks or p.numel() != 1 or not isinstance(p.grad, TakenGradient):
            return False
        with torch._C.DisableTorchFunctionSubclass():
            return bool(p.grad.any())

    def remove_all(self):
        """Out of ``p.grad``."""
        for index in self._placed:
            remove_from(self._parameters[index])
        self._placed = set()

    def unscale(self, found_inf, inv_scale):
        """GradScaler calls it per device and dtype; the optimizer is asked once."""
        if self._bad is None:
            self.owner()._unscale(found_inf, 1.0 / float(inv_scale))
            self._bad = bool(found_inf)
        elif self._bad:
            found_inf.fill_(1.0)


def remove_from(p):
    """Before autograd adds to ``p.grad`` in place."""
    if isinstance(p.grad, TakenGradient):
        p.grad = None


def _unscale(grads, found_inf, inv_scale):
    stand_ins = next(getattr(g, "stand_ins", None) for g in grads if isinstance(g, TakenGradient))
    if stand_ins is None or stand_ins.owner() is None:
        raise _refused("GradScaler.unscale_")
    stand_ins.unscale(found_inf, inv_scale)
    others = [g for g in grads if not isinstance(g, TakenGradient)]
    if others:
        _UNSCALE(others, found_inf, inv_scale)
