"""Case 41 through the hook: killed while saving, saving on one rank only, leftovers."""

import os
import signal
import threading
import time

import pytest
import torch
from ranks import run_ranks
from test_state import CONFIGS, bits, make, same, train

import zerofp8


def killed_while_saving(rank, folder, delay):
    """A complete save at step 2; rank 1 dies in the middle of many more."""
    model, optimizer = make(CONFIGS["bf16 O2"])
    train(model, optimizer, range(2), rank)
    optimizer.save(folder)
    saved = bits(model)
    train(model, optimizer, range(2, 4), rank)
    if rank == 1:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    begin = time.monotonic()
    try:
        while time.monotonic() < begin + 30:
            optimizer.save(folder)
    except zerofp8.CommError as error:
        return saved, bits(model), str(error), time.monotonic() - begin
    return saved, bits(model), "no error", 30


def load_newest(rank, folder):
    model, optimizer = make(CONFIGS["bf16 O2"], seed=9)
    optimizer.load(folder)
    loaded = bits(model), optimizer.applied_steps
    train(model, optimizer, [optimizer.applied_steps], rank)
    optimizer.save(folder)
    return loaded


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.2])
def test_case_41_killed_while_saving(delay, tmp_path):
    found = run_ranks(2, killed_while_saving, str(tmp_path), delay, kill=[1])[0]
    assert found[2] != "no error" and found[3] < 25
    hours_ago = time.time() - 7200
    for path in (p for folder in tmp_path.glob(".tmp-*") for p in (*folder.iterdir(), folder)):
        os.utime(path, (hours_ago, hours_ago))
    for loaded, steps in run_ranks(2, load_newest, str(tmp_path)):
        assert steps in (2, 4)
        assert same(loaded, found[0] if steps == 2 else found[1])
    # A save has cleaned up what the killed one left hours ago.
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".tmp-")]


def save_alone(rank, folder):
    model, optimizer = make(CONFIGS["bf16 O2"])
    train(model, optimizer, range(2), rank)
    optimizer.save(folder)
    torch.distributed.barrier()
    begin, text = time.monotonic(), ""
    if rank == 0:
        try:
            optimizer.save(folder)
        except zerofp8.CommError as error:
            text = f"{error} {error.absent_ranks}"
    torch.distributed.barrier()
    return text, time.monotonic() - begin


def test_case_41_save_on_rank_0_only(tmp_path):
    original = zerofp8.initialize
    try:  # a time-out that a test can wait for
        zerofp8.initialize = lambda *args, **kwargs: original(*args, **{**kwargs, "timeout": 3})
        found = run_ranks(3, save_alone, str(tmp_path))
    finally:
        zerofp8.initialize = original
    assert "[1, 2]" in found[0][0] and found[0][1] < 20
    assert len([p for p in tmp_path.iterdir() if p.name.startswith("step-")]) == 1
