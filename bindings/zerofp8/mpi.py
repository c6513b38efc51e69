"""The MPI backend: groups of ranks as communicators over Open MPI, and MPI's end.

torch.distributed is there, too, whichever backend runs: its store tells the ranks what they have to
know of each other before they can send messages.
"""

import atexit
import importlib
import time

import torch.distributed as dist

from . import _C
from .errors import CommError, ConfigError, UnsupportedError

KEY = "/zerofp8/comm_backend"
_FIX = 'or set it to "auto" or "torch"'

_world = None
_made = {}  # groups made so far, by their ranks


def check():
    """Refuse the MPI backend where it cannot run; nothing is started.

    Raises
    ------
    ConfigError
        The ranks were not started by mpirun.
    UnsupportedError
        The package was built without MPI, or the MPI library does not load.
    """
    env = _C.detect_launch_env()
    if not env.by_mpi:
        raise ConfigError(KEY, f'"mpi", and the launcher is: {env.source}',
                          "ranks that mpirun has started",
                          f"start with mpirun -n N python ..., {_FIX}")
    _module()


def _module():
    try:
        return importlib.import_module("zerofp8._mpi")
    except ModuleNotFoundError:
        raise UnsupportedError(
            KEY, '"mpi", and this zerofp8 was built without MPI', '"auto", "torch"',
            "install Open MPI's development files (libopenmpi-dev) and zerofp8 again, "
            f"{_FIX}") from None
    except ImportError as error:
        raise UnsupportedError(
            KEY, f'"mpi", and the MPI library cannot be loaded ({error})', '"auto", "torch"',
            f"install the Open MPI that zerofp8 was built with, {_FIX}") from None


def communicator(ranks, timeout, read):
    """A communicator over these global ranks; called by all of them and by no others.

    Parameters
    ----------
    ranks : list of int
        Global ranks; ranks within the communicator follow their order.
    timeout : float
        Seconds for one collective.
    read : callable
        ``read(store, ranks, deadline)`` gives what each rank has written, by rank.
    """
    world = _start()
    return world.open(ranks, _agree_on_context(world, ranks, timeout, read), timeout)


def _agree_on_context(world, ranks, timeout, read):
    """A number for the group's messages that no other group of any of its ranks has.

    The steps of ``P2pCommunicator::agree_on_context``, through the store: ranks may be making other
    groups at the same time, and then try again.
    """
    name = ".".join(map(str, ranks))
    count = _made[name] = _made.get(name, 0) + 1
    store = dist.PrefixStore(f"zerofp8/mpi/{name}/{count}",
                             dist.distributed_c10d._get_default_store())
    deadline, attempt = time.monotonic() + timeout, 0

    def gather(what, mine):
        part = dist.PrefixStore(f"{attempt}/{what}", store)
        part.set(str(world.rank), str(int(mine)))
        return [int(text) for text in read(part, ranks, deadline).values()]

    while True:
        context = max(gather("proposed", world.propose()))
        if all(gather("reserved", world.reserve(context))):
            return context
        attempt += 1


def _start():
    global _world
    if _world is not None:
        return _world
    world = _module().World()
    if (world.rank, world.size) != (dist.get_rank(), dist.get_world_size()):
        raise CommError(
            f"torch.distributed has rank {dist.get_rank()} of {dist.get_world_size()}, MPI has "
            f"rank {world.rank} of {world.size}; start with the mpirun of the MPI library that "
            "zerofp8 was built with, and give torch.distributed its numbers "
            "(zerofp8.init_distributed())")
    _world = world
    atexit.register(_stop)
    return world


def _stop():
    """MPI has to be ended before the process, or mpirun takes it for a crash.

    A rank that an exception ends comes here, too: closing tells the others, whose next collective
    is then an error instead of a wait for ever.
    """
    global _world
    from .optimizer import close_all

    close_all()
    _world = None
