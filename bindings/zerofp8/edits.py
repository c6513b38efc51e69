"""What a trainer does to gradients between backward and step, although they are taken and freed.

A gradient that it removes (``p.grad = None``) is discarded by the engine. One that it zeroes counts
as a gradient of zeros, as in torch: weight decay and moments go on. Norms come from the engine,
and factors are kept until the step, where the update multiplies by them.
"""

import logging
import math
import weakref

from . import integrations
from .errors import ArgumentError

logger = logging.getLogger("zerofp8")
_KINDS = {2: "two", 2.0: "two", "fro": "two", None: "two", math.inf: "inf"}


class TrainerEdits:
    """The edits of one step.

    Parameters
    ----------
    optimizer : zerofp8.Optimizer
        It holds this, and not the other way round.
    """

    def __init__(self, optimizer):
        self._owner = weakref.ref(optimizer)
        self._warned = False
        self.forget()

    @property
    def _optimizer(self):
        return self._owner()

    def forget(self):
        """A step has been made, or everything was discarded."""
        self._zeroed = set()   # indices, since the last backward pass
        self._factors = {}     # by index
        self._clips = {}       # factors that were tensors: clip_grad_norm_ computes such ones
        self._norms = {}       # by kind, then index

    @staticmethod
    def kind_of(norm_type):
        """The engine's name of a norm; None if it has none."""
        try:
            return _KINDS.get(norm_type)
        except TypeError:
            return None

    def norm(self, index, kind):
        """Of the averaged gradient as the trainer has left it. The first call is collective."""
        if kind not in self._norms:
            self._optimizer._reduce_now()
            self._norms[kind] = self._optimizer._engine.gradient_norms(kind)
        if index in self._zeroed:
            return 0.0
        factor = self._factors.get(index, 1.0) * self._clips.get(index, 1.0)
        return self._norms[kind][index] * abs(factor)

    def scale(self, index, factor, is_tensor):
        """Multiply a gradient by a number."""
        if self._optimizer._trainer_scales_grads:
            return  # the engine divides
        if factor == 0:
            self.zero(index)
            return
        kept = self._clips if is_tensor else self._factors
        kept[index] = kept.get(index, 1.0) * factor

    def zero(self, index):
        self._optimizer._engine.discard_gradient(index, True)
        self._zeroed.add(index)
        self._factors.pop(index, None)
        self._clips.pop(index, None)

    def settle(self, taker, at_step):
        """Tell the engine what was removed or replaced since the last backward pass.

        Parameters
        ----------
        taker : GradientTaker
        at_step : bool
            False: another backward pass begins, which adds to what is left.
        """
        if not at_step and (self._factors or self._clips):
            index = next(iter({**self._factors, **self._clips}))
            raise ArgumentError(
                f"the gradient of parameter \"{taker.parameters[index].name}\" was scaled or "
                "clipped between two backward passes of a step, and the next one would add to it: "
                "scale the losses, or clip after the last backward pass")
        for index in taker.cancelled():
            self._optimizer._engine.discard_gradient(index)
            taker.forget(index)
        if not at_step:
            self._zeroed.clear()

    def apply(self):
        """Hand the factors to the engine, which reduces before; nothing where there are none."""
        factors = dict(self._factors)
        if self._clips and integrations.clips_itself(self._optimizer.settings):
            self._warn()
        else:
            for index, factor in self._clips.items():
                factors[index] = factors.get(index, 1.0) * factor
        if not factors:
            return
        self._optimizer._reduce_now()
        engine = self._optimizer._engine
        if math.isnan(engine.grad_norm()):
            return  # the step will be skipped, and factors that came of the norm are NaN
        for index in sorted(factors):
            if factors[index] != 1:
                engine.scale_gradient(index, factors[index])

    def _warn(self):
        if not self._warned:
            self._warned = True
            logger.warning(
                "zerofp8: the trainer clips gradients, and so does the config "
                "(/gradient_clipping %g): the config's clipping is used; remove one of the two",
                self._optimizer.settings.gradient_clipping)
