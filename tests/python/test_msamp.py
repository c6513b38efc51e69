"""MS-AMP's loops with only the import changed, compared with torch's own AdamW."""

import copy

import pytest
import torch
from ranks import run_ranks
from reference import loss_of, seeded_model

import zerofp8
import zerofp8 as msamp

STEPS, LR = 20, 1e-2
WIDTH = 80  # one weight is large enough for FP8 moments at O2


def plain_loop(rank, spelling, level):
    """Weights after the loop of MS-AMP's first example."""
    model = seeded_model(width=WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    if spelling == "keyword":
        model, optimizer = msamp.initialize(model, optimizer, opt_level=level)
    elif spelling == "keywords":
        model, optimizer = msamp.initialize(model=model, optimizer=optimizer, opt_level=level,
                                            use_te=False)
    else:
        model, optimizer = msamp.initialize(model, optimizer, level)
    assert optimizer.settings.opt_level == level
    for step in range(STEPS):
        loss = loss_of(model, step, rank, 0)
        loss.backward()
        optimizer.all_reduce_grads(model)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def scaler_loop(rank, level):
    """The same with GradScaler; rank 0's loss overflows in one step, which all ranks skip."""
    model = seeded_model(width=WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    model, optimizer = msamp.initialize(model, optimizer, opt_level=level)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    skipped = []
    for step in range(STEPS + 1):
        optimizer.zero_grad()
        loss = loss_of(model, step - (step > 3), rank, 0)
        if step == 3 and rank == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        optimizer.all_reduce_grads(model)
        scaler.step(optimizer)
        scaler.update()
        if not optimizer.last_report.applied:
            skipped.append(step)
    assert skipped == [3] and scaler.get_scale() == 2.0**15
    return [p.detach().clone() for p in model.parameters()]


def by_torch(ranks):
    """Weights before and after torch's AdamW on the mean gradient of all ranks."""
    model = seeded_model(width=WIDTH)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(loss_of(model, step, r, 0) for r in range(ranks)) / ranks).backward()
        optimizer.step()
    return before, [p.detach() for p in model.parameters()]


# Distance to torch's weights, in parts of the way that these have gone. O1 rounds gradients to E4M3
# (at most 1/16 of each), O2 the moments, too.
BOUNDS = {"O0": 1e-6, "O1": 0.04, "O2": 0.07}


def check(results, ranks, level):
    before, expected = by_torch(ranks)
    way = sum((e - b).square().sum() for e, b in zip(expected, before)).sqrt()
    for weights in results:
        off = sum((w - e).square().sum() for w, e in zip(weights, expected)).sqrt()
        assert off / way <= BOUNDS[level], float(off / way)
        assert all(torch.equal(w, r) for w, r in zip(weights, results[0]))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("spelling, level", [("keyword", "O1"), ("keyword", "O2"), ("keyword", "O0"),
                                             ("positional", "O1"), ("keywords", "O2")])
def test_ms_amp_loop(spelling, level, ranks):
    check(run_ranks(ranks, plain_loop, spelling, level), ranks, level)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_ms_amp_loop_with_grad_scaler(level, ranks):
    check(run_ranks(ranks, scaler_loop, level), ranks, level)


def test_ms_amp_arguments_that_do_not_fit():
    model = seeded_model(width=WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(zerofp8.ConfigError, match="O1.*O2"):
        msamp.initialize(model, optimizer, "O1", opt_level="O2")
    with pytest.raises(zerofp8.UnsupportedError, match="use_te"):
        msamp.initialize(model, optimizer, opt_level="O1", use_te=True)
    with pytest.raises(zerofp8.ConfigError, match="O7"):
        msamp.initialize(model, optimizer, "O7")


def test_a_copy_of_the_model_is_free():
    """What was said of the model holds for the model only."""
    model = seeded_model(width=WIDTH)
    twin = copy.deepcopy(model)
    model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters()), opt_level="O1")
    loss_of(twin, 0, 0, 0).backward()
    assert all(p.grad is not None for p in twin.parameters())
    assert all(p.grad is None for p in model.parameters())
