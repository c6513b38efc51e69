"""Layers that add weight gradients into ``p.main_grad`` themselves, as Megatron's do when fused."""

import copy

import pytest
import torch
from ranks import run_ranks
from torch import nn

import zerofp8

A = 3


class _Fused(torch.autograd.Function):
    """A linear layer whose backward adds the weight's gradient into ``main_grad``.

    kind: "marked" (the mark, and garbage for autograd), "zeros" (the mark, and zeros that another
    layer with the same weight adds to), "silent" (no mark, nothing for autograd).
    """

    @staticmethod
    def forward(ctx, x, weight, kind):
        ctx.save_for_backward(x, weight)
        ctx.kind, ctx.parameter = kind, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, _ = ctx.saved_tensors
        weight = ctx.parameter
        weight.main_grad.add_(grad.flatten(0, -2).t().to(weight.main_grad.dtype)
                              @ x.flatten(0, -2).to(weight.main_grad.dtype))
        dummy = None
        if ctx.kind != "silent":
            weight.grad_added_to_main_grad = True
            dummy = torch.full_like(weight, 0.0 if ctx.kind == "zeros" else float("nan"))
        return grad @ weight, dummy, None


class Net(nn.Module):
    def __init__(self, kind, tied):
        super().__init__()
        self.kind, self.tied = kind, tied
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        weight = self.last.weight
        if self.tied:  # used unfused, too
            x = x @ weight.t()
        x = self.norm(self.first(x).tanh())
        return x @ weight.t() if self.kind is None else _Fused.apply(x, weight, self.kind)


def start(kind, tied=False, config=None):
    torch.manual_seed(0)
    model = Net(kind, tied)
    if kind is not None:
        model.last.weight.main_grad = torch.empty(6, 6)
        model.first.weight.main_grad = torch.zeros(6, 6)  # never used
        model.last.weight.zero_out_wgrad = kind == "zeros"
    config = {"gradient_accumulation_steps": A, **(config or {})}
    template = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return zerofp8.initialize(model, template, config, timeout=60, loss_is_divided=False)


def train(rank, kind, tied, config):
    model, optimizer = start(kind, tied, config)
    generator = torch.Generator().manual_seed(rank)
    gradients = []
    for step in range(3):
        optimizer.zero_grad()
        for _ in range(A):
            model(torch.randn(4, 6, generator=generator)).square().mean().backward()
        gradients.append([optimizer.full_gradient(p) for p in model.parameters()])
        report = optimizer.step()
        assert report.applied and report.micro_batches == A and report.unused_parameters == 0
        assert all(p.grad is None for p in model.parameters())
        if kind is not None:
            assert not model.last.weight.main_grad.any()
    return gradients, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("config", [{}, {"zero_optimization": {"stage": 2}}], ids=str)
@pytest.mark.parametrize("kind, tied", [("marked", False), ("silent", False), ("zeros", False),
                                        ("zeros", True), ("silent", True)])
def test_fused_gradients_count_once(kind, tied, config):
    fused, plain = (train(0, k, tied, config) for k in (kind, None))
    for found, expected in ((fused[1], plain[1]), *zip(fused[0], plain[0])):
        for f, e in zip(found, expected):
            torch.testing.assert_close(f, e, rtol=1e-5, atol=1e-7)


def test_fused_gradients_over_ranks():
    for found, expected in zip(run_ranks(2, train, "marked", False, {}),
                               run_ranks(2, train, None, False, {})):
        for f, e in zip(found[1], expected[1]):
            torch.testing.assert_close(f, e, rtol=1e-5, atol=1e-7)


def test_zero_grad_clears_the_buffers():
    model, optimizer = start("silent")
    twin, theirs = start(None)
    model(torch.full([4, 6], 9.0)).sum().backward()
    for m, o in ((model, optimizer), (twin, theirs)):
        o.zero_grad()
        m(torch.ones(4, 6)).sum().backward()
        o.step()
    for p, q in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(p, q)


def test_a_gradient_that_is_not_finite_skips():
    model, optimizer = start("marked")
    before = copy.deepcopy(model.state_dict())
    model(torch.full([4, 6], float("inf"))).sum().backward()
    assert not optimizer.step().applied
    assert not model.last.weight.main_grad.any()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_buffers_made_later_are_refused():
    model, optimizer = start(None)
    model.first.weight.main_grad = torch.zeros(6, 6)
    model(torch.ones(4, 6)).sum().backward()
    with pytest.raises(zerofp8.ArgumentError, match="first.weight.*main_grad.*before"):
        optimizer.step()


@pytest.mark.parametrize("buffer", [torch.zeros(36), torch.zeros(6, 6).double(), None], ids=str)
def test_buffers_of_another_shape_are_refused(buffer):
    model = Net(None, False)
    model.last.weight.main_grad = buffer
    with pytest.raises(zerofp8.ConfigError, match="last.weight.*main_grad"):
        zerofp8.initialize(model, torch.optim.AdamW(model.parameters()), {})


def test_backward_without_a_gradient():
    """autograd calls hooks where a function has returned None: the parameter is unused."""
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2, None

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    model = Model()
    model, optimizer = zerofp8.initialize(model, torch.optim.AdamW(model.parameters()), {})
    Nothing.apply(model.a, model.b).sum().backward()
    report = optimizer.step()
    assert report.applied and report.unused_parameters == 1
