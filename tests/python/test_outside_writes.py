"""Weights that are written from outside the optimizer: masters follow what changed, and only that."""

import pytest
import torch
from ranks import run_ranks
from torch import nn

import zerofp8

LEVELS = ["O1", "O2", "O3"]
FP32_MASTER = {"zerofp8": {"master_weights": "fp32"}}


class Scaled(nn.Module):
    """A linear layer and a scale that users clamp."""

    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(64, 64), nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.linear(x) * self.scale


def start(model, level=None, lr=2e-5, dtype="bf16", extra=None):
    return zerofp8.initialize(
        model.to({"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]),
        torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0),
        {**({dtype: {"enabled": True}} if dtype != "fp32" else {}), **(extra or {})},
        opt_level=level, timeout=60)


def train(write, level, dtype="bf16", steps=60, extra=None):
    """Bits of the weights after steps of far less than a unit in the last place each."""
    torch.manual_seed(0)
    model, optimizer = start(Scaled(), level, dtype=dtype, extra=extra)
    began = model.linear.weight.detach().clone()
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).to(began.dtype)
    for step in range(steps):
        optimizer.backward((model(x) - 1).float().square().mean())
        optimizer.step()
        with torch.no_grad():
            write(model, step)
    moved = (model.linear.weight.detach().float() - began.float()).abs().mean().item()
    return model.linear.weight.detach().clone(), moved


def nothing(model, step):
    pass


def clamp_scale(model, step):
    model.scale.clamp_(0, 4.6)


def clamp_all(model, step):
    for p in model.parameters():
        p.clamp_(-100, 100)


def swap(model, step):
    """An average's weights for an evaluation, and back."""
    mine = [p.clone() for p in model.parameters()]
    for p in model.parameters():
        p.mul_(0.5)
    for p, m in zip(model.parameters(), mine):
        p.copy_(m)


def equal(a, b):
    return all(torch.equal(p, q) for p, q in zip(a, b))


@pytest.mark.parametrize("level, dtype, extra", [(level, "bf16", None) for level in LEVELS]
                         + [("O1", "bf16", FP32_MASTER), ("O2", "fp16", None), ("O1", "fp32", None)])
def test_a_clamp_that_changes_nothing_changes_nothing(level, dtype, extra):
    plain, moved = train(nothing, level, dtype, extra=extra)
    clamped, same = train(clamp_scale, level, dtype, extra=extra)
    # The scale's own master follows once, when it is first written to: by less than a unit of bf16.
    assert abs(moved - same) < 0.02 * moved
    assert (plain.float() - clamped.float()).abs().mean() < 0.02 * moved


@pytest.mark.parametrize("write", [clamp_all, swap])
@pytest.mark.parametrize("level", LEVELS)
def test_masters_survive_writes_that_keep_the_bits(write, level):
    """But for the first one, which is not known to have kept them."""
    _, moved = train(nothing, level)
    _, same = train(write, level)
    assert abs(moved - same) < 0.05 * moved


def test_masters_follow_the_elements_that_changed():
    model, optimizer = start(Scaled(), "O1", lr=1e-3)
    x = torch.randn(32, 64).bfloat16()
    for step in range(3):
        model(x).float().square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            model.linear.weight[3, 5] = 0.25 * (step + 1)
    before = optimizer.full_state(model.linear.weight, "master")
    assert before[3, 5] == 0.75
    rest = before != model.linear.weight.detach().float()
    assert rest.float().mean() > 0.5  # the others keep their remainders
    with torch.no_grad():
        model.linear.weight[4, 6] = 0.5
    after = optimizer.full_state(model.linear.weight, "master")
    assert after[4, 6] == 0.5
    after[4, 6] = before[4, 6]
    assert torch.equal(after, before)


def clamp_on_ranks(rank, stage):
    torch.manual_seed(0)
    model, optimizer = start(Scaled(), "O2", extra={"zero_optimization": {"stage": stage}})
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(rank)).bfloat16()
    for step in range(20):
        (model(x) - 1).float().square().mean().backward()
        assert optimizer.step().applied
        with torch.no_grad():
            clamp_all(model, step)
    return [p.detach().float() for p in model.parameters()]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_ranks_stay_equal(stage):
    first, second = run_ranks(2, clamp_on_ranks, stage)
    assert equal(first, second)


def test_state_asked_for_between_the_two_loads_is_not_lost():
    model, optimizer = start(Scaled(), "O2", lr=1e-3)
    x = torch.randn(32, 64).bfloat16()

    def step():
        model(x).float().square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    saved = {"model": {k: v.clone() for k, v in model.state_dict().items()},
             "optimizer": optimizer.state_dict()}
    master = optimizer.full_state(model.linear.weight, "master")
    step()
    optimizer.load_state_dict(saved["optimizer"])
    again = optimizer.state_dict()  # e.g. to log it; the model's weights are still others
    for entry, before in zip(again["state"].values(), saved["optimizer"]["state"].values()):
        assert torch.equal(entry["zerofp8"], before["zerofp8"])
    model.load_state_dict(saved["model"])
    assert torch.equal(optimizer.full_state(model.linear.weight, "master"), master)


def test_a_state_dict_of_another_dtype_is_refused():
    model, optimizer = start(Scaled(), "O2")
    state = optimizer.state_dict()
    name = next(k for k in state["state"][0] if k != "step")
    state["state"][0][name] = state["state"][0][name].double()
    with pytest.raises(zerofp8.CheckpointError, match="float64"):
        optimizer.load_state_dict(state)


def replaced(rank, folder, call):
    model, optimizer = start(Scaled(), "O2")
    optimizer.save(folder)
    if rank == 1:
        model.linear.weight.data = model.linear.weight.data.double()
    try:
        if call == "load":
            optimizer.load(folder)
        elif call == "save":
            optimizer.save(folder)
        elif rank == 1:  # local calls
            optimizer.full_state(model.linear.weight) if call == "state" else \
                optimizer.weights_changed()
        else:
            return "linear.weight initialize again"
    except zerofp8.ArgumentError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("call", ["load", "save", "state", "changed"])
def test_replaced_storage_is_an_error_on_all_ranks(call, tmp_path):
    for text in run_ranks(2, replaced, str(tmp_path), call):
        assert "linear.weight" in text and "initialize again" in text


def rest_of_the_model(rank):
    torch.manual_seed(rank)  # ranks begin with different weights
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    with torch.no_grad():
        model[1].running_mean.fill_(rank)
    trained = [p for p in model.parameters() if p.requires_grad]
    model, _ = zerofp8.initialize(model, torch.optim.AdamW(trained), {}, timeout=60)
    return [t.clone() for t in (*model.parameters(), *model.buffers())]


def test_frozen_parameters_and_buffers_begin_alike():
    first, second = run_ranks(2, rest_of_the_model)
    assert equal(first, second)


def test_two_parameters_of_one_storage_are_refused():
    weight = torch.zeros(8)
    model = nn.ParameterList([nn.Parameter(weight), nn.Parameter(weight)])
    with pytest.raises(zerofp8.ConfigError, match="one Parameter object"):
        zerofp8.initialize(model, torch.optim.AdamW(model.parameters()), {})
