"""What optimizers leave in a process: threads, descriptors, process groups; and forked processes."""

import gc
import os
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

import zerofp8


def make(rank=0, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    template = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return zerofp8.initialize(model, template, options.pop("config", {}), **options)


def train(model, optimizer):
    model(torch.randn(2, 8)).sum().backward()
    return optimizer.step()


def ends_in_time(child, seconds=10):
    """Exit code of a forked child; None, and it is killed, if it does not end."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return None


def dropped(rank):
    gc.disable()
    model, optimizer = make()
    train(model, optimizer)
    seen = weakref.ref(optimizer)
    del optimizer
    return seen() is None


def test_a_dropped_optimizer_goes_at_once():
    assert run_ranks(2, dropped) == [True, True]


# The engine makes communicators of its own: of the replicas of a shard, of micro-batches.
CONFIGS = {"plain": {}, "hybrid": {"zero_optimization": {"stage": 1},
                                   "zerofp8": {"shard_group_size": 1}},
           "sharded": {"zero_optimization": {"stage": 2, "overlap_comm": True}}}


def fork_with_a_cycle(rank, config):
    model, optimizer = make(config=config)
    train(model, optimizer)
    optimizer.itself = optimizer  # as a scheduler, which wraps its step, makes one
    gc.disable()
    del model, optimizer
    child = os.fork()
    if child == 0:
        gc.collect()
        os._exit(7)
    return ends_in_time(child)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_forked_process_can_collect_an_optimizer(config):
    assert run_ranks(2, fork_with_a_cycle, CONFIGS[config]) == [7, 7]


def fork_that_steps(rank):
    model, optimizer = make()
    train(model, optimizer)
    child = os.fork()
    if child == 0:
        try:
            train(model, optimizer)
            os._exit(1)
        except zerofp8.CommError as error:
            os._exit(7 if "forked" in str(error) else 2)
    return ends_in_time(child)


def test_a_step_in_a_forked_process_is_an_error():
    assert run_ranks(2, fork_that_steps) == [7, 7]


def trials(rank, end, config):
    counts = []
    for _ in range(4):
        model, optimizer = make(config=dict(config))
        train(model, optimizer)
        if end == "close":
            optimizer.close()
        del model, optimizer
        counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return counts


@pytest.mark.parametrize("config", CONFIGS)
def test_close_gives_threads_and_groups_back(config):
    for counts in run_ranks(2, trials, "close", CONFIGS[config]):
        assert counts[1:] == counts[:1] * 3


def test_collection_gives_threads_and_groups_back():
    for counts in run_ranks(2, trials, "del", {}):
        assert counts[1:] == counts[:1] * 3


def closed_at_different_times(rank):
    model, optimizer = make()
    train(model, optimizer)
    began = time.monotonic()
    if rank == 0:
        time.sleep(2)
    optimizer.close()
    seconds = time.monotonic() - began
    optimizer.close()  # twice is once
    other = make()[1]
    dist.destroy_process_group()
    other.close()
    return seconds


def test_close_waits_for_nobody():
    first, second = run_ranks(2, closed_at_different_times, timeout=60)
    assert first < 3 and second < 1
