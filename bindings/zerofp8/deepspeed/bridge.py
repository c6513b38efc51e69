"""The optimizer that DeepSpeed's engines talk to."""

from deepspeed.runtime.base_optimizer import ZeROOptimizer

from ..errors import UnsupportedError
from ..state_part import part
from . import whole


class EngineOptimizer(ZeROOptimizer):
    """Answers DeepSpeed's calls for a ``zerofp8.Optimizer``.

    Its parameter hooks take gradients, so that most calls have nothing to do. What matters: the
    end of a micro-batch, ``get_grads_for_reduction`` without gradients (DeepSpeed then reduces
    none), and ``_hp_grad`` of tied weights, which is None (zerofp8 adds them up).

    Attributes
    ----------
    optimizer : zerofp8.Optimizer
        A real ``torch.optim.Optimizer``: what schedulers are bound to.
    overflow : bool
        Whether the last step was skipped.
    """

    def __init__(self, optimizer, client, dp_process_group):
        super().__init__()
        self.optimizer = optimizer
        self.dp_process_group = dp_process_group
        self.overflow = False
        self._client = client
        self._global_grad_norm = None
        self._closed = False
        # Of the protocol: who scales the loss. loss.backward() is refused where the scale moves.
        self.custom_loss_scaler = False
        self.external_loss_scale = None
        self.torch_autocast_gradscaler = None
        self.dynamic_loss_scale = optimizer.settings.loss_scaling
        # Names and shapes in DeepSpeed's model file.
        parameters = [[p for p in g["params"] if p.requires_grad] for g in optimizer.param_groups]
        self.bf16_groups = self.fp16_groups = self.bit16_groups = parameters
        for group in optimizer.param_groups:
            for p in group["params"]:
                p._hp_grad = None
        whole.attach(optimizer, [p for group in parameters for p in group])

    # -- what users and schedulers read ----------------------------------------------------------

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    @property
    def state(self):
        return self.optimizer.state

    @property
    def cur_scale(self):
        """The loss scale; 1 unless fp16 is on."""
        return self.optimizer._engine.loss_scale()

    loss_scale = cur_scale

    @property
    def last_report(self):
        """zerofp8's StepReport of the last step."""
        return self.optimizer.last_report

    # -- backward --------------------------------------------------------------------------------

    def scale_if_loss(self, value):
        """A new tensor, which the engine marks as a loss that it has divided already.

        A loss that is an output of the model has the engine's hook for losses that it has not: on
        one tensor that hook would run first, and divide by the accumulation steps once more.
        """
        scaled = self.optimizer.scale(value)
        return scaled * 1 if scaled is value else scaled

    def backward(self, loss, **kwargs):
        """For trainers that call the optimizer's; the engine's does more."""
        self.optimizer.backward(loss, **kwargs)
        self.backward_epilogue()

    def backward_prologue(self, *unused):
        pass

    def backward_epilogue(self, **unused):
        """The end of a micro-batch, but for the first stages of a pipeline."""
        self.optimizer._taker.end_micro_batch()

    def update_hp_grads(self, clear_lp_grads=False):
        """The end of a micro-batch on the first stages of a pipeline."""
        self.optimizer._taker.end_micro_batch()

    def clear_lp_grads(self, set_to_none=False):
        pass

    def get_grads_for_reduction(self):
        return [], {}

    def set_gradient_accumulation_boundary(self, is_boundary):
        pass

    # Of ``engine.coalesce_grad_reduction()``: gradients add up as they are taken, so that nothing is
    # left to reduce when the block ends.

    _coalesce_grad_reduction = False

    def setup_buckets(self):
        pass

    def get_gradient_for_reduction(self, parameter):
        return None

    def overlapping_partition_gradients_reduce_epilogue(self):
        pass

    # -- step ------------------------------------------------------------------------------------

    def step(self, closure=None):
        self.optimizer.step()
        report = self.optimizer.last_report
        self.overflow = not report.applied
        self._global_grad_norm = report.grad_norm
        # Or schedulers that were made for the user's optimizer warn that it has not stepped.
        self._client._opt_called = True

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad()

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self):
        return part(self.optimizer)  # a file per rank, as DeepSpeed makes them

    def load_state_dict(self, state_dict=None, **unused):
        if state_dict is None:
            raise UnsupportedError("checkpoint/load_universal", "true", "false",
                                   "zerofp8's own checkpoints load on any number of data ranks")
        self.optimizer.load_state_dict(state_dict)

    def refresh_fp32_params(self):
        """Weights were loaded without state: masters follow them."""
        self.optimizer.weights_changed()

    _restore_from_bit16_weights = refresh_fp32_params

    def destroy(self):
        if not self._closed:
            self._closed = True
            whole.detach(p for group in self.bf16_groups for p in group)
            self.optimizer.close()
