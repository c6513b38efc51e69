"""The two-level reduce-scatter through the hook: two simulated nodes of two ranks each."""

import pytest
import torch
from ranks import run_ranks
from reference import Reference, loss_of, relative_l2, seeded_model
from test_state import bits, same

import zerofp8

RANKS, PER_NODE, LR, STEPS = 4, 2, 3e-3, 6
CONFIGS = {
    "fp32": {"zero_optimization": {"stage": 1}},
    "fp32 sharded": {"zero_optimization": {"stage": 2}},
    "fp8": {"zero_optimization": {"stage": 1},
            "zerofp8": {"gradient_communication_dtype": "fp8"}},
    "bf16 O2": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2, "overlap_comm": True},
                "zerofp8": {"opt_level": "O2"}},
}
FLAT, ONE, FP32, BF16 = None, {"ranks_per_node": 1}, {"ranks_per_node": PER_NODE}, {
    "ranks_per_node": PER_NODE, "in_node_dtype": "bf16"}


def start(name, levels, seed=0):
    config = {k: dict(v) for k, v in CONFIGS[name].items()}
    if levels:
        config.setdefault("zerofp8", {})["two_level_reduce_scatter"] = levels
    model = seeded_model(torch.bfloat16 if "bf16" in name else torch.float32, width=40, seed=seed)
    template = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0)
    return zerofp8.initialize(model, template, config, timeout=60)


def train(model, optimizer, steps, rank):
    for step in steps:
        loss_of(model, step, rank, 0).backward()
        report = optimizer.step()
    return report


def one(rank, name, levels):
    model, optimizer = start(name, levels)
    loss_of(model, 0, rank, 0).backward()
    gradient = [optimizer.full_gradient(p) for p in model.parameters()]
    wire = optimizer.step().wire
    train(model, optimizer, range(1, STEPS), rank)
    planned = {}
    for row in optimizer.plan.as_dict()["collectives"]:
        if row["operation"] != "control":
            planned[row["dtype"]] = planned.get(row["dtype"], 0) + row["bytes_per_step"]
    return {"gradient": gradient, "bits": bits(model), "planned": planned,
            "wire": {k: v for k, v in wire.items() if k in planned}, "plan": str(optimizer.plan)}


def walk(rank):
    found = {(name, i): one(rank, name, levels) for name in CONFIGS
             for i, levels in enumerate((FLAT, ONE, FP32, BF16))}
    try:
        start("fp32", {"ranks_per_node": 3})
    except zerofp8.ConfigError as error:
        found["three"] = str(error)
    try:
        start("fp32", FP32 if rank == 1 else FLAT)
    except zerofp8.CommError as error:
        found["differ"] = str(error)
    return found


@pytest.fixture(scope="module")
def results():
    return run_ranks(RANKS, walk)


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_the_mean(results, name):
    dtype = torch.bfloat16 if "bf16" in name else torch.float32
    reference = Reference(seeded_model(dtype, width=40), RANKS, 1, LR)
    exact = reference.mean(reference.gradients(0)[1])
    for r in results:
        for i, bound in ((2, 1e-6), (3, 2.0**-8)):
            if name in ("fp8", "bf16 O2"):  # one more rounding each of wire and accumulator
                bound += 0.0265 * 2
            assert relative_l2(r[name, i]["gradient"], exact) <= bound
            assert same(r[name, i]["bits"], results[0][name, i]["bits"])


@pytest.mark.parametrize("name", CONFIGS)
def test_one_rank_per_node_is_flat(results, name):
    for r in results:
        assert same(r[name, 0]["bits"], r[name, 1]["bits"])
        assert not same(r[name, 0]["bits"], r[name, 2]["bits"])


@pytest.mark.parametrize("name", CONFIGS)
def test_wire_bytes_are_the_planned_ones(results, name):
    for r in results:
        for i in range(4):
            assert r[name, i]["wire"] == r[name, i]["planned"]
        assert "across nodes" in r[name, 2]["plan"]
        assert "across nodes" not in r[name, 1]["plan"]
    # Flat, three parts leave a rank; with two nodes of two ranks, one.
    assert results[0]["fp8", 2]["wire"]["fp8_e4m3"] * 3 == results[0]["fp8", 0]["wire"]["fp8_e4m3"]


def test_mistakes_are_the_same_on_every_rank(results):
    for r in results:
        assert "3 with 4 data ranks" in r["three"]
        assert "ranks per node 2" in r["differ"] and r["differ"] == results[0]["differ"]


def saved_and_loaded(rank, folder):
    model, optimizer = start("bf16 O2", BF16)
    train(model, optimizer, range(3), rank)
    optimizer.save(folder)
    saved = bits(model)
    train(model, optimizer, range(3, 6), rank)
    unbroken, found = bits(model), []
    for levels in (BF16, FLAT):
        model, optimizer = start("bf16 O2", levels, seed=9)
        optimizer.load(folder)
        found.append(same(saved, bits(model)))
        train(model, optimizer, range(3, 6), rank)
        found.append(same(unbroken, bits(model)))
    return found


def test_resumes_and_loads_flat(tmp_path):
    for found in run_ranks(RANKS, saved_and_loaded, str(tmp_path)):
        assert found == [True, True, True, False]
