"""Starts ranks in which trainers believe that torchrun has started them."""

import os
import signal

import torch.distributed as dist
from ranks import run_ranks

FULL = os.environ.get("ZEROFP8_FULL", "0") == "1"  # else the tests marked so are left out


def run_client(ranks, function, *arguments, connected=False, **options):
    """`function(rank, *arguments)` on each of `ranks`; see run_ranks.

    connected: one rank has a process group, too, as DeepSpeed wants it.
    """
    return run_ranks(ranks, _as_torchrun, ranks, connected, function, *arguments, **options)


def killed_client(ranks, function, *arguments):
    """The same for a run in which each rank ends by `die`."""
    # One may see the other end before its own end.
    run_client(ranks, function, *arguments, kill=range(ranks), errors=True)


def die():
    """As a machine that is taken away."""
    os.kill(os.getpid(), signal.SIGKILL)


def _as_torchrun(rank, ranks, connected, function, *arguments):
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    if ranks > 1 or connected:
        # The group is there already, so that nobody listens on the port.
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks),
                          LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT="29999")
    if ranks == 1 and connected:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return function(rank, *arguments)
