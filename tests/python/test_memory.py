"""Memory: what a backward pass adds to the process, and the engine's bytes as planned."""

import ctypes
import gc

import pytest
import torch
from ranks import run_ranks
from torch import nn

import zerofp8

LAYERS, WIDTH = 12, 2048  # 8 MiB of bf16 each
LAYER_BYTES = WIDTH * WIDTH * 2
M_MMAP_THRESHOLD = -3  # malloc.h


def resident():
    """Bytes of this process in memory (Linux: VmRSS)."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def big_model():
    layers = [nn.Linear(WIDTH, WIDTH, bias=False).bfloat16() for _ in range(LAYERS)]
    return nn.Sequential(*layers)


def growth_in_backward(rank, ours):
    """Largest growth of the resident memory during a second step's backward pass, in bytes."""
    # glibc: tensors of a MiB or more go back to the system when they are freed.
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
    model = big_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if ours:
        model, optimizer = zerofp8.initialize(
            model, optimizer, {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
            opt_level="O2", timeout=60)
    seen = []
    for p in model.parameters():
        p.register_hook(lambda grad: seen.append(resident()))
    for _ in range(2):
        loss = model(torch.randn(4, WIDTH).bfloat16()).float().square().mean()
        gc.collect()
        before, seen[:] = resident(), []
        loss.backward()
        seen.append(resident())
        optimizer.step()
        optimizer.zero_grad()
    return max(seen) - before


def test_no_gradient_lives_on_after_its_hook():
    """One layer's at a time, where torch holds them all."""
    torchs = run_ranks(1, growth_in_backward, False)[0]
    assert torchs > (LAYERS - 1) * LAYER_BYTES  # the measure sees gradients
    assert run_ranks(1, growth_in_backward, True)[0] < 2.5 * LAYER_BYTES


def planned_and_counted(rank, level, stage):
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).bfloat16()
    model, optimizer = zerofp8.initialize(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3),
        {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}, opt_level=level,
        timeout=60)
    for _ in range(3):
        model(torch.randn(4, 256).bfloat16()).float().square().mean().backward()
        optimizer.step()
    allocated = optimizer.plan.allocated_bytes
    return optimizer.plan.state_bytes, sum(allocated.values()) - allocated["transient"]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("ranks, stage", [(1, 0), (2, 1), (2, 2)])
def test_state_bytes_are_as_planned(level, ranks, stage):
    for planned, counted in run_ranks(ranks, planned_and_counted, level, stage):
        assert planned == counted > 0
