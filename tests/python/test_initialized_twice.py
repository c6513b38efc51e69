"""``initialize`` again on a model that has an optimizer: a notebook's cell, a second phase."""

import logging

import pytest
import torch
from ranks import run_ranks
from torch import nn

import zerofp8


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def template(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)


def steps(model, optimizer):
    for seed in range(3):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def twice(rank, stage):
    reference = net()
    for _ in range(2):
        steps(reference, template(reference))
    model, kept = net(), []
    for _ in range(2):
        model, optimizer = zerofp8.initialize(
            model, template(model), {"zero_optimization": {"stage": stage}}, timeout=30)
        # A scheduler makes a cycle, so that a first one that nobody needs is still there.
        kept.append((optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 100)))
        steps(model, optimizer)
    worst = max((a - b).abs().max().item()
                for a, b in zip(model.parameters(), reference.parameters()))
    with pytest.raises(zerofp8.Error, match="closed"):
        kept[0][0].step()
    return worst


@pytest.mark.parametrize("size", [1, 2])
def test_the_second_one_trains(size):
    for stage in (0, 1, 2):
        assert max(run_ranks(size, twice, stage)) < 1e-6


def test_it_is_said(caplog):
    model = net()
    model, first = zerofp8.initialize(model, template(model), {})
    model(torch.ones(2, 4)).sum().backward()
    with caplog.at_level(logging.WARNING, "zerofp8"):
        zerofp8.initialize(model, template(model), {})
    assert ["closed, and the gradients" in r.getMessage() for r in caplog.records] == [True]
