"""Sees a model's forward passes, and from its outputs where backward passes begin."""

import weakref

import torch

from . import ddp


class OutputWatcher:
    """A forward hook; it holds neither of the two, and copies of the model have none.

    Parameters
    ----------
    taker : weakref.ref of GradientTaker
    module : torch.nn.Module
    """

    def __init__(self, taker, module):
        self._taker = taker
        self._watched = weakref.ref(module)

    def __call__(self, module, inputs, output):
        if module is not self._watched() or not torch.is_grad_enabled():
            return
        taker = self._taker()
        if taker is None:
            return
        ddp.look(taker)
        taker.hook_new_parameters()
        for tensor in _tensors_of(output):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(_backward_begins(self._taker, _leaf(tensor.grad_fn)))
                return

    def __reduce__(self):
        # torch.save(model), copy.deepcopy(model): this optimizer is not part of the copy.
        return NoWatcher, ()


class NoWatcher:
    """In place of an OutputWatcher in copies."""

    def __call__(self, module, inputs, output):
        pass


def watched_modules(model):
    """Those whose forward is called: a ModuleList of pipeline stages has none itself."""
    if type(model).forward is torch.nn.Module.forward:
        return list(model.children())
    return [model]


def _backward_begins(taker, leaf):
    def begins(grad):
        if taker() is not None:
            taker().announce(lambda: _is_whole(leaf))

    return begins


def _leaf(node):
    # Not the output's own node: it holds the hook, which would hold it.
    while node is not None and not hasattr(node, "variable"):
        node = next((n for n, _ in node.next_functions if n is not None), None)
    return node


def _is_whole(leaf):
    """Whether the pass under way is ``backward()``, not ``autograd.grad`` of some inputs."""
    try:
        return leaf is not None and torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # autograd.grad of just this leaf
        return False


def _tensors_of(output):
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors_of(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors_of(value)
