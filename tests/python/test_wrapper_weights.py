"""Weights whose values are in other tensors (quantised ones are): left alone where frozen."""

import pytest
import torch
from ranks import run_ranks
from reference import loss_of, seeded_model
from torch.testing._internal.two_tensor import TwoTensor

import zerofp8


class Wrapped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = seeded_model(width=80)
        self.frozen = torch.nn.Parameter(TwoTensor(torch.ones(4, 4), torch.ones(4, 4)),
                                         requires_grad=False)

    def forward(self, x):
        return self.body(x)


def frozen(rank, stage, level):
    """Weights beside those of a model without such a weight."""
    results = []
    for model in (Wrapped(), seeded_model(width=80)):
        trained = [p for p in model.parameters() if p.requires_grad]
        model, optimizer = zerofp8.initialize(
            model, torch.optim.AdamW(trained, lr=1e-2), {"zero_optimization": {"stage": stage}},
            opt_level=level)
        for step in range(3):
            loss_of(model, step, rank, 0).backward()
            optimizer.step()
        results.append([p.detach().clone() for p in trained])
    return max(float((a - b).abs().max()) for a, b in zip(*results))


def kinds(rank):
    return [frozen(rank, stage, level) for stage, level in ((0, "O0"), (1, "O0"), (2, "O0"))]


def test_frozen_ones_are_left_alone():
    assert run_ranks(2, kinds) == [[0.0] * 3] * 2
    assert frozen(0, 0, "O2") < 1e-2  # rounded with the random bits of other names


def test_trainable_ones_are_refused_by_name():
    model = Wrapped()
    model.frozen.requires_grad_(True)
    with pytest.raises(zerofp8.ConfigError, match="\"frozen\".*TwoTensor"):
        zerofp8.initialize(model, torch.optim.AdamW(model.parameters()), {})
