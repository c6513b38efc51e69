"""Every cell of {model dtype} x {accumulation} x {local, sharded} x {stage}, without pipelines."""

import pytest
import torch
from ranks import run_ranks
from reference import Reference, loss_of, relative_l2, seeded_model

import zerofp8

RANKS, MICRO, STEPS, LR = 2, 2, 20, 3e-3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SCALE = {"fp16": 128.0}
CELLS = [(model, accumulation, sharded, stage) for model in DTYPES
         for accumulation in ("fp32", "bf16", "fp16", "fp8") for sharded in (False, True)
         for stage in (0, 1, 2)]
# Relative L2 error of the reduced gradient; FP8's is derived per cell.
BOUND = {"fp32": 1e-6, "bf16": 4e-3, "fp16": 1e-3}
# Distance of the losses from the reference after 20 steps, relative to the first loss.
FOLLOWS = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}


def config_of(model, accumulation, sharded, stage):
    config = {
        "gradient_accumulation_steps": MICRO,
        "gradient_accumulation_dtype": {"dtype": accumulation, "sharded": sharded},
        "zero_optimization": {"stage": stage},
        # The wire is as exact as the accumulator.
        "zerofp8": {"gradient_communication_dtype": "fp32" if accumulation == "fp16"
                    else accumulation},
    }
    if model != "fp32":
        config[model] = {"enabled": True}
    if model == "fp16":
        config["fp16"]["loss_scale"] = SCALE["fp16"]
    return config


def fp8_bound(parts):
    """Each block is rounded once per addition and once on the wire, with .0265 of its norm."""
    norm = lambda tensors: float(sum(t.square().sum() for t in tensors).sqrt())  # noqa: E731
    total = 0.0
    for rank in range(RANKS):
        running = None
        for micro in range(MICRO):
            g = parts[rank, micro]
            running = g if running is None else [a + b for a, b in zip(running, g)]
            total += norm(g) + norm(running)
    mean = [sum(g) / len(parts) for g in zip(*parts.values())]
    return 0.0265 * total / len(parts) / norm(mean)


def train_cell(rank, cell):
    model = seeded_model(DTYPES[cell[0]])
    reference = Reference(model, RANKS, MICRO, LR, scale=SCALE.get(cell[0], 1.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0)
    model, optimizer = zerofp8.initialize(model, optimizer, config_of(*cell),
                                          loss_is_divided=False, timeout=60)
    result = {"losses": [], "expected": [], "effective": (
        optimizer.settings.weight, optimizer.settings.accumulation,
        optimizer.settings.accumulation_sharded, optimizer.settings.stage)}
    for step in range(STEPS):
        loss = 0.0
        for micro in range(MICRO):
            part = loss_of(model, step, rank, micro)
            optimizer.backward(part)
            loss += part.item() / MICRO
        expected, parts = reference.gradients(step)
        if step == 0:
            found = [optimizer.full_gradient(p) for p in model.parameters()]
            mean = reference.mean(parts)
            result["error"] = relative_l2(found, mean)
            result["fp8 bound"] = fp8_bound(parts)
            result["norm"] = float(sum(g.square().sum() for g in found).sqrt())
        report = optimizer.step()
        if step == 0:
            result["reported norm"] = report.grad_norm
        assert report.applied and report.micro_batches == MICRO
        reference.update(reference.mean(parts))
        result["losses"].append(loss)
        result["expected"].append(expected)
    result["weights"] = [p.detach().float().sum().item() for p in model.parameters()]
    optimizer.close()
    return result


def walk(rank):
    results = {}
    for cell in CELLS:
        try:
            results[cell] = train_cell(rank, cell)
        except zerofp8.ConfigError as error:
            results[cell] = error
    return results


@pytest.fixture(scope="module")
def results():
    return run_ranks(RANKS, walk, timeout=400)


def runs(cell):
    """`sharded: false` holds for stages 0 and 1, `sharded: true` for 1 and 2."""
    return cell[3] in ((1, 2) if cell[2] else (0, 1))


@pytest.mark.parametrize("cell", [c for c in CELLS if runs(c)], ids=str)
def test_reduced_gradient(results, cell):
    for result in (r[cell] for r in results):
        assert not isinstance(result, Exception), result
        bound = BOUND.get(cell[1], result["fp8 bound"])
        assert 0 <= result["error"] <= bound
        assert result["reported norm"] == pytest.approx(result["norm"], rel=1e-6)


@pytest.mark.parametrize("cell", [c for c in CELLS if runs(c)], ids=str)
def test_training_follows_the_reference(results, cell):
    ranks = [r[cell] for r in results]
    assert ranks[0]["weights"] == ranks[1]["weights"]
    bound = max(FOLLOWS[cell[0]], FOLLOWS.get(cell[1], 2e-2))
    for step in range(STEPS):
        found = sum(r["losses"][step] for r in ranks) / RANKS
        expected = ranks[0]["expected"][step]
        assert abs(found - expected) <= bound * ranks[0]["expected"][0]
    assert ranks[0]["expected"][-1] < 0.8 * ranks[0]["expected"][0]


@pytest.mark.parametrize("cell", [c for c in CELLS if not runs(c)], ids=str)
def test_contradiction_names_the_key(results, cell):
    for error in (r[cell] for r in results):
        assert isinstance(error, zerofp8.ConfigError)
        assert "sharded" in str(error) and "stage" in str(error)


@pytest.mark.parametrize("cell", [c for c in CELLS if runs(c)], ids=str)
def test_case_5_explicit_key_wins_and_is_queryable(results, cell):
    model, accumulation, sharded, stage = cell
    named = "fp8_e4m3" if accumulation == "fp8" else accumulation
    assert results[0][cell]["effective"] == (model, named, sharded, stage)
