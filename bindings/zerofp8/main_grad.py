"""Weight gradients that a layer adds into ``p.main_grad`` itself (gradient accumulation fusion).

Megatron's and TransformerEngine's linear layers write there in backward, set
``p.grad_added_to_main_grad`` and give autograd a tensor without meaning in place of the gradient.
"""

import torch

from .errors import ArgumentError, ConfigError
from .parameters import DTYPES


class MainGrads:
    """The parameters that have such a buffer: what is in it is taken as a gradient and zeroed.

    Parameters
    ----------
    parameters : list of NamedParameter
    placement : Host, Cuda or Offload

    Raises
    ------
    ConfigError
        A buffer's shape is not its parameter's, or its dtype is none of fp32, bf16, fp16.
    """

    def __init__(self, parameters, placement):
        self._parameters = parameters
        self._placement = placement
        self._held = dict.fromkeys(
            i for i, n in enumerate(parameters) if hasattr(n.parameter, "main_grad"))
        for index in self._held:
            self._check(parameters[index])
            self._clear(parameters[index].parameter)

    def _check(self, named):
        p, buffer = named.parameter, named.parameter.main_grad
        right = isinstance(buffer, torch.Tensor) and buffer.shape == p.shape
        if not right or buffer.dtype not in DTYPES or buffer.device != p.device:
            shown = f"{tuple(buffer.shape)} {buffer.dtype}" if isinstance(buffer, torch.Tensor) \
                else type(buffer).__name__
            raise ConfigError(
                f"parameter \"{named.name}\".main_grad", shown,
                f"a tensor of shape {tuple(p.shape)} in fp32, bf16 or fp16",
                "allocate it so, or turn gradient accumulation fusion off")

    @staticmethod
    def is_fused(p):
        """Whether this parameter's gradient of the backward pass under way is in its buffer."""
        return getattr(p, "grad_added_to_main_grad", False)

    @staticmethod
    def replaces_grad(p):
        """Whether ``p.grad`` is without meaning: not where another layer has added to zeros."""
        return MainGrads.is_fused(p) and not getattr(p, "zero_out_wgrad", False)

    def take_one(self, index, add):
        """Give one parameter's buffer to ``add(index, tensor)`` and zero it; whether there was one.

        Layers do not set the mark on all ways through them: a buffer that is not zero counts, too.
        """
        p = self._parameters[index].parameter
        if index not in self._held or not (self.is_fused(p) or bool(p.main_grad.any())):
            return False
        add(index, p.main_grad)
        self._placement.release()
        self._clear(p)
        return True

    def take_marked(self, add):
        """At the end of a micro-batch: buffers that no hook has seen."""
        for index in self._held:
            if self.is_fused(self._parameters[index].parameter):
                self.take_one(index, add)

    def any_marked(self):
        return any(self.is_fused(self._parameters[i].parameter) for i in self._held)

    def take_all(self, add):
        """At the step; whether there were any.

        Raises
        ------
        ArgumentError
            A buffer was made after ``initialize``.
        """
        self._look_for_new_ones()
        return any([self.take_one(index, add) for index in self._held])

    def _look_for_new_ones(self):
        for index, named in enumerate(self._parameters):
            if hasattr(named.parameter, "main_grad") and index not in self._held:
                raise ArgumentError(
                    f"parameter \"{named.name}\" got its main_grad after initialize: allocate "
                    "main_grad before, or turn gradient accumulation fusion off")

    def drop(self):
        """Throw away what is in the buffers."""
        for index in self._held:
            self._clear(self._parameters[index].parameter)

    @staticmethod
    def _clear(p):
        p.main_grad.zero_()
        p.grad_added_to_main_grad = False  # there from the start: layers look for it
