"""The communicator over torch's process groups."""

import os
import struct
import time

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import zerofp8
from zerofp8 import groups


def make(timeout=60.0):
    return groups.communicator(list(range(dist.get_world_size())), timeout)


def exchange(rank):
    comm = make()
    size = comm.size
    sent = bytes([rank * 16 + peer for peer in range(size) for _ in range(1000)])
    found = comm.all_to_all(sent)
    assert found == bytes([peer * 16 + rank for peer in range(size) for _ in range(1000)])
    for length in (1, 160, 161, 5000):  # within a note, and beside it
        assert comm.gather(bytes([rank]) * length) == [bytes([r]) * length for r in range(size)]
    data = bytearray([rank + 1] * 10)
    buffer = (__import__("ctypes").c_char * 10).from_buffer(data)
    comm.broadcast(__import__("ctypes").addressof(buffer), 10, 1)
    return comm.backend, comm.bytes_sent(), bytes(buffer.raw)


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_and_bytes(size):
    for rank, (backend, sent, data) in enumerate(run_ranks(size, exchange)):
        assert backend == "torch gloo"
        assert sent["fp8_e4m3"] == 1000 * (size - 1)
        assert sent["control"] == (1 + 160 + 161 + 5000) * (size - 1)
        assert data == bytes([2] * 10)
        assert sent.get("fp32", 0) == (10 * (size - 1) if rank == 1 else 0)


def sums(rank):
    comm = make()
    values = [1e16, 1.0, -1e16]
    return (comm.all_reduce_f64([values[rank], 0.1 * (rank + 1)]),
            comm.all_reduce_i64([2**60, rank], maximum=True),
            comm.all_reduce_f64([float("nan") if rank == 1 else 0.0], maximum=True))


def test_sums_are_made_in_rank_order():
    expected = [(1e16 + 1.0) - 1e16, (0.1 + 0.1 * 2) + 0.1 * 3]
    for doubles, integers, worst in run_ranks(3, sums):
        assert struct.pack("2d", *doubles) == struct.pack("2d", *expected)
        assert integers == [2**60, 2] and worst[0] != worst[0]


def overflow(rank):
    make().all_reduce_i64([2**62])


def test_integer_overflow_is_an_error():
    for error in run_ranks(3, overflow, errors=True):
        assert isinstance(error, zerofp8.CommError) and "64 bits" in str(error)


def split(rank):
    comm = make()
    part = comm.split(rank % 2, -rank)
    whole = part.gather(bytes([rank]))
    alone = comm.split(rank, 0)
    return part.size, whole, alone.size


def test_split():
    results = run_ranks(4, split)
    assert [r[0] for r in results] == [2, 2, 2, 2] and all(r[2] == 1 for r in results)
    assert sorted(results[0][1]) == [b"\x00", b"\x02"]
    assert sorted(results[1][1]) == [b"\x01", b"\x03"]


def different_calls(rank):
    comm = make()
    comm.gather(b"x") if rank == 0 else comm.barrier(10)


def test_different_calls_are_told_on_all_ranks():
    first, second = run_ranks(2, different_calls, errors=True)
    assert isinstance(first, zerofp8.CommError) and str(first) == str(second)
    assert "gather" in str(first) and "barrier" in str(first)


def late_rank(rank):
    comm = make()
    comm.gather(b"all are there")
    if rank == 1:
        time.sleep(8)
        return None
    began = time.monotonic()
    try:
        comm.barrier(2)
    except zerofp8.CommError as error:
        try:
            comm.gather(b"x")  # stays failed
        except zerofp8.CommError as again:
            assert str(again) == str(error)
        return error.absent_ranks, time.monotonic() - began, str(error)


def test_time_out_names_the_absent_rank():
    first, second, third = run_ranks(3, late_rank)
    assert second is None
    for absent, seconds, text in (first, third):
        assert absent == [1] and 1.9 < seconds < 8 and "absent: rank 1" in text


def dying_rank(rank):
    comm = make(timeout=60)
    comm.gather(b"x" * 1000)  # all ranks are connected from here on
    if rank == 1:
        time.sleep(1)
        os._exit(1)
    comm.gather(b"x" * 1000)


def test_a_rank_that_dies_ends_the_wait():
    began = time.monotonic()
    first, _, third = run_ranks(3, dying_rank, errors=True, kill=[1])
    assert isinstance(first, zerofp8.CommError) and first.absent_ranks == [1]
    assert isinstance(third, zerofp8.CommError) and time.monotonic() - began < 60


def absent_from_initialize(rank):
    import torch
    if rank == 1:
        time.sleep(4)
        return None
    model = torch.nn.Linear(2, 2)
    zerofp8.initialize(model, torch.optim.AdamW(model.parameters()), {}, timeout=1.5)


def test_initialize_on_some_ranks_names_the_others():
    first, _ = run_ranks(2, absent_from_initialize, errors=True)
    assert isinstance(first, zerofp8.CommError) and first.absent_ranks == [1]


def after_groups_of_the_user(rank):
    """As Megatron has them: the ends of the pipeline are in a group for the embedding."""
    dist.new_group([0, 2])
    pipeline, alone = dist.new_group([0, 1, 2]), [dist.new_group([r]) for r in range(3)][rank]
    model = torch.nn.Linear(2, 2)
    optimizer = zerofp8.initialize(model, torch.optim.AdamW(model.parameters()), {}, timeout=15,
                                   data_parallel_group=alone, pipeline_parallel_group=pipeline)[1]
    (model.weight.sum() * 0.5).backward()
    return optimizer.step().grad_norm


def test_ranks_may_be_in_different_numbers_of_groups():
    assert run_ranks(3, after_groups_of_the_user, timeout=60) == [3**0.5] * 3
