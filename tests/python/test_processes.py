"""What optimizers leave in a process: threads, descriptors, process groups; and forked processes."""

import ctypes
import gc
import hashlib
import os
import signal
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

import zerofp8
from zerofp8 import groups, torch_names


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


def pair_then_world(rank):
    if rank < 2:
        pair = dist.new_group([0, 1], use_local_synchronization=True)
        train(*make(data_parallel_group=pair))
        train(*make(data_parallel_group=pair))
    else:
        time.sleep(2)  # finds the records of the others' calls
    norms = [train(*make(timeout=20)).grad_norm for _ in range(2)]
    return norms


def test_ranks_may_initialize_for_some_groups_more_often_than_for_others():
    first, *others = run_ranks(3, pair_then_world, timeout=60)
    assert others == [first, first]


def absent_first(rank):
    if rank == 2:
        time.sleep(5)
    else:
        try:
            make(timeout=1)
        except zerofp8.CommError as error:
            assert error.absent_ranks == [2]
    return train(*make(timeout=30)).applied


def test_a_call_that_timed_out_is_withdrawn():
    assert run_ranks(3, absent_first, timeout=60) == [True] * 3


def mismatch_then_right(rank):
    pair = dist.new_group([0, 1])
    try:
        make(data_parallel_group=pair if rank == 0 else None, timeout=20)
        return None
    except zerofp8.ConfigError as error:
        text = str(error)
    return text, train(*make(timeout=20)).applied


def test_after_different_groups_ranks_can_go_on():
    answers = run_ranks(3, mismatch_then_right, timeout=60)
    assert answers == answers[:1] * 3 and answers[0][1] and "[0, 1, 2]" in answers[0][0]


def grid(rank):
    """2 stages x 2 data ranks, after stage 0 has made something of its own."""
    pairs = {r: dist.new_group(r) for r in ([0, 1], [2, 3], [0, 2], [1, 3]) for r in [tuple(r)]}
    of = {kind: next(g for r, g in pairs.items() if rank in r and (r[1] - r[0] == gap))
          for kind, gap in (("data", 1), ("pipeline", 2))}
    if rank < 2:
        train(*make(data_parallel_group=of["data"]))
    model, optimizer = make(data_parallel_group=of["data"], timeout=20,
                            pipeline_parallel_group=of["pipeline"])
    return train(model, optimizer).grad_norm


def test_stages_may_initialize_something_of_their_own_before():
    first, *others = run_ranks(4, grid, timeout=60)
    assert others == [first] * 3


def take_interrupts():
    # A shell starts what it puts into the background with SIGINT ignored, and Python leaves it so.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def interrupted(rank, config):
    take_interrupts()
    model, optimizer = make(config=dict(config), timeout=30)
    if rank == 1:
        time.sleep(6)
        return None
    began = time.monotonic()
    threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        train(model, optimizer)
        return "no error"
    except KeyboardInterrupt:
        seconds = time.monotonic() - began
    try:
        if not config:  # the others' communicators are several
            optimizer.save("/nowhere")
        text = "interrupted by a signal"
    except zerofp8.CommError as error:  # stays failed, and says why
        text = str(error)
    optimizer.close()
    return seconds, time.monotonic() - began, text


@pytest.mark.parametrize("config", CONFIGS)
def test_an_interrupt_ends_a_collective(config):
    (seconds, closed, text), _ = run_ranks(2, interrupted, CONFIGS[config], timeout=60)
    assert seconds < 5 and closed < 6 and "interrupted by a signal" in text


def handled(rank):
    """A handler that raises nothing does not end the wait."""
    model, optimizer = make(timeout=30)
    seen = []
    signal.signal(signal.SIGUSR1, lambda *_: seen.append(time.monotonic()))
    if rank == 1:
        time.sleep(3)
    else:
        threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
    applied = train(model, optimizer).applied
    return applied, len(seen) == 1 - rank and all(time.monotonic() - s > 1 for s in seen)


def test_a_handler_runs_while_a_collective_waits():
    assert run_ranks(2, handled, timeout=60) == [(True, True)] * 2


def interrupted_in_a_payload(rank):
    """The sender is stopped in the middle of it, and goes on when the receiver has given up."""
    take_interrupts()
    comm = groups.communicator([0, 1], 5.0 if rank == 0 else 60.0)
    size = 256 << 20
    memory = (ctypes.c_char * size)()
    if rank == 0:
        ctypes.memset(memory, 1, size)
    sender = int.from_bytes(comm.gather(os.getpid().to_bytes(8, "little"))[0], "little")

    def stop():
        while memory[size // 8] == b"\0":
            pass
        os.kill(sender, signal.SIGSTOP)
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGINT)

    if rank == 1:
        threading.Thread(target=stop, daemon=True).start()
    try:
        comm.broadcast(ctypes.addressof(memory), size, 0)
        return "no error"
    except zerofp8.CommError:
        return "given up"
    except KeyboardInterrupt:
        before = hashlib.sha256(memory).digest()
        os.kill(sender, signal.SIGCONT)
        time.sleep(3)
        return memory[size - 1] == b"\0" and hashlib.sha256(memory).digest() == before


def test_what_was_given_up_does_not_write_any_more():
    assert run_ranks(2, interrupted_in_a_payload, timeout=60) == ["given up", True]


def test_a_name_that_torch_does_not_have_is_told(monkeypatch):
    assert torch_names.missing() == []
    c10d = dist.distributed_c10d
    with monkeypatch.context() as patch:
        patch.delattr(torch._C, "_current_graph_task_id")
        patch.setattr(c10d, "_process_group_name", lambda ranks, hashed: "")
        with pytest.raises(zerofp8.UnsupportedError) as error:
            torch_names.check()
    assert "torch._C._current_graph_task_id" in str(error.value)
    assert "argument \"use_hashed_name\" of torch.distributed.distributed_c10d" in str(error.value)


def renamed_inside_torch(rank):
    dist.new_group = lambda *a, **k: dist.group.WORLD  # as if another function gave the name
    with pytest.raises(zerofp8.UnsupportedError, match="_process_group_name"):
        groups.communicator([0, 1], 10.0)


def test_a_group_without_the_name_it_was_given_is_an_error():
    run_ranks(2, renamed_inside_torch)
