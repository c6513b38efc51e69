"""Runs a function on several ranks: forked processes, connected by gloo, ended by a deadline."""

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

from zerofp8.shards import stay_for_others

_fork = multiprocessing.get_context("fork")


def _child(rank, size, path, function, arguments, pipe):
    torch.set_num_threads(1)
    try:
        if size > 1:
            store = dist.FileStore(path, size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size,
                                    timeout=timedelta(seconds=120))
        pipe.send_bytes(pickle.dumps(("value", function(rank, *arguments))))
        stay_for_others()  # as a process does at its end
    except BaseException as error:  # sent to the test, with its trace
        text = traceback.format_exc()
        try:
            pipe.send_bytes(pickle.dumps(("error", error, text)))
        except Exception:
            pipe.send_bytes(pickle.dumps(("error", RuntimeError(repr(error)), text)))
    pipe.close()
    os._exit(0)  # no atexit handlers of the parent's


def run_ranks(size, function, *arguments, timeout=180, errors=False, kill=()):
    """`function(rank, *arguments)` on `size` ranks; the list of what they return.

    Parameters
    ----------
    timeout : float
        Seconds after which what still runs is killed and the test fails.
    errors : bool
        Exceptions are returned in place of values, instead of failing the test.
    kill : collection of int
        Ranks that are expected to end without an answer.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            mine, theirs = _fork.Pipe(duplex=False)
            process = _fork.Process(target=_child, args=(rank, size, os.path.join(folder, "store"),
                                                         function, arguments, theirs))
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        try:
            return _collect(pipes, time.monotonic() + timeout, errors, kill)
        finally:
            for process in processes:
                process.join(2)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(pipes, deadline, errors, kill):
    answers = []
    for rank, pipe in enumerate(pipes):
        if not pipe.poll(max(0, deadline - time.monotonic())):
            raise AssertionError(f"rank {rank} did not end in time")
        try:
            answers.append(pickle.loads(pipe.recv_bytes()))
        except EOFError:
            if rank not in kill:
                raise AssertionError(f"rank {rank} ended without an answer") from None
            answers.append(("value", None))
    for rank, answer in enumerate(answers):
        if answer[0] == "error" and not errors:
            raise AssertionError(f"rank {rank}:\n{answer[2]}")
    return [answer[1] for answer in answers]
