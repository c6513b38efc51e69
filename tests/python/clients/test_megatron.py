"""Megatron-core's interface: what its loop calls, in its order, and what comes back."""

import inspect
import math

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from reference import Reference, loss_of, relative_l2, seeded_model

import zerofp8
from zerofp8 import megatron

A, LR, STEPS = 2, 1e-2, 4
# Of megatron.core.optimizer.MegatronOptimizer: method, parameters.
INTERFACE = {
    "get_parameters": (), "prepare_grads": (), "step_with_ready_grads": (), "get_grad_norm": (),
    "clip_grad_norm": ("clip_grad",), "count_zeros": (), "zero_grad": ("set_to_none",),
    "get_loss_scale": (), "scale_loss": ("loss",), "reload_model_params": ("state_dict",),
    "state_dict": (), "load_state_dict": ("state_dict",), "step": (),
    "sharded_state_dict": ("model_sharded_state_dict", "is_loading", "metadata")}


class Fused(torch.autograd.Function):
    """A linear layer that adds its weight's gradient into main_grad."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        ctx.weight.main_grad.add_(grad.t() @ x)
        ctx.weight.grad_added_to_main_grad = True
        return grad @ weight, torch.full_like(weight, math.nan)


class FusedLinear(torch.nn.Linear):
    gradient_accumulation_fusion = True

    def forward(self, x):
        return Fused.apply(x, self.weight) + self.bias


def fused_model():
    model = seeded_model(width=80)
    fused = FusedLinear(80, 80)
    fused.load_state_dict(model[2].state_dict())
    model[2] = fused
    return model


def started(model, config, **options):
    chunk = megatron.ModelChunk(model)
    optimizer = megatron.initialize(
        [chunk], torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1),
        {"gradient_accumulation_steps": A, "zero_optimization": {"stage": 1}, **config}, **options)
    return chunk, optimizer


def one_step(chunk, optimizer, rank, step, factor=1.0):
    """As Megatron's train_step and its schedules."""
    chunk.zero_grad_buffer()
    optimizer.zero_grad()
    for micro in range(A):
        with chunk.no_sync():
            loss = loss_of(chunk, step, rank, micro) / A * factor
            optimizer.scale_loss(loss).backward()
    chunk.finish_grad_sync()
    return optimizer.step()


def loop(rank, folder):
    chunk, optimizer = started(fused_model(), {}, log_num_zeros_in_grad=True)
    triples = [one_step(chunk, optimizer, rank, step) for step in range(STEPS)]
    assert optimizer.get_loss_scale().shape == (1,) and not optimizer.is_stub_optimizer
    assert len(optimizer.get_parameters()) == 6 and len(optimizer.state) == 6
    assert list(chunk.state_dict()) == list(fused_model().state_dict())
    weights = [p.detach().clone() for p in chunk.parameters()]
    skipped = one_step(chunk, optimizer, rank, 0, math.inf)
    assert skipped == (False, None, None)
    assert all(torch.equal(a, b) for a, b in zip(chunk.parameters(), weights))
    # Saved by rank 0 alone, resumed by a new run of both.
    if rank == 0:
        torch.save((chunk.state_dict(), optimizer.state_dict()), folder + "/saved.pt")
    unbroken = [one_step(chunk, optimizer, rank, step) for step in range(STEPS, STEPS + 2)]
    again, other = started(fused_model(), {}, log_num_zeros_in_grad=True)
    dist.barrier()
    saved = torch.load(folder + "/saved.pt", weights_only=True)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    assert [one_step(again, other, rank, s) for s in range(STEPS, STEPS + 2)] == unbroken
    return triples, weights


def test_a_loop_as_megatrons(tmp_path):
    reference = Reference(seeded_model(width=80), 2, A, LR, weight_decay=0.1)
    (triples, weights), _ = run_ranks(2, loop, str(tmp_path))
    for step, (success, norm, zeros) in enumerate(triples):
        _, parts = reference.gradients(step)
        mean = reference.mean(parts)
        assert success and zeros == sum(float((g == 0).sum()) for g in mean)
        assert norm == pytest.approx(math.sqrt(sum(float(g.square().sum()) for g in mean)), 1e-4)
        reference.update(mean)
    assert relative_l2(weights, reference.master) < 1e-5


def test_the_interface():
    for name, parameters in INTERFACE.items():
        ours = inspect.signature(getattr(megatron.MegatronOptimizer, name)).parameters
        assert set(parameters) <= set(ours), name
    chunk, optimizer = started(fused_model(), {"gradient_clipping": 1.0})
    loss_of(chunk, 0, 0, 0).backward()
    assert not optimizer.prepare_grads()
    norm = optimizer.get_grad_norm()
    assert optimizer.clip_grad_norm(1.0) == norm > 0
    with pytest.raises(zerofp8.ArgumentError, match="clip_grad"):
        optimizer.clip_grad_norm(2.0)
    assert optimizer.step_with_ready_grads()
    with torch.no_grad():
        chunk.module[0].weight.add_(1.0)
    optimizer.reload_model_params()
    master = optimizer.optimizer.full_state(chunk.module[0].weight, "master")
    assert torch.equal(master, chunk.module[0].weight)
    with pytest.raises(zerofp8.UnsupportedError, match="calculate_per_token_loss"):
        chunk.scale_gradients(0.5)


def test_the_installed_megatron_asks_for_no_more():
    theirs = pytest.importorskip("megatron.core.optimizer.optimizer").MegatronOptimizer
    ours = megatron.MegatronOptimizer
    for name in theirs.__abstractmethods__ | {"scale_loss", "count_zeros", "get_parameters",
                                              "get_grad_norm", "clip_grad_norm"}:
        wanted = inspect.signature(getattr(theirs, name)).parameters
        assert set(wanted) <= set(inspect.signature(getattr(ours, name)).parameters), name


def sharded(rank, folder):
    """Through Megatron's own objects: what one data rank gives is whole on each."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    chunk, optimizer = started(fused_model(), {})
    one_step(chunk, optimizer, rank, 0)
    entry = optimizer.sharded_state_dict({})["optimizer"]
    assert isinstance(entry, ShardedObject) and entry.replica_id == rank
    assert (entry.data is None) == (rank != 0)
    box = [entry.data]
    dist.broadcast_object_list(box, 0)
    expected = one_step(chunk, optimizer, rank, 1)
    again, other = started(fused_model(), {})
    assert other.sharded_state_dict({}, is_loading=True)["optimizer"].data is None
    one_step(again, other, rank, 0)
    other.load_state_dict({"optimizer": box[0]})
    return one_step(again, other, rank, 1) == expected


def test_sharded_state_dict(tmp_path):
    pytest.importorskip("megatron.core.dist_checkpointing.mapping")
    assert run_ranks(2, sharded, str(tmp_path)) == [True, True]
