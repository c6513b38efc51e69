"""state_dict() is the whole state, also where one rank calls it alone, and loads on any ranks."""

import io
import logging
import time

import pytest
import torch
from ranks import run_ranks
from reference import loss_of, seeded_model

import zerofp8

# One of each: stages 0 to 2, levels O0 and O2, all dtypes of weights.
CONFIGS = {f"{level} stage {stage}": {
    "bf16": {"enabled": level != "O0"}, "zero_optimization": {"stage": stage},
    "zerofp8": {"opt_level": level, "fp32_moments_below": 0}}
    for level in ("O0", "O2") for stage in (0, 1, 2)}


def make(config, seed=0, **options):
    dtype = torch.bfloat16 if config["bf16"]["enabled"] else torch.float32
    model = seeded_model(dtype, width=40, seed=seed)
    template = torch.optim.AdamW([{"params": model[0].parameters()},
                                  {"params": model[2:].parameters(), "lr": 1e-3}], lr=3e-3)
    return zerofp8.initialize(model, template, config, timeout=20, **options)


def train(model, optimizer, steps):
    """The same batches on all ranks, so that their number does not matter."""
    losses = []
    for step in steps:
        loss = loss_of(model, step, 0, 0)
        optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def bits(model):
    return [p.detach().contiguous().view(torch.uint8).clone() for p in model.parameters()]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


def save_alone(rank, path):
    """Rank 0 saves while rank 1 goes on; the unbroken run's losses and weights."""
    found = {}
    for name, config in CONFIGS.items():
        model, optimizer = make(config)
        train(model, optimizer, range(3))
        if rank == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()},
                       f"{path}/{name}")
        losses = train(model, optimizer, range(3, 6))
        found[name] = losses, bits(model)
        optimizer.close()
    return found


def resume(rank, path):
    found = {}
    for number, (name, config) in enumerate(CONFIGS.items()):
        model, optimizer = make(config, seed=9)
        saved = torch.load(f"{path}/{name}", weights_only=True)
        parts = [(model, "model"), (optimizer, "optimizer")]
        for part, key in parts if number % 2 else reversed(parts):
            part.load_state_dict(saved[key])
        found[name] = train(model, optimizer, range(3, 6)), bits(model)
        optimizer.close()
    return found


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    return path, run_ranks(2, save_alone, str(path))[0]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rank_0_saves_alone_and_any_number_of_ranks_resumes(unbroken, ranks):
    path, expected = unbroken
    for found in run_ranks(ranks, resume, str(path)):
        for name, (losses, weights) in expected.items():
            assert found[name][0] == losses, name
            assert same(found[name][1], weights), name


def every_way(rank):
    """Consolidated, asked for by one rank, by the other, by both: the same bytes."""
    config = CONFIGS["O2 stage 2"]
    model, optimizer = make(config)
    train(model, optimizer, range(2))
    optimizer.consolidate_state_dict(to=1)
    ways = [optimizer.state_dict()]  # rank 0 asks
    train(model, optimizer, range(2, 3))
    together = optimizer.state_dict()
    before = optimizer.applied_steps
    optimizer.load_state_dict(together)  # rank 1 may still be asking for rank 0's
    ways += [together, optimizer.state_dict()]
    return before, [{k: v for e in w["state"].values() for k, v in e.items()} for w in ways]


def test_all_ways_give_the_same_bytes():
    (steps, first), (_, second) = run_ranks(2, every_way)
    assert steps == 3
    for a, b in zip(first, second):
        assert all(torch.equal(a[k], b[k]) for k in a)
    assert all(torch.equal(first[1][k], first[2][k]) for k in first[1])


def outside_writes(rank, when):
    """Weights are written on all ranks; rank 0 saves before or after that, rank 1 goes on."""
    model, optimizer = make(CONFIGS["O0 stage 2"] | {"bf16": {"enabled": True}})
    train(model, optimizer, range(2))
    saved = None
    if rank == 0 and when == "before":
        time.sleep(1)  # rank 1 has looked at its weights then
        saved = optimizer.state_dict()
    weights = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.05, 0.05)
    if rank == 0 and when == "after":
        saved, weights = optimizer.state_dict(), [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, range(2, 3))
    if rank == 1:
        return None
    return saved, weights, bits(model)


@pytest.mark.parametrize("when", ["before", "after"])
def test_masters_that_follow_writes_from_outside(when):
    saved, weights, expected = run_ranks(2, outside_writes, when)[0]
    model, optimizer = make(CONFIGS["O0 stage 2"] | {"bf16": {"enabled": True}}, seed=9)
    optimizer.load_state_dict(saved)
    with torch.no_grad():
        for p, w in zip(model.parameters(), weights):
            p.copy_(w)
    optimizer.state_dict()
    if when == "before":
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.05, 0.05)
    train(model, optimizer, range(2, 3))
    assert same(bits(model), expected)


def absent(rank):
    config = CONFIGS["O0 stage 1"]
    model, optimizer = make(config)
    train(model, optimizer, range(1))
    if rank == 1:
        optimizer.close()
        return None
    time.sleep(0.3)
    with pytest.raises(zerofp8.CommError, match="consolidate_state_dict") as caught:
        optimizer.state_dict()
    assert caught.value.absent_ranks == [1]
    return True


def test_a_rank_that_has_closed_is_named():
    assert run_ranks(2, absent)[0] is True


def ahead(rank):
    """Rank 1 alone has loaded another state: rank 0 gets an error, not a mixture."""
    model, optimizer = make(CONFIGS["O0 stage 1"])
    train(model, optimizer, range(1))
    saved = optimizer.state_dict()
    if rank == 0:
        optimizer.load_state_dict(saved)
        with pytest.raises(zerofp8.CommError, match="rank 1 is after 1 steps, 0 loads"):
            optimizer._shards._timeout = 1.0
            optimizer.state_dict()
    else:
        time.sleep(3)
    return True


def test_ranks_that_have_not_loaded_the_same_are_named():
    assert run_ranks(2, ahead) == [True, True]


def test_errors_of_loading():
    model, optimizer = make(CONFIGS["O0 stage 1"])
    train(model, optimizer, range(1))
    saved = optimizer.state_dict()
    other, its = make(CONFIGS["O2 stage 1"])
    with pytest.raises(zerofp8.CheckpointError, match="torch_state_dict"):
        its.load_state_dict(saved)
    del saved["state"][1]["exp_avg"]
    with pytest.raises(zerofp8.CheckpointError, match="exp_avg of .*missing"):
        optimizer.load_state_dict(saved)
    del saved["state"][1]
    with pytest.raises(zerofp8.CheckpointError, match="nothing of parameter"):
        optimizer.load_state_dict(saved)
    with pytest.raises(zerofp8.CheckpointError, match="param_groups"):
        optimizer.load_state_dict({"state": {}})


def through_torch_save(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_state_of_before_the_first_step_takes_state_back():
    config = CONFIGS["O2 stage 1"]
    model, optimizer = make(config)
    start = {"m": model.state_dict(), "o": optimizer.state_dict()}
    start = through_torch_save(start)
    optimizer.load_state_dict(start["o"])  # changes nothing
    first = train(model, optimizer, range(3)), bits(model)
    optimizer.load_state_dict(start["o"])
    model.load_state_dict(start["m"])
    assert (train(model, optimizer, range(3)), ) == (first[0], ) and same(bits(model), first[1])


def between(rank, folder):
    """Saved between micro-batches by both ways: the state of the last step, and one warning."""
    told, found = [], []
    logging.getLogger("zerofp8").addHandler(Told(told))
    for stage in (0, 1, 2):
        config = {**CONFIGS[f"O2 stage {stage}"], "gradient_accumulation_steps": 2}
        model, optimizer = make(config, loss_is_divided=False)
        before = {}
        for step in range(3):
            if step == 2:
                before = optimizer.state_dict()["state"]
            for micro in range(2):
                optimizer.backward(loss_of(model, step, rank, micro))
                if micro == 0:
                    saved = optimizer.state_dict()["state"]
                    optimizer.save(f"{folder}/{stage}")
            if step < 2:
                optimizer.step()
        found.append(all(torch.equal(e[k], before[i][k]) for i, e in saved.items() for k in e))
        weights = bits(model)
        optimizer.zero_grad()
        optimizer.load(f"{folder}/{stage}")
        found.append(optimizer.applied_steps == 2 and same(bits(model), weights))
        optimizer.close()
    return found, told


class Told(logging.Handler):
    def __init__(self, lines):
        super().__init__()
        self.lines = lines

    def emit(self, record):
        if "between micro-batches" in record.getMessage():
            self.lines.append(record.getMessage())


def test_saved_between_micro_batches(tmp_path):
    (found, told), (others, _) = run_ranks(2, between, str(tmp_path))
    assert found == others == [True] * 6
    for way in ("state_dict between", "saved between"):
        assert sum(way in line for line in told) == 3  # once per optimizer
