"""What stands in ``p.grad`` after zerofp8 has taken the gradients."""

import torch

from .errors import TakenGradientError

_EXPLANATION = (
    "{name} was called on gradients that zerofp8 has taken and freed. For the norm use "
    "optimizer.grad_norm or StepReport.grad_norm; to clip, set \"gradient_clipping\" in the config "
    "and remove the call to clip_grad_norm_; for the gradient itself use "
    "optimizer.full_gradient(parameter)")
_CONVERSION = (
    "{name} was called on gradients that zerofp8 has taken and freed: model.to(), model.half() and "
    "others that go through Module._apply convert gradients, too. Convert the model before "
    "zerofp8.initialize; between backward and optimizer.step() it has to stay as it is")

_UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_
# What trainers may do with a gradient without computing with it.
_HARMLESS = {"__get__", "__set__", "__repr__", "size", "dim", "numel", "is_contiguous", "stride",
             "detach_", "requires_grad_", "zero_", "is_floating_point", "element_size",
             "untyped_storage", "data_ptr", "storage_offset"}
_IN_PLACE_SCALING = {"div_", "mul_"}
_CONVERTING = {"to", "_apply", "float", "double", "half", "bfloat16", "cpu", "cuda", "type",
               "share_memory_", "to_empty"}


class TakenGradient(torch.Tensor):
    """A gradient of one stored element and a parameter's shape: there was a gradient, it is taken.

    torch's ``GradScaler`` looks for gradients in ``unscale_`` and finds these: the call is passed
    on to the optimizer, which reduces the real gradients and says whether they are finite. Anything
    that would compute with one (``clip_grad_norm_``) raises TakenGradientError instead of going
    wrong in silence.
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", str(func))
        if func is _UNSCALE:
            return _unscale(*args)
        if name in _HARMLESS:
            if name == "zero_":
                return args[0]  # a write into an expanded tensor; it is zero already
            return super().__torch_function__(func, types, args, kwargs or {})
        if name in _IN_PLACE_SCALING:
            # What p.grad.data gives is of this class, too, but belongs to nobody.
            stand_ins = getattr(args[0], "stand_ins", None)
            owner = stand_ins.owner() if stand_ins is not None else None
            if owner is not None and owner._trainer_scales_grads:
                return args[0]
        text = _CONVERSION if name in _CONVERTING else _EXPLANATION
        raise TakenGradientError(text.format(name=f"torch's {name}"))


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
        marker.stand_ins = self
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
        """Out of ``p.grad``; the indices where somebody else has done so already."""
        gone = []
        for index in self._placed:
            p = self._parameters[index]
            if isinstance(p.grad, TakenGradient):
                p.grad = None
            else:
                gone.append(index)
        self._placed = set()
        return gone

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
        raise TakenGradientError(_EXPLANATION.format(name="GradScaler.unscale_"))
    stand_ins.unscale(found_inf, inv_scale)
    others = [g for g in grads if not isinstance(g, TakenGradient)]
    if others:
        _UNSCALE(others, found_inf, inv_scale)
