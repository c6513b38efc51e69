"""The optimizer that ``initialize`` returns."""

import os
import weakref
from contextlib import contextmanager

import torch

from .capturable import PendingReport
from .checkpoints import Checkpoints
from .edits import TrainerEdits
from .errors import ArgumentError, ConfigError, UnsupportedError
from .parameters import adam_options, as_tuple
from .plan import Plan
from . import groups
from .shards import Shards
from .state_view import StateView, carry_hooks
from .streams import is_capturing
from .weights import WeightWatch


_made = weakref.WeakSet()


def close_all():
    """Close every optimizer that is still there, at the end of the process."""
    for optimizer in list(_made):
        optimizer.close()


class Optimizer(Checkpoints, torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` whose gradients, state and weights are handled by the engine.

    Made by ``zerofp8.initialize``, not directly. ``param_groups`` are the template's own dicts:
    what a scheduler writes into ``lr``, ``betas``, ``eps`` or ``weight_decay`` holds from the next
    step on. All ranks must make the same changes.

    Attributes
    ----------
    settings : Settings
        Which dtype every part uses, stage, micro-batches per step.
    """

    def __init__(self, template, engine, parameters, taker, settings, decoupled, has_loss=True,
                 made=None, capturable=False, shards=([], 0, {}, None, 0.0)):
        super().__init__(template.param_groups, dict(template.defaults))
        carry_hooks(template, self)
        self._engine = engine
        self._parameters = parameters
        self._index = {id(n.parameter): i for i, n in enumerate(parameters)}
        self._taker = taker
        self._decoupled = decoupled
        self._trainer_scales_grads = taker.integration.trainer_scales_grads
        self._pushed = [None] * len(self.param_groups)
        self._scale_was_asked = False
        self._has_loss = has_loss  # stages before the last get gradients that are scaled already
        self._watch = WeightWatch(engine, parameters)
        self._reduced = self._closed = False
        self._edits = TrainerEdits(self)
        self._frozen_groups = True
        self._capturable = capturable
        self._report = None  # of the last step; with `capturable` the engine has it
        self.settings = settings
        self._shards = Shards(self, *shards)
        self._watch.following = self._shards.following
        self.state = StateView(self)
        taker.stand_for(self)
        if capturable and engine.placement.index is not None:
            taker.never_wait()
        self._give_back = weakref.finalize(self, groups.give_back, made or [], os.getpid())
        self._give_back.atexit = False  # the process's end takes them
        _made.add(self)

    # -- one step --------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure=None):
        """The accumulation boundary: reduce, clip, update, gather. Collective.

        Parameters
        ----------
        closure : callable, optional
            Evaluates the model and returns the loss.

        Returns
        -------
        StepReport, or the closure's value if there is one
            The report is in ``last_report``, too. ``applied`` is False where a gradient of any rank
            was not finite: then nothing was changed on any rank. With ``capturable=True`` a
            `PendingReport`: the step is queued, and only who reads the report waits for it.

        Raises
        ------
        NumericError
            A dynamic loss scale is at its floor and gradients are still not finite.
        ArgumentError
            fp16 without ``backward(loss)`` or ``scale(loss)``; hyper-parameters that differ
            between ranks.
        """
        if self._closed:
            raise ArgumentError("step: this optimizer was closed (close(), or another initialize "
                                "for the same model); call initialize again")
        if self._report is None:
            self._taker.check_model()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._prepare()
        self._push_groups()
        self._ascend()
        self._edits.apply()
        self._step_engine()
        if closure is not None:
            return loss
        return PendingReport(self) if self._capturable else self._report

    def _prepare(self):
        self._taker.take_leftovers()
        unscaled = self._has_loss and not self._scale_was_asked
        if self.settings.loss_scaling and self._taker.dirty and unscaled:
            raise ArgumentError(
                "fp16 with a loss scale, but the loss was not scaled: call optimizer.backward(loss) "
                "instead of loss.backward(), or optimizer.scale(loss).backward()")
        self._watch.look()

    def _ascend(self):
        """torch's ``maximize``: the sign is turned in the update alone; norms and gradients keep it."""
        turned = [i for i, n in enumerate(self._parameters)
                  if self.param_groups[n.group].get("maximize", False)]
        if turned:
            self._reduce()
        for index in turned:
            self._engine.scale_gradient(index, -1.0)

    def _step_engine(self):
        self._shards.begin_step()
        try:
            self._report = self._engine.enqueue_step() if self._capturable else self._engine.step()
        finally:
            self._shards.end_step()
            self._taker.start_step()
            self._scale_was_asked = self._reduced = False
            self._edits.forget()
        if self._capturable or self._report.applied:
            self._watch.updated()
        self._taker.hook_new_parameters()

    @torch.no_grad()
    def before_replay(self):
        """Call before each replay of a CUDA graph with ``step`` in it.

        What a scheduler has written into ``param_groups``, and weights that were written from
        outside, go to the device. Waits for nothing unless they were changed. Needs
        ``initialize(..., capturable=True)``; on all ranks alike.

        Raises
        ------
        ArgumentError
            The optimizer is not capturable, or beta1 was changed so much that the step has to be
            captured again.
        """
        if not self._capturable:
            raise ArgumentError("before_replay: the optimizer is not capturable; pass "
                                "capturable=True to initialize")
        self._watch.look()
        self._push_groups()
        self._engine.write_groups()
        self._watch.about_to_update()

    @property
    def last_report(self):
        """StepReport of the last step, or None: whether it was applied, norm, clip coefficient, loss
        scale, wire bytes. With ``capturable=True``: of the step or replay that ran last, for which
        this waits.

        Raises
        ------
        ArgumentError
            With ``capturable=True``: ranks differed in hyper-parameters, or one had nonsense; the
            step was skipped on all of them.
        CommError
            With ``capturable=True``: a rank was absent, or a link failed.
        """
        if not self._capturable:
            return self._report
        return self._engine.fetch_report()

    def _push_groups(self):
        if is_capturing():  # what was sent before holds; the next before_replay() sends the rest
            return
        for i, group in enumerate(self.param_groups):
            options = adam_options(group, i, self._decoupled)
            if as_tuple(options) != self._pushed[i]:
                self._engine.set_group(i, options)
                self._pushed[i] = as_tuple(options)

    def zero_grad(self, set_to_none=True):
        """Throw away gradients that were accumulated since the last step."""
        if self._taker.dirty or self._reduced:  # by a rank without gradients, too
            self._engine.discard_gradients()
            self._reduced = False
        self._edits.forget()
        self._taker.start_step()
        self._taker.drop_leftovers()

    def backward(self, loss, **kwargs):
        """``loss.backward()`` with the loss scale where fp16 is on."""
        self.scale(loss).backward(**kwargs)

    def scale(self, loss):
        """`loss` times the loss scale (1 unless fp16 is on), in FP32."""
        self._scale_was_asked = True
        scale = self._engine.loss_scale()
        return loss if scale == 1.0 else loss.float() * scale

    @property
    def loss_scale(self):
        """The loss scale, for logs; 1 unless fp16 is on. To multiply a loss by it: ``scale``."""
        return self._engine.loss_scale()

    @contextmanager
    def no_sync(self):
        """For loops that have it: local accumulators are reduced at ``step`` only, so this changes
        nothing. With a sharded accumulator a ConfigError names the key to change.
        """
        with self._taker.no_sync():
            yield

    def all_reduce_grads(self, model=None):
        """MS-AMP's spelling: takes gradients that hooks have not; ``step`` reduces them."""
        self._taker.take_leftovers()

    def _unscale(self, found_inf, scale):
        """Called for ``torch.amp.GradScaler.unscale_``: gradients carry `scale`.

        All ranks agree here whether gradients are finite. If not, the step is skipped at once,
        since the scaler will not call ``step``.
        """
        if self.settings.loss_scaling:
            raise ConfigError("/fp16/enabled", "true, and torch's GradScaler is used, too",
                              "one loss scale", "use optimizer.backward(loss) and remove the "
                              "GradScaler")
        self._taker.take_leftovers()
        self._watch.look()
        self._engine.set_trainer_loss_scale(scale)
        self._reduce()
        bad = self._engine.grad_norm() != self._engine.grad_norm()
        found_inf.fill_(1.0 if bad else 0.0)
        if bad:
            self._push_groups()
            self._step_engine()

    def _reduce_now(self):
        """All ranks reduce what was accumulated, at the first question about it."""
        if not self._reduced:
            self._prepare()
            self._reduce()

    def _reduce(self):
        if not self._reduced:
            self._engine.reduce_gradients()
            self._reduced = True

    # -- what hooks took away --------------------------------------------------------------------

    @property
    def grad_norm(self):
        """L2 norm of the averaged, unscaled gradient before clipping: of the step under way if
        ``full_gradient`` or a GradScaler has reduced it, else of the last step.
        """
        if self._reduced:
            return self._engine.grad_norm()
        report = self.last_report
        return report.grad_norm if report else float("nan")

    def grad_norms(self):
        """L2 norm of each parameter's averaged gradient before clipping, by name. Collective.

        To be called between the last backward pass of a step and ``step``. NaN where a gradient is
        not finite; 0 where there is none; of this rank's slice where a parameter is cut.

        Returns
        -------
        dict of str to float
        """
        self._prepare()
        self._reduce()
        norms = self._engine.gradient_norms()
        return {named.name: norm for named, norm in zip(self._parameters, norms)}

    @torch.no_grad()
    def full_gradient(self, parameter):
        """The averaged gradient of this step, whole, on every rank. Collective.

        To be called between the last backward pass of a step and ``step``.

        Returns
        -------
        torch.Tensor
            FP32, of the parameter's shape, on its device.
        """
        index = self._index_of(parameter)
        self._prepare()
        self._reduce()
        return self._full(index, "gradient")

    @torch.no_grad()
    def full_state(self, parameter, kind=None):
        """Optimizer state of a parameter, whole, on every rank. Collective.

        Parameters
        ----------
        parameter : torch.nn.Parameter
        kind : {"master", "exp_avg", "exp_avg_sq"}, optional
            Default: all of them.

        Returns
        -------
        torch.Tensor or dict
            FP32, of the parameter's shape, on its device; without `kind` a dict, with ``"step"``,
            too.
            ``exp_avg_sq`` is v, also where its root is stored.
        """
        index = self._index_of(parameter)
        self._watch.look()
        if kind is not None:
            return self._full(index, kind)
        whole = {k: self._full(index, k) for k in ("master", "exp_avg", "exp_avg_sq")}
        return {"step": self._engine.step_of(index), **whole}

    def _full(self, index, kind):
        values = bytearray(self._engine.full_state(index, kind))
        like = self._parameters[index].parameter
        if not values:
            return torch.zeros(like.shape, device=like.device)
        return torch.frombuffer(values, dtype=torch.float32).reshape(like.shape).to(like.device)

    def _index_of(self, parameter):
        index = self._index.get(id(parameter))
        if index is None:
            raise ArgumentError("the parameter is not one of this optimizer's; pass the object that "
                                "is in its param_groups")
        return index

    def weights_changed(self):
        """Tell that weights were written past autograd (``p.data``): masters follow them.

        Ordinary in-place writes (``load_state_dict``, ``p.copy_``) are noticed without it.
        """
        self._watch.check()
        self._watch.reset()

    # -- plan ------------------------------------------------------------------------------------

    @property
    def plan(self):
        """What runs: dtype, place and bytes of every part, and what travels in a step."""
        return Plan(self._engine, self._taker.integration)

    @property
    def skipped_steps(self):
        """Steps that were not applied so far."""
        return self._engine.skipped_steps()

    @property
    def applied_steps(self):
        """Steps that were applied so far."""
        return self._engine.applied_steps()

    # -- the rest -------------------------------------------------------------------------------

    def add_param_group(self, param_group):
        """Refused after ``initialize``: buckets and shards are made there."""
        if getattr(self, "_frozen_groups", False):
            raise UnsupportedError(
                "add_param_group", "a group after initialize", "groups of the optimizer that is "
                "passed to initialize", "add all parameters before (frozen ones may be among them)")
        super().add_param_group(param_group)

    def close(self):
        """Give memory, threads, process groups and hooks back. The model keeps its weights."""
        self._closed = True
        self._taker.close()
        self._shards.close()
        self._engine.close()
        self._give_back()

    def __getstate__(self):
        raise UnsupportedError("pickle", "the optimizer itself", "its state_dict()",
                               "save state_dict(), or call optimizer.save(folder)")
