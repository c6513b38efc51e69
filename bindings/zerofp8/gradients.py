"""Takes gradients from autograd as soon as they are accumulated, and finds micro-batch ends."""

import logging
import weakref
from contextlib import contextmanager

import torch

from . import ddp
from .errors import ArgumentError, ConfigError
from .main_grad import MainGrads
from .taken import StandIns, TakenGradient, remove_from
from .watcher import OutputWatcher, watched_modules

logger = logging.getLogger("zerofp8")


class GradientTaker:
    """Hooks on parameters and on the model.

    A parameter's hook gives its gradient to the engine and sets ``p.grad = None``; when the pass
    is over, a stand-in tells that there was one. The end of a backward pass is a micro-batch's
    end; re-entrant checkpointing runs backward passes inside of one, so that the outer one is
    announced by a hook on the model's output where there is one.

    Parameters
    ----------
    engine : PlacedEngine
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
        self.dirty = False         # a gradient was taken since the last step
        self._open_task = None     # graph task whose end ends the micro-batch
        self._at_end = lambda: None  # what is called then; the task holds it as long as it lives
        self._taken = False        # a gradient in the pass under way
        self._held = {}            # parameters with a gradient since the last step, in order
        self._hooks = {}
        self._unhooked = list(range(len(parameters)))
        self._main = main_grads
        self._self = weakref.ref(self)
        self._model = weakref.ref(model)
        self.silenced = weakref.WeakSet()  # DistributedDataParallel that reduces these no longer
        ddp.register(self)
        self._stand_ins = StandIns([n.parameter for n in parameters])
        self._model_hooks = [m.register_forward_hook(OutputWatcher(self._self, m))
                             for m in watched_modules(model)]
        self.hook_new_parameters()

    def stand_for(self, owner):
        """`owner` answers where torch looks into stand-ins, see taken.py."""
        self._stand_ins.owner = weakref.ref(owner)

    def never_wait(self):
        """Do without the looks into device memory that find mistakes of the caller's."""
        self._stand_ins.looks = False

    def hook_new_parameters(self):
        """Hook parameters that need gradients and have no hook yet (e.g. unfrozen ones)."""
        new = [i for i in self._unhooked if self.parameters[i].parameter.requires_grad]
        for index in new:
            p = self.parameters[index].parameter
            before, after = _hooks_of(self._self, index, p)
            self._hooks[index] = [p.register_post_accumulate_grad_hook(after)]
            if not self.integration.ends_micro_batches:
                self._hooks[index].append(p.register_hook(before))
        if new:
            self._unhooked = [i for i in self._unhooked if i not in self._hooks]

    def close(self):
        """Remove all hooks: gradients stay in ``p.grad`` from now on."""
        ddp.forget(self)
        for handle in self._model_hooks:
            handle.remove()
        for handles in self._hooks.values():
            for handle in handles:
                handle.remove()
        self._hooks = {}
        self._unhooked = []  # for good
        self._stand_ins.remove_all()

    def _settle(self, at_step):
        owner = self._stand_ins.owner()
        if owner is not None:
            owner._edits.settle(self, at_step)

    def cancelled(self):
        """Indices whose gradients of before were removed or replaced by somebody else."""
        return sorted(i for i in self._stand_ins.gone() if i in self._held)

    def forget(self, index):
        """This parameter has no gradient any more."""
        self._held.pop(index, None)

    def check_model(self):
        """Refuse a model whose parameters are others now: these would get no gradients any more."""
        model = self._model()
        there = {id(p) for p in model.parameters()} if model is not None else None
        gone = [n.name for n in self.parameters if there and id(n.parameter) not in there]
        if gone:
            more = f" and {len(gone) - 3} more" if len(gone) > 3 else ""
            raise ArgumentError(
                "parameters " + ", ".join(f"\"{name}\"" for name in gone[:3]) + more + " were "
                "replaced after initialize (e.g. by fully_shard, parallelize_module, or a new "
                "layer in the place of one): do that before initialize, or initialize again")

    def replace(self):
        """Close the optimizer that has this: another one takes these parameters."""
        logger.warning(
            "zerofp8: initialize was called again for a model that an optimizer has already: that "
            "one was closed%s", ", and the gradients of its step under way are lost"
            if self.dirty else "")
        owner = self._stand_ins.owner()
        owner.close() if owner is not None else self.close()

    def take_leftovers(self):
        """Add what is in ``p.grad`` or ``p.main_grad`` although no hook has seen it."""
        self._settle(at_step=True)
        found = self._main.take_all(self._add)
        for index, named in enumerate(self.parameters):
            grad = named.parameter.grad
            if grad is None:
                continue
            if isinstance(grad, TakenGradient):
                if self._stand_ins.written(index):
                    raise self._lost(index)
                continue
            if not self.integration.takes_leftovers:
                raise self._not_announced(index)
            named.parameter.grad = None
            self._add(index, grad)
            found = True
        return found

    def _lost(self, index):
        return ArgumentError(
            f"a gradient of parameter \"{self.parameters[index].name}\" went into the stand-in for "
            "gradients that were taken before, and would be lost: a hook of zerofp8 was removed, "
            "or p.grad was written; call optimizer.zero_grad() and leave both alone")

    def _not_announced(self, index):
        name, trainer = self.parameters[index].name, self.integration.name
        if index in self._hooks:
            reason = ("zero-bubble schedules are not supported yet; use GPipe, 1F1B or "
                      "Interleaved1F1B")
        else:
            reason = ("it was unfrozen after the forward pass; call requires_grad_(True) before "
                      "it, and call the module, not its forward()")
        return ArgumentError(f"parameter \"{name}\" has a gradient that no backward pass has "
                             f"announced ({trainer}): {reason}")

    def drop_leftovers(self):
        self._main.drop()
        for named in self.parameters:
            named.parameter.grad = None

    def start_step(self):
        """Forget what was under way: the step has begun or gradients were discarded."""
        self.dirty = self._taken = False
        self._open_task = None
        self._held = {}
        self._stand_ins.remove_all()

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

    def announce(self, whole=lambda: False):
        """A pass is under way; `whole` tells if it is ``backward()``, even if it gives nothing."""
        # A pass that fails drops what it would have called: nothing is open any more then.
        if self._open_task is not None and self._at_end() is not None:
            return
        if self.integration.ends_micro_batches:
            return
        self._settle(at_step=False)
        self._stand_ins.remove_all()  # or autograd would add to them in place
        task = torch._C._current_graph_task_id()
        is_whole = whole()
        self._open_task = task
        self._taken = False
        me = self._self

        def backward_ends():
            taker = me()
            if taker is not None and taker._open_task == task:
                taker._end_pass(is_whole)

        self._at_end = weakref.ref(backward_ends)
        torch.autograd.Variable._execution_engine.queue_callback(backward_ends)

    def _end_pass(self, whole):
        # autograd.grad gives the parameters nothing, and is no micro-batch. Where each one is
        # reduced, other ranks may have gradients of a backward() that gave none here, and wait.
        if self._taken or (whole and self.sharded) or self._main.any_marked():
            self.end_micro_batch()
        self._open_task = None
        placed = self._stand_ins.place(i for i in self._held if i in self._hooks)
        # GradScaler wants to find one on each rank, also where backward() gave no gradient.
        if whole and not placed:
            free = (i for i in self._hooks if self.parameters[i].parameter.grad is None)
            self._stand_ins.place(list(free)[:1])

    def _on_gradient(self, index, p):
        grad, p.grad = p.grad, None
        if isinstance(grad, TakenGradient):
            raise self._lost(index)
        self.announce()
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
        device = self.parameters[index].parameter.device
        if grad.device != device:
            raise ArgumentError(
                f"parameter \"{self.parameters[index].name}\" is on {device}, a gradient of it on "
                f"{grad.device}; allowed: the same device")
        grad = grad.detach().contiguous()
        self.dirty = self._taken = True
        self._held[index] = None
        self.engine.add_gradient(index, grad)

    def end_micro_batch(self):
        """All gradients of a micro-batch are there; with a sharded accumulator it is reduced."""
        self._open_task = None
        self._main.take_marked(self._add)
        self._taken = False
        self.engine.end_micro_batch()


def _hooks_of(taker, index, p):
    """Before autograd adds a gradient to ``p.grad``, and after; they hold neither of the two."""
    reference = weakref.ref(p)

    def before(grad):
        if taker() is not None:
            taker().announce()
        elif reference() is not None:
            remove_from(reference())

    def after(p):
        if taker() is not None:
            taker()._on_gradient(index, p)

    return before, after
