"""Storages that are replaced after initialize: copies in one place are taken back."""

import pytest
import torch
from reference import loss_of, seeded_model

import zerofp8


def started(level, dtype):
    model = seeded_model(dtype, width=80)
    config = {"bf16": {"enabled": dtype is torch.bfloat16}}
    return zerofp8.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config,
                              opt_level=level)


def step(model, optimizer, number):
    loss_of(model, number, 0, 0).backward()
    optimizer.step()


def trained(level, dtype, move, load):
    """Weights after steps, a move that copies, weights that are loaded, and more steps."""
    model, optimizer = started(level, dtype)
    engines = [p.data_ptr() for p in model.parameters()]
    for number in range(3):
        step(model, optimizer, number)
    if move:
        model.to("cpu:0")
        assert all(p.data_ptr() != e for p, e in zip(model.parameters(), engines))
    if load:
        model.load_state_dict(seeded_model(dtype, width=80, seed=1).state_dict())
    for number in range(3, 6):
        step(model, optimizer, number)
    assert [p.data_ptr() for p in model.parameters()] == engines
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("load", [False, True])
@pytest.mark.parametrize("level, dtype", [("O0", torch.float32), ("O2", torch.bfloat16)])
def test_a_move_within_the_place_changes_nothing(level, dtype, load):
    moved, still = (trained(level, dtype, move, load) for move in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(moved, still))


def test_swapped_weights_are_refused_and_can_come_back():
    model, optimizer = started("O2", torch.bfloat16)
    step(model, optimizer, 0)
    own = [p.data for p in model.parameters()]
    bits = [w.clone() for w in own]
    for p in model.parameters():
        p.data = p.data * 0.5
    with pytest.raises(zerofp8.ArgumentError, match="replaced after initialize"):
        optimizer.state_dict()
    for p, weight in zip(model.parameters(), own):
        p.data = weight
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), bits))
    step(model, optimizer, 1)


def test_a_move_to_elsewhere_says_when_to_move():
    model, optimizer = started("O0", torch.float32)
    model.to(torch.float16)
    with pytest.raises(zerofp8.ArgumentError, match="accelerator.device"):
        optimizer.state_dict()
