"""torch's ``maximize``, for one of two parameter groups."""

import pytest
import torch
from ranks import run_ranks
from reference import loss_of, seeded_model

import zerofp8


def groups_of(model):
    parameters = list(model.parameters())
    return [{"params": parameters[:2], "maximize": True}, {"params": parameters[2:]}]


def trained(rank, ranks, kind, stage):
    """What is off from torch's own optimizer, which has the gradients of all ranks."""
    model, twin = seeded_model(width=80), seeded_model(width=80)
    options = {"lr": 1e-3, "weight_decay": 0.1}
    theirs = kind(groups_of(twin), **options)
    model, ours = zerofp8.initialize(model, kind(groups_of(model), **options),
                                     {"zero_optimization": {"stage": stage},
                                      "gradient_clipping": 0.5}, opt_level="O0")
    for step in range(4):
        theirs.zero_grad()
        sum(loss_of(twin, step, r, 0) / ranks for r in range(ranks)).backward()
        loss_of(model, step, rank, 0).backward()
        gradient = ours.full_gradient(model[0].weight)
        assert torch.allclose(gradient, twin[0].weight.grad, rtol=1e-4, atol=1e-6)  # not turned
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        theirs.step()
        assert ours.step().grad_norm == pytest.approx(float(norm), rel=1e-4)
    assert ours.applied_steps == 4
    return max(float((a - b).abs().max()) for a, b in zip(model.parameters(), twin.parameters()))


def all_kinds(rank, ranks):
    return {(kind.__name__, stage): trained(rank, ranks, kind, stage)
            for kind, stage in ((torch.optim.AdamW, 0), (torch.optim.Adam, 1),
                                (torch.optim.AdamW, 2)) if ranks > 1 or stage < 2}


@pytest.mark.parametrize("ranks", [1, 2])
def test_maximize_as_torch(ranks):
    for off in run_ranks(ranks, all_kinds, ranks):
        assert all(value < 1e-5 for value in off.values()), off


def coded(rank):
    """O2: the bits of a loss whose sign is turned, but for what is rounded."""
    weights = []
    for maximize in (True, False):
        model = seeded_model(width=80)
        template = torch.optim.AdamW(model.parameters(), lr=1e-3, maximize=maximize)
        model, optimizer = zerofp8.initialize(model, template, {}, opt_level="O2")
        for step in range(6):
            loss = loss_of(model, step, rank, 0)
            (loss if maximize else -loss).backward()
            optimizer.step()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    start = torch.cat([p.detach().flatten() for p in seeded_model(width=80).parameters()])
    return float((weights[0] - weights[1]).norm() / (weights[0] - start).norm())


def test_maximize_with_coded_state():
    assert all(off < 0.05 for off in run_ranks(2, coded))
