"""How gradients are taken: stand-ins, unfreezing, passes that are no micro-batch, failures."""

import copy
import gc
import io
import weakref

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

import zerofp8
from zerofp8.taken import TakenGradient

X = torch.linspace(-1, 1, 16).reshape(2, 8)


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def start(model, config=None, **options):
    options = {"opt_level": "O0", "timeout": 20, **options}
    template = torch.optim.AdamW(model.parameters(), lr=0.01)
    return zerofp8.initialize(model, template, config or {}, **options)


def true_norm(model):
    """Of X's gradient, by a copy of the model."""
    twin = copy.deepcopy(model)
    twin.requires_grad_(True)
    twin(X).sum().backward()
    return nn.utils.get_total_norm([p.grad for p in twin.parameters()]).item()


def kinds(model):
    return [type(p.grad) for p in model.parameters()]


# -- unfreezing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["0.weight", "0.bias", "2.weight", "2.bias"])
def test_unfrozen_under_grad_scaler(name):
    model = small()
    late = dict(model.named_parameters())[name]
    late.requires_grad_(False)
    model, optimizer = start(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    for step in range(3):
        late.requires_grad_(step > 0)
        expected = true_norm(model)
        scaler.scale(model(X).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        if step > 0:
            assert optimizer.last_report.grad_norm == pytest.approx(expected, rel=1e-5)
    assert scaler.get_scale() == 65536.0


def test_unfrozen_after_the_forward_under_grad_scaler():
    model = small()
    model[2].bias.requires_grad_(False)
    model, optimizer = start(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    for step in range(2):
        model[2].bias.requires_grad_(step > 0)
        expected = true_norm(model)
        scaler.scale(model.forward(X).sum()).backward()  # no forward hook runs
        assert step == 0 or not isinstance(model[2].bias.grad, TakenGradient)
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.last_report.grad_norm == pytest.approx(expected, rel=1e-5)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.factor = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x):
        return self.layer(x) * self.factor


@pytest.mark.parametrize("call", [lambda m: m(X), lambda m: m.forward(X)])
def test_scalar_unfrozen_between_micro_batches(call):
    model, optimizer = start(Scaled(), {"gradient_accumulation_steps": 2}, loss_is_divided=True)
    call(model).sum().backward()
    model.factor.requires_grad_(True)
    call(model).sum().backward()
    optimizer.step()
    assert model.factor.item() != 1 and optimizer.last_report.unused_parameters == 0
    assert model.factor.grad is None


@pytest.mark.parametrize("hooks", [1, 2])
def test_gradient_in_a_stand_in_is_refused(hooks):
    model = Scaled()
    model.factor.requires_grad_(True)
    model, optimizer = start(model)
    model(X).sum().backward()
    index = [p is model.factor for p in model.parameters()].index(True)
    for handle in optimizer._taker._hooks[index][-hooks:]:
        handle.remove()
    with pytest.raises(zerofp8.ArgumentError, match="factor.*lost"):
        (model.factor * 3).backward()
        optimizer.step()
    optimizer.zero_grad()
    model(X).sum().backward()
    assert optimizer.step().applied


def unfrozen_in_a_pipeline(rank, listed):
    model = nn.ModuleList([small()]) if listed else small()
    late = model.get_submodule("0.2" if listed else "2").weight
    late.requires_grad_(False)
    groups = [dist.new_group([0]), dist.new_group([1])], dist.new_group([0, 1])
    model, optimizer = start(model, data_parallel_group=groups[0][rank],
                             pipeline_parallel_group=groups[1])
    stage = model[0] if listed else model
    before = late.detach().clone()
    for step in range(2):
        late.requires_grad_(step > 0)
        stage(X).sum().backward()
        for p in stage.parameters():  # as the schedule's scale_grads
            if p.grad is not None:
                p.grad.div_(4)
        optimizer.step()
    return not torch.equal(before, late)


@pytest.mark.parametrize("listed", [False, True])
def test_unfrozen_in_a_pipeline(listed):
    assert run_ranks(2, unfrozen_in_a_pipeline, listed) == [True, True]


def unfrozen_too_late(rank):
    model = small()
    model[0].weight.requires_grad_(False)
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    model, optimizer = start(model, data_parallel_group=alone,
                             pipeline_parallel_group=dist.new_group([0, 1]))
    model[0].weight.requires_grad_(True)
    model.forward(X).sum().backward()
    with pytest.raises(zerofp8.ArgumentError, match="unfrozen after the forward"):
        optimizer.step()


def test_unfrozen_too_late_in_a_pipeline_is_explained():
    run_ranks(2, unfrozen_too_late)


# -- stand-ins -----------------------------------------------------------------------------------


def test_parameters_without_a_gradient_have_no_stand_in():
    model, optimizer = start(small())
    model[2](torch.ones(2, 16)).sum().backward()
    assert kinds(model) == [type(None)] * 2 + [TakenGradient] * 2
    optimizer.zero_grad()
    assert kinds(model) == [type(None)] * 4


@pytest.mark.parametrize("bad", [False, True])
def test_grad_scaler_asks_once_for_all_dtypes(bad, monkeypatch):
    model = small()
    model[0].bfloat16()
    model[1].register_forward_pre_hook(lambda m, x: (x[0].float(),))
    model, optimizer = start(model, {"bf16": {"enabled": True}})
    asked = []
    unscale = optimizer._unscale
    monkeypatch.setattr(optimizer, "_unscale", lambda *a: asked.append(a) or unscale(*a))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(1, 4):
        loss = model(X.bfloat16()).sum()
        scaler.scale(loss * float("inf") if bad else loss).backward()
        assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16, torch.float32}
        scaler.step(optimizer)
        scaler.update()
        assert len(asked) == step and optimizer.last_report.applied is not bad
        assert (optimizer.skipped_steps, optimizer.applied_steps) == ((step, 0), (0, step))[not bad]
    assert scaler.get_scale() == (1.0 if bad else 8.0)


def test_conversions_do_not_hide_the_error_before_them():
    """Clean-up after an exception of the user's; it is the next step that complains."""
    model, optimizer = start(small())
    with pytest.raises(ZeroDivisionError):
        try:
            model(X).sum().backward()
            1 / 0
        finally:
            model.cpu()
    assert optimizer.step().applied  # nothing was converted
    model(X).sum().backward()
    model.to(torch.bfloat16)
    with pytest.raises(zerofp8.Error, match='"0.weight"'):
        optimizer.step()


# -- what is a micro-batch -----------------------------------------------------------------------


def test_autograd_grad_is_no_micro_batch(tmp_path):
    model, optimizer = start(small())
    x = X.clone().requires_grad_()
    torch.autograd.grad(model(x).sum(), x)
    torch.autograd.grad(model(x).sum(), list(model.parameters()))
    assert kinds(model) == [type(None)] * 4
    optimizer.save(tmp_path)
    optimizer.load(tmp_path)
    model(X).sum().backward()
    torch.autograd.grad(model(x).sum(), list(model.parameters()))
    assert kinds(model) == [TakenGradient] * 4  # torch's hooks took them away, too
    assert optimizer.step().micro_batches == 1


def saliency(rank, stage, folder):
    model, optimizer = start(small(), {"zero_optimization": {"stage": stage}})
    for _ in range(2):
        model(X).sum().backward()
        optimizer.step()
        if rank == 0:
            x = X.clone().requires_grad_()
            torch.autograd.grad(model(x).sum(), x)
        optimizer.save(folder)
    optimizer.load(folder)
    return optimizer.applied_steps


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_input_gradients_of_one_rank(stage, tmp_path):
    assert run_ranks(2, saliency, stage, str(tmp_path), timeout=60) == [2, 2]


class Sparse(nn.Module):
    """Rank 1's tokens reach the expert in the second micro-batch only."""

    def __init__(self):
        super().__init__()
        self.expert = nn.Linear(8, 8)

    def forward(self, x, used):
        return x + self.expert(x) if used else x * 1


def unused_expert(rank, stage):
    torch.manual_seed(0)
    model, optimizer = start(Sparse(), {"zero_optimization": {"stage": stage},
                                        "gradient_accumulation_steps": 3}, loss_is_divided=True)
    norms = []
    for used in ([True] * 3, [rank == 0, True, rank == 0], [rank == 0] * 3):
        for u in used:
            model(X.clone().requires_grad_(), u).sum().backward()
        norms.append(optimizer.step().grad_norm)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(3):
        scaler.scale(model(X.clone().requires_grad_(), rank == 0).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return [*norms, optimizer.last_report.grad_norm]


def test_no_warning_where_nothing_was_taken(caplog):
    model, _ = start(Sparse())
    for used in (False, True):
        model(X.clone().requires_grad_(), used).sum().backward()
        assert any(isinstance(p.grad, TakenGradient) for p in model.parameters())
        model.zero_grad()
    assert not caplog.records


@pytest.mark.parametrize("stage", [0, 2])
def test_backward_that_gives_one_rank_nothing(stage):
    a, b = run_ranks(2, unused_expert, stage, timeout=60)
    whole = a[0]
    assert a == b == pytest.approx([whole, whole * 4 / 6, whole / 2, whole / 2], rel=1e-5)


def no_backward(rank):
    model, optimizer = start(small())
    if rank == 0:
        model(X).sum().backward()
    optimizer.grad_norms()
    optimizer.zero_grad()
    model(X).sum().backward()
    optimizer.full_gradient(model[0].weight)
    optimizer.zero_grad()
    model(X).sum().backward()
    return optimizer.step().applied


def test_zero_grad_after_a_reduction_without_gradients():
    assert run_ranks(2, no_backward) == [True, True]


def test_backward_that_failed_does_not_stay_open():
    model, optimizer = start(small())
    layers = lambda x: model[2](model[1](model[0](x)))  # noqa: E731  the model's hook sees nothing

    def fail(grad):
        raise ZeroDivisionError

    handle = model[0].weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        model(X).sum().backward()
    handle.remove()
    for _ in range(2):
        layers(X).sum().backward()
        assert optimizer._taker._open_task is None
    assert kinds(model) == [TakenGradient] * 4
    assert optimizer.step().micro_batches == 2


# -- the rest ------------------------------------------------------------------------------------


def test_reading_the_loss_scale_scales_nothing():
    model, optimizer = start(small().half(), {"fp16": {"enabled": True}}, opt_level="O2")
    assert optimizer.loss_scale == 65536
    model(X.half()).float().sum().backward()
    assert optimizer.loss_scale == 65536
    with pytest.raises(zerofp8.ArgumentError, match="not scaled"):
        optimizer.step()


@pytest.mark.parametrize("duplicate", ["torch.save", "deepcopy"])
def test_models_can_be_saved_whole(duplicate):
    model, optimizer = start(small())
    model(X).sum().backward()
    if duplicate == "deepcopy":
        other = copy.deepcopy(model)
    else:
        torch.save(model, file := io.BytesIO())
        file.seek(0)
        other = torch.load(file, weights_only=False)
    other(X).sum().backward()
    assert kinds(other) == [torch.Tensor] * 4
    assert optimizer.step().micro_batches == 1


def test_graphs_are_freed():
    model, optimizer = start(small())
    saved = []
    model[1].register_forward_hook(lambda m, x, y: saved.append(weakref.ref(y)))
    gc.disable()
    try:
        output = model(X)
        assert saved[0]() is not None  # held by the graph
        del output
        assert saved[0]() is None
        model(X).sum().backward()
        assert saved[1]() is None
    finally:
        gc.enable()
