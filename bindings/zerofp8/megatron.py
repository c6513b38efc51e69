"""zerofp8 as the optimizer of Megatron-core's training loop.

>>> chunks = [zerofp8.megatron.ModelChunk(chunk) for chunk in model]   # in the place of its DDP
>>> optimizer = zerofp8.megatron.initialize(chunks, torch.optim.AdamW(parameters), "config.json",
...                                         data_parallel_group=..., tensor_parallel_group=...)
>>> success, grad_norm, num_zeros = optimizer.step()
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist

from .errors import ArgumentError, UnsupportedError
from .initialize import initialize as _initialize


def initialize(model_chunks, optimizer, config=None, *, pipeline_parallel_group=None,
               tensor_parallel_group=None, log_num_zeros_in_grad=False, loss_is_divided=True,
               **options):
    """``zerofp8.initialize`` for Megatron's model chunks.

    Parameters
    ----------
    model_chunks : torch.nn.Module or list of them
        Layers with ``gradient_accumulation_fusion`` get their ``main_grad`` in FP32.
    optimizer : torch.optim.AdamW or torch.optim.Adam
        The template; its groups may have Megatron's keys (``wd_mult``, ``lr_mult``, ...).
    loss_is_divided : bool
        True, as Megatron's schedules divide by the micro-batches; their number is the config's
        ``gradient_accumulation_steps``.
    options
        Of ``zerofp8.initialize``.

    Returns
    -------
    MegatronOptimizer
    """
    chunks = model_chunks if isinstance(model_chunks, (list, tuple)) else [model_chunks]
    chunks = [chunk.module if isinstance(chunk, ModelChunk) else chunk for chunk in chunks]
    model = chunks[0] if len(chunks) == 1 else torch.nn.ModuleList(chunks)
    _make_main_grads(model)
    _, ours = _initialize(model, optimizer, config, loss_is_divided=loss_is_divided,
                          pipeline_parallel_group=pipeline_parallel_group,
                          tensor_parallel_group=tensor_parallel_group, **options)
    return MegatronOptimizer(ours, (pipeline_parallel_group, tensor_parallel_group),
                             log_num_zeros_in_grad)


def _make_main_grads(model):
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if getattr(layer, "gradient_accumulation_fusion", False) and weight is not None \
                and weight.requires_grad and not hasattr(weight, "main_grad"):
            weight.main_grad = torch.zeros(weight.shape, device=weight.device)


class MegatronOptimizer:
    """Megatron-core's optimizer interface around a ``zerofp8.Optimizer``.

    Attributes
    ----------
    optimizer : zerofp8.Optimizer
    """

    is_stub_optimizer = False

    def __init__(self, optimizer, model_groups=(None, None), log_num_zeros_in_grad=False):
        self.optimizer = optimizer
        self._model_groups = model_groups  # pipeline, tensor
        self._log_num_zeros = log_num_zeros_in_grad

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    @property
    def state(self):
        return self.optimizer.state

    def get_parameters(self):
        return [p for group in self.param_groups for p in group["params"]]

    # -- one step --------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self):
        """(applied, norm before clipping, zeros in the gradient or 0); (False, None, None) where a
        gradient is not finite. Collective."""
        if self.prepare_grads():
            return False, None, None
        zeros = self.count_zeros() if self._log_num_zeros else 0
        report = self.optimizer.step()
        return (True, report.grad_norm, zeros) if report.applied else (False, None, None)

    @torch.no_grad()
    def prepare_grads(self):
        """Reduce the gradients; True if one is not finite: then the step is skipped already."""
        norm = self.get_grad_norm()
        if norm == norm:
            return False
        self.optimizer.step()
        return True

    @torch.no_grad()
    def step_with_ready_grads(self):
        return self.optimizer.step().applied

    @torch.no_grad()
    def get_grad_norm(self):
        """The norm of the averaged gradient before clipping, over all ranks; NaN if not finite."""
        self.optimizer._prepare()
        self.optimizer._reduce()
        return self.optimizer.grad_norm

    def clip_grad_norm(self, clip_grad):
        """The norm; clipping itself is in the step, by the config's ``gradient_clipping``."""
        clipping = self.optimizer.settings.gradient_clipping
        if clip_grad != clipping:
            raise ArgumentError(f"clip_grad_norm({clip_grad}): the config says {clipping}; set "
                                "/gradient_clipping to Megatron's clip_grad")
        return self.get_grad_norm()

    @torch.no_grad()
    def count_zeros(self):
        """Zeros in the averaged gradient of the whole model. Collective, at the cost of gathering
        each gradient once."""
        pipeline, tensor = self._model_groups
        first_slice = _place(tensor)[0] == 0
        zeros = torch.zeros((), dtype=torch.float64)
        for named in self.optimizer._parameters:
            gradient = self.optimizer.full_gradient(named.parameter)
            if (named.is_cut or first_slice) and not getattr(named.parameter, "shared", False):
                zeros += float((gradient == 0).sum())
        for group in (pipeline, tensor):
            if group is not None:
                dist.all_reduce(zeros, group=group)
        return float(zeros)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def get_loss_scale(self):
        device = self.get_parameters()[0].device
        return torch.tensor([self.optimizer.loss_scale], dtype=torch.float32, device=device)

    def scale_loss(self, loss):
        return self.optimizer.scale(loss)

    def reload_model_params(self, state_dict=None):
        """Masters follow weights that were written from outside."""
        if state_dict is not None:
            raise UnsupportedError(
                "reload_model_params", "a state_dict", "the model's weights",
                "load the weights into the model first, then call it without an argument")
        self.optimizer.weights_changed()

    def prepare_model_params_for_param_sync(self):
        """Nothing is staged: ``step`` has gathered the weights."""

    # -- checkpoints -----------------------------------------------------------------------------

    def state_dict(self, is_loading=False):
        return {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict["optimizer"])

    def sharded_state_dict(self, model_sharded_state_dict, is_loading=False, metadata=None):
        """For Megatron's distributed checkpoints: one object per pipeline stage and tensor rank,
        written by the first data rank, for any number of data ranks."""
        from megatron.core.dist_checkpointing.mapping import ShardedObject
        places = [_place(group) for group in self._model_groups]
        replica = self.optimizer._engine.data_rank()
        whole = self.optimizer.state_dict() if replica == 0 and not is_loading else None
        return {"optimizer": ShardedObject(
            "optimizer.zerofp8", whole, tuple(size for _, size in places),
            tuple(rank for rank, _ in places), replica)}


class ModelChunk(torch.nn.Module):
    """A model chunk with the methods of Megatron's DistributedDataParallel, which reduces nothing.

    ``step`` reduces gradients and gathers weights; names in checkpoints are the module's own.
    """

    def __init__(self, module):
        super().__init__()
        self.module = module
        if hasattr(module, "config"):
            self.config = module.config

    def forward(self, *inputs, **keywords):
        return self.module(*inputs, **keywords)

    def no_sync(self):
        return nullcontext()

    def zero_grad_buffer(self):
        """``optimizer.zero_grad`` discards."""

    def start_grad_sync(self, *unused):
        """``step`` reduces."""

    def finish_grad_sync(self, *unused, **keywords):
        """``step`` reduces."""

    def start_param_sync(self, *unused, **keywords):
        """``step`` has gathered the weights."""

    def broadcast_params(self):
        """``initialize`` has sent them."""

    def scale_gradients(self, factor):
        if factor != 1.0:
            raise UnsupportedError(
                "scale_gradients", f"{factor}", "1",
                "turn calculate_per_token_loss off: gradients are taken during backward")

    def state_dict(self, *arguments, **keywords):
        return self.module.state_dict(*arguments, **keywords)

    def state_dict_for_save_checkpoint(self, *arguments, **keywords):
        own = getattr(self.module, "state_dict_for_save_checkpoint", self.module.state_dict)
        return own(*arguments, **keywords)

    def sharded_state_dict(self, *arguments, **keywords):
        return self.module.sharded_state_dict(*arguments, **keywords)

    def load_state_dict(self, state_dict, strict=True, **keywords):
        return self.module.load_state_dict(state_dict, strict=strict, **keywords)


def _place(group):
    """(rank, size) in a process group; None is one of this rank alone."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
