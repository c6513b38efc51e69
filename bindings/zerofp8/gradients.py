"""Takes gradients from autograd as soon as they are accumulated, and finds micro-batch ends."""

import weakref
from contextlib import contextmanager

import torch

from .errors import ArgumentError, ConfigError
from .main_grad import MainGrads
from .parameters import DTYPES, check_forward
from .taken import TakenGradient


class GradientTaker:
    """Hooks on parameters and on the model.

    A parameter's hook gives its gradient to the engine and sets ``p.grad = None``. The end of a
    backward pass is a micro-batch's end; re-entrant checkpointing runs backward passes inside of
    one, so that the outer one is announced by a hook on the model's output where there is one.

    Parameters
    ----------
    engine : zerofp8._C.Engine
    parameters : list of NamedParameter
        In the engine's order.
    main_grads : MainGrads
        Of these parameters.
    model : torch.nn.Module
    integration : Integration
    sharded : bool
        Whether each micro-batch is reduced (a sharded accumulator).
    """

    def __init__(self, engine, parameters, main_grads, model, integration, sharded):
        self.engine = engine
        self.parameters = parameters
        self.integration = integration
        self.sharded = sharded
        self.owner = None          # weak; of stand-ins, see taken.py
        self.dirty = False         # a gradient was taken since the last step
        self.deferred = False      # inside no_sync
        self.micro_batches_deferred = 0
        self._open_task = None     # graph task whose end ends the micro-batch
        self._hooks = {}
        self._main = main_grads
        self._self = weakref.ref(self)
        self._model_hook = model.register_forward_hook(_output_watcher(self._self, model))
        self._marked = min((n.parameter for n in parameters if n.parameter.numel() > 0),
                           key=lambda p: p.numel(), default=None)
        self.hook_new_parameters()

    def hook_new_parameters(self):
        """Hook parameters that need gradients and have no hook yet (e.g. unfrozen ones)."""
        for index, named in enumerate(self.parameters):
            p = named.parameter
            if index in self._hooks or not p.requires_grad:
                continue
            me = self._self

            def take(p, index=index, me=me):
                taker = me()
                if taker is not None:
                    taker._on_gradient(index, p)

            handles = [p.register_post_accumulate_grad_hook(take)]
            if p is self._marked:
                handles.append(p.register_hook(_remove_marker(p)))
            self._hooks[index] = handles

    def close(self):
        """Remove all hooks: gradients stay in ``p.grad`` from now on."""
        self._model_hook.remove()
        for handles in self._hooks.values():
            for handle in handles:
                handle.remove()
        self._hooks = {}
        self.remove_marker()

    def take_leftovers(self):
        """Add what is in ``p.grad`` or ``p.main_grad`` although no hook has seen it."""
        found = self._main.take_all(self._add)
        for index, named in enumerate(self.parameters):
            grad = named.parameter.grad
            if grad is None or isinstance(grad, TakenGradient):
                continue
            if not self.integration.takes_leftovers:
                raise ArgumentError(
                    f"parameter \"{named.name}\" has a gradient that no backward pass has "
                    f"announced ({self.integration.name}): zero-bubble schedules are not supported "
                    "yet; use GPipe, 1F1B or Interleaved1F1B")
            named.parameter.grad = None
            self._add(index, grad)
            found = True
        return found

    def drop_leftovers(self):
        self._main.drop()
        for named in self.parameters:
            named.parameter.grad = None

    def remove_marker(self):
        if self._marked is not None and isinstance(self._marked.grad, TakenGradient):
            self._marked.grad = None

    def start_step(self):
        """Forget what was under way: the step has begun or gradients were discarded."""
        self.dirty = False
        self._open_task = None
        self.micro_batches_deferred = 0
        self.remove_marker()

    @contextmanager
    def no_sync(self):
        if self.sharded:
            raise ConfigError(
                "no_sync()", "a sharded gradient accumulator, which is reduced after every "
                "micro-batch", "a local accumulator",
                "set /gradient_accumulation_dtype/sharded to false (stages 0 and 1), or remove "
                "no_sync()")
        yield

    # -- hooks -----------------------------------------------------------------------------------

    def _announce(self, task):
        if self._open_task == task or self.integration.ends_micro_batches:
            return
        self._open_task = task
        me = self._self

        def backward_ends():
            taker = me()
            if taker is not None and taker._open_task == task:
                taker.end_micro_batch()

        torch.autograd.Variable._execution_engine.queue_callback(backward_ends)

    def _on_gradient(self, index, p):
        grad, p.grad = p.grad, None
        if self._open_task is None:
            self._announce(torch._C._current_graph_task_id())
        # Hooks run without a gradient, too, where a backward pass returned None for it.
        taken = grad is not None and not MainGrads.replaces_grad(p)
        self._main.take_one(index, self._add)
        if taken:
            self._add(index, grad)

    def _add(self, index, grad):
        if grad.layout is not torch.strided:
            raise ArgumentError(
                f"parameter \"{self.parameters[index].name}\" has a {grad.layout} gradient; "
                "allowed: dense gradients; build the embedding with sparse=False")
        grad = grad.detach().contiguous()
        self.dirty = True
        self.engine.add_gradient(index, grad.data_ptr(), DTYPES[grad.dtype])

    def end_micro_batch(self):
        """All gradients of a micro-batch are there; with a sharded accumulator it is reduced."""
        self._open_task = None
        self._main.take_marked(self._add)
        self.engine.end_micro_batch()
        # DeepSpeed's engine steps by itself: no scaler looks here, and its safe_get_full_grad would.
        if self.integration.ends_micro_batches:
            return
        if self._marked is not None and self._marked.grad is None:
            self._marked.grad = TakenGradient.of(self._marked, self.owner())


def _output_watcher(taker, model):
    """A forward hook; it holds neither of the two, and does nothing on copies of the model."""
    watched = weakref.ref(model)

    def backward_begins(grad):
        if taker() is not None:
            taker()._announce(torch._C._current_graph_task_id())

    def watch(module, inputs, output):
        if module is not watched() or not torch.is_grad_enabled():
            return
        check_forward()
        for tensor in _tensors_of(output):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(backward_begins)
                return

    return watch


def _remove_marker(p):
    # autograd would add to it in place.
    reference = weakref.ref(p)

    def remove(grad):
        p = reference()
        if p is not None and isinstance(p.grad, TakenGradient):
            p.grad = None

    return remove


def _tensors_of(output):
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors_of(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors_of(value)
