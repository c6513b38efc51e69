"""What stands in ``p.grad`` of one parameter after zerofp8 has taken the gradients."""

import weakref

import torch

from .errors import TakenGradientError

_EXPLANATION = (
    "{name} was called on gradients that zerofp8 has taken and freed. For the norm use "
    "optimizer.grad_norm or StepReport.grad_norm; to clip, set \"gradient_clipping\" in the config "
    "and remove the call to clip_grad_norm_; for the gradient itself use "
    "optimizer.full_gradient(parameter)")

_UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_
# What trainers may do with a gradient without computing with it.
_HARMLESS = {"__get__", "__set__", "__repr__", "size", "dim", "numel", "is_contiguous", "stride",
             "detach_", "requires_grad_", "zero_", "is_floating_point", "element_size",
             "untyped_storage", "data_ptr", "storage_offset"}
_IN_PLACE_SCALING = {"div_", "mul_"}


class TakenGradient(torch.Tensor):
    """A gradient of one stored element and a parameter's shape, which answers for all gradients.

    torch's ``GradScaler`` looks for gradients in ``unscale_`` and finds this one: the call is passed
    on to the optimizer, which reduces the real gradients and says whether they are finite. Anything
    that would compute with it (``clip_grad_norm_``) raises TakenGradientError instead of going wrong
    in silence.
    """

    @classmethod
    def of(cls, parameter, owner):
        """A stand-in for `parameter`; `owner` has ``_unscale`` and ``_trainer_scales_grads``."""
        element = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        marker = element.expand(parameter.shape).as_subclass(cls)
        marker.owner = weakref.ref(owner)
        return marker

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", str(func))
        if func is _UNSCALE:
            return _unscale(*args)
        if name in _HARMLESS:
            if name == "zero_":
                return args[0]  # a write into an expanded tensor; it is zero already
            return super().__torch_function__(func, types, args, kwargs or {})
        if name in _IN_PLACE_SCALING and args[0].owner()._trainer_scales_grads:
            return args[0]
        raise TakenGradientError(_EXPLANATION.format(name=f"torch's {name}"))


def _unscale(grads, found_inf, inv_scale):
    owner = next(g.owner() for g in grads if isinstance(g, TakenGradient))
    owner._unscale(found_inf, 1.0 / float(inv_scale))
    others = [g for g in grads if not isinstance(g, TakenGradient)]
    if others:
        _UNSCALE(others, found_inf, inv_scale)
