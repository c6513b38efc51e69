"""Where this process stands in its launch, and the process group that connects the ranks."""

import os
import socket
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from . import _C
from .errors import CommError, ConfigError


@dataclass(frozen=True)
class LaunchInfo:
    """What ``init_distributed`` found and set up.

    Attributes
    ----------
    rank, size : int
        Rank of this process and number of processes.
    local_rank : int or None
        Rank among the processes of this node, if the launcher tells.
    source : str
        Whose variables were read: ``"torchrun"``, ``"Open MPI"``, ``"no launcher"``, ...
    backend : str
        ``"gloo"`` or ``"nccl"``.
    """

    rank: int
    size: int
    local_rank: int | None
    source: str
    backend: str

    def __str__(self):
        return (f"rank {self.rank} of {self.size}, launched by {self.source}, "
                f"connected by {self.backend}")


def init_distributed(backend=None, timeout=600.0, port=None):
    """Read the launcher's variables and set up ``torch.distributed``.

    Finds torchrun's, Open MPI's, MPICH's or Intel MPI's variables, or Slurm's where there are no
    others. Does nothing but report if ``torch.distributed`` is initialised already.

    Parameters
    ----------
    backend : {"gloo", "nccl"}, optional
        Default: nccl where CUDA is available, else gloo.
    timeout : float
        Seconds after which a collective is an error.
    port : int, optional
        TCP port of rank 0, for launchers that do not set ``MASTER_PORT``. Default: one that is
        free, made known to the other ranks through a file, if all ranks are on one node.

    Returns
    -------
    LaunchInfo

    Raises
    ------
    ConfigError
        Launchers disagree (both variables and values are named), or rank 0's address is unknown.
    """
    env = _C.detect_launch_env()
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (env.rank, env.size) and env.size > 1:
            raise ConfigError(
                "torch.distributed",
                f"rank {dist.get_rank()} of {dist.get_world_size()}, but {env.source} says rank "
                f"{env.rank} of {env.size}", "the same in both",
                "initialise torch.distributed with the launcher's numbers")
        return LaunchInfo(dist.get_rank(), dist.get_world_size(), env.local_rank, env.source,
                          str(dist.get_backend()))
    if backend is None:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "nccl" and env.local_rank is not None:
        torch.cuda.set_device(env.local_rank)
    store = _make_store(env, timedelta(seconds=timeout), port)
    dist.init_process_group(backend, store=store, rank=env.rank, world_size=env.size,
                            timeout=timedelta(seconds=timeout))
    return LaunchInfo(env.rank, env.size, env.local_rank, env.source, backend)


def _make_store(env, timeout, port):
    if env.size == 1:
        return dist.HashStore()
    address, given = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if address and given:
        # torchrun keeps a store of its own at that address.
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = dist.TCPStore(address, int(given), env.size, env.rank == 0 and not agent, timeout)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return dist.PrefixStore(f"zerofp8/{attempt}", store)
    if env.local_size is not None and env.local_size != env.size:
        raise ConfigError("MASTER_ADDR", "nothing, and the ranks are on several nodes",
                          "host name of rank 0, with MASTER_PORT",
                          f"pass both to all ranks, e.g. mpirun -x MASTER_ADDR={socket.gethostname()} "
                          "-x MASTER_PORT=29500")
    if port is not None:
        return dist.TCPStore(address or "127.0.0.1", port, env.size, env.rank == 0, timeout)
    return _meet_on_this_node(env, timeout)


def _meet_on_this_node(env, timeout):
    """Rank 0 takes a free port and writes it into a file named after the job."""
    job = os.environ.get("PMIX_NAMESPACE") or os.environ.get("SLURM_JOB_ID") or "job"
    name = f"zerofp8-{os.getuid()}-{os.getppid()}-{''.join(c for c in job if c.isalnum())}"
    path = Path(tempfile.gettempdir()) / name
    if env.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, env.size, True, timeout, wait_for_workers=False)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(f"{store.port} {os.getpid()}")
        temporary.rename(path)
        for rank in range(1, env.size):
            store.wait([f"here/{rank}"], timeout)
        path.unlink()
        return store
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        try:
            found, process = path.read_text().split()
            os.kill(int(process), 0)  # the file of a dead job is not ours
        except (OSError, ValueError):
            time.sleep(0.02)
            continue
        store = dist.TCPStore("127.0.0.1", int(found), env.size, False, timeout,
                              wait_for_workers=False)
        store.set(f"here/{env.rank}", "")
        return store
    raise CommError(f"rank {env.rank} did not find rank 0 within {timeout.total_seconds():g} s "
                    f"({path} did not appear)", [0])
