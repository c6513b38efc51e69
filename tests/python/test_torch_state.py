"""Taking over from torch's AdamW in the middle of training, and handing back."""

import copy

import pytest
import torch
from ranks import run_ranks
from reference import loss_of, seeded_model

import zerofp8

LR = 3e-3


def torchs(steps, start=0, saved=None, model=None):
    """A run of torch's AdamW: model, optimizer, losses."""
    model = model or seeded_model(width=40)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    if saved is not None:
        optimizer.load_state_dict(saved)
    losses = []
    for step in range(start, start + steps):
        loss = loss_of(model, step, 0, 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses


def ours(model, stage=1, level="O0", dtype=torch.float32, template=None):
    model = model.to(dtype)
    template = template or torch.optim.AdamW(model.parameters(), lr=1.0)
    config = {"bf16": {"enabled": dtype is torch.bfloat16}, "zero_optimization": {"stage": stage}}
    return zerofp8.initialize(model, template, config, opt_level=level, timeout=30)


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        loss = loss_of(model, step, 0, 0)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def close(found, expected, tolerance):
    return all(abs(a - b) <= tolerance * abs(b) for a, b in zip(found, expected))


def take_over(rank):
    """FP32: torch's own numbers go on, here and back again in torch."""
    found = []
    for stage in (0, 1, 2):
        model, optimizer, _ = torchs(4)
        saved = copy.deepcopy(optimizer.state_dict())
        unbroken = torchs(8, 4, copy.deepcopy(saved), copy.deepcopy(model))  # torch writes into it
        model, optimizer = ours(model, stage)
        optimizer.load_state_dict(saved)
        here = [optimizer.full_state(p) for p in model.parameters()]
        found.append(all(torch.equal(h[k], saved["state"][i][k].cpu()) for i, h in enumerate(here)
                         for k in ("exp_avg", "exp_avg_sq")))
        found.append(optimizer.param_groups[0]["lr"] == LR and optimizer.applied_steps == 4)
        first = train(model, optimizer, range(4, 8))
        back = optimizer.torch_state_dict()
        found.append(all(torch.equal(back["state"][i][k], optimizer.full_state(p, k).cpu())
                         for i, p in enumerate(model.parameters()) for k in ("exp_avg", "exp_avg_sq")))
        optimizer.close()
        second = torchs(4, 8, back, copy.deepcopy(model))[2]
        found.append(close(first + second, unbroken[2], 1e-4))
    return found


def test_torchs_adamw_goes_on_here_and_back_in_torch():
    assert run_ranks(2, take_over) == [[True] * 12] * 2


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_bf16_with_masters_of_an_fp32_state_dict(level):
    model, optimizer, _ = torchs(4)
    saved, weights = optimizer.state_dict(), copy.deepcopy(model.state_dict())
    moments = {k: [saved["state"][i][k].clone() for i in range(6)]
               for k in ("exp_avg", "exp_avg_sq")}
    model, optimizer = ours(copy.deepcopy(model), level=level, dtype=torch.bfloat16)
    optimizer.load_state_dict(saved)
    optimizer.load_masters(weights)
    bits = {"O0": 24, "O2": 16, "O3": 16}[level]
    for (name, p), master in zip(model.named_parameters(), optimizer.master_weights().values()):
        # Rounded twice with fewer bits: a tie may go either way.
        assert ((p.float() - weights[name]).abs() <= weights[name].abs() * 2.0**-7.9).all()
        assert ((master - weights[name]).abs() <= weights[name].abs() * 2.0**-bits).all()
    for kind, expected in moments.items():
        for p, values in zip(model.parameters(), expected):
            found = optimizer.full_state(p, kind)
            assert (found - values).abs().max() <= 0.08 * values.abs().max()
    before = optimizer.full_state(model[0].weight, "master")
    train(model, optimizer, range(4, 5))  # weights are not taken for written from outside
    moved = (optimizer.full_state(model[0].weight, "master") - before).abs().max()
    assert 0 < moved < 2 * LR


def masters_on_ranks(rank):
    model, optimizer = ours(seeded_model(width=40), stage=2, dtype=torch.bfloat16)
    weights = {k: v + 2.0**-12 for k, v in seeded_model(width=40, seed=5).state_dict().items()}
    optimizer.load_masters(weights)
    same = all(torch.equal(optimizer.full_state(p, "master"), weights[n]) and
               torch.equal(p, weights[n].bfloat16()) for n, p in model.named_parameters())
    losses = train(model, optimizer, range(2))
    return same, losses


def test_masters_on_two_ranks():
    first, second = run_ranks(2, masters_on_ranks)
    assert first == second and first[0]


def test_a_template_that_has_stepped_is_taken_over():
    model, template, _ = torchs(4)
    unbroken = torchs(4, 4, copy.deepcopy(template.state_dict()), copy.deepcopy(model))[2]
    model, optimizer = ours(model, template=template)
    assert optimizer.applied_steps == 4 and optimizer.state[model[0].bias]["step"] == 4
    assert close(train(model, optimizer, range(4, 8)), unbroken, 1e-5)


def test_a_state_without_steps_begins_anew():
    model, optimizer = ours(seeded_model(width=40))
    fresh = torch.optim.AdamW(model.parameters(), lr=LR).state_dict()
    train(model, optimizer, range(2))
    optimizer.load_state_dict(fresh)
    assert optimizer.applied_steps == 0 and not optimizer.full_state(model[0].weight, "exp_avg").any()


@pytest.mark.parametrize("change,text", [
    (lambda e: e.pop("exp_avg_sq"), "has no exp_avg_sq"),
    (lambda e: e.update(exp_avg=torch.zeros(3)), "shape"),
    (lambda e: e.update(exp_avg_sq=-torch.ones(40, 12)), "0 or above"),
    (lambda e: e.update(max_exp_avg_sq=torch.zeros(40, 12)), "amsgrad")])
def test_errors(change, text):
    model, optimizer, _ = torchs(1)
    saved = optimizer.state_dict()
    model, optimizer = ours(copy.deepcopy(model))
    entry = dict(saved["state"][0])
    change(entry)
    with pytest.raises(zerofp8.CheckpointError, match=f"0.weight.*{text}"):
        optimizer.load_state_dict({**saved, "state": {**saved["state"], 0: entry}})
    assert optimizer.applied_steps == 0
    with pytest.raises(zerofp8.CheckpointError, match="2.bias"):
        optimizer.load_masters({k: v for k, v in model.state_dict().items() if k != "2.bias"})
