"""Process groups of zerofp8's own, and what the ranks tell each other before these exist.

Groups of the user's are never used for communication: two users of one group can reorder and hang.
"""

import hashlib
import json
import os
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from . import _C, meeting, mpi, torch_names
from .errors import CommError, ConfigError, Error, UnsupportedError

_made = Counter()  # groups of zerofp8's own in this process, by their members


@dataclass
class Layout:
    """Global ranks of the groups that this rank is in, in group order."""

    rank: int = 0
    data: list = field(default_factory=lambda: [0])
    pipeline: list = field(default_factory=lambda: [0])
    tensor: list = field(default_factory=lambda: [0])

    @classmethod
    def of(cls, data, pipeline, tensor):
        """From process groups; None: the world for data, this rank alone for the others."""
        if not dist.is_initialized():
            for name, group in (("data", data), ("pipeline", pipeline), ("tensor", tensor)):
                if group is not None:
                    raise ConfigError(f"{name}_parallel_group", "a group",
                                      "a group of an initialised torch.distributed",
                                      "call zerofp8.init_distributed() first")
            return cls()
        rank = dist.get_rank()
        model_is_cut = pipeline is not None or tensor is not None
        if data is None and model_is_cut:
            raise ConfigError("data_parallel_group", "None beside pipeline_parallel_group or "
                              "tensor_parallel_group", "the ranks that hold the same part of the "
                              "model", "pass it, even if it is this rank alone")
        def ranks(group, name):
            if group is None:
                return list(range(dist.get_world_size())) if name == "data" else [rank]
            members = dist.get_process_group_ranks(group)
            if rank not in members:
                raise ConfigError(f"{name}_parallel_group", f"ranks {members}",
                                  f"a group that has this rank, {rank}",
                                  "pass the group that this rank is in")
            return list(members)
        return cls(rank, ranks(data, "data"), ranks(pipeline, "pipeline"), ranks(tensor, "tensor"))


def exchange(layout, record, timeout, again=None):
    """Give `record` (JSON-able) to all ranks that this one is connected with, and get theirs.

    Goes through the store of torch.distributed and not through a group, since groups may be what
    the ranks disagree on. `again`: the records of the first exchange, in the second exchange of one
    ``initialize``.

    Returns
    -------
    dict of int to dict
        Records by global rank, with the ranks' groups in ``record["layout"]``; the same on all.

    Raises
    ------
    CommError
        A rank did not come within `timeout` seconds; ``absent_ranks`` are global ranks.
    ConfigError
        Ranks were given different groups. The text is the same on all ranks.
    """
    record = dict(record, layout=vars(layout))
    if not dist.is_initialized() or not meeting.groups_of(record["layout"]):
        return {layout.rank: record}
    store = dist.PrefixStore("zerofp8/initialize", dist.distributed_c10d._get_default_store())
    try:
        if again is None:
            records = meeting.meet(store, layout.rank, record, timeout)
        else:
            records = meeting.meet_again(store, layout.rank, again, record, timeout)
    except meeting.Absent as error:
        raise _absent(error.args[0]) from None
    records = dict(sorted(records.items()))
    _check_same_groups(records)
    return records


def _read(store, ranks, deadline):
    keys = [str(r) for r in ranks]
    if not meeting.wait(store, keys, deadline):
        raise _absent([r for r, k in zip(ranks, keys) if not store.check([k])])
    return {r: store.get(k).decode() for r, k in zip(ranks, keys)}


def _absent(ranks):
    return CommError(f"zerofp8.initialize: global ranks {ranks} did not call it in time (or are not "
                     "in the groups given)", ranks)


def _check_same_groups(records):
    for kind in ("data", "pipeline", "tensor"):
        for rank, record in records.items():
            for member in record["layout"][kind]:
                theirs = records[member]["layout"][kind]
                if theirs != record["layout"][kind]:
                    raise ConfigError(
                        f"{kind}_parallel_group",
                        f"ranks {record['layout'][kind]} on rank {rank}, ranks {theirs} on rank "
                        f"{member}", "the same group on all of its ranks",
                        "pass the group that has this rank and its peers on each rank")


def raise_first_error(records):
    """The error of the lowest rank that has one, on all ranks."""
    for rank, record in records.items():
        if record.get("error"):
            kind, arguments = record["error"]
            from . import errors
            error = getattr(errors, kind)(*arguments)
            if len(records) > 1 and isinstance(error, ConfigError):
                error = type(error)(error.pointer, f"{error.given} (on rank {rank})",
                                    error.allowed, error.fix, error.others)
            elif len(records) > 1:
                error = type(error)(f"rank {rank}: {error}")
            raise error


def as_record(error):
    """An Error as JSON for `raise_first_error`."""
    return [type(error).__name__, list(error.__reduce__()[1])]


def model_ranks(records, rank):
    """Global ranks of one data rank's model: pipeline stages x tensor slices of `rank`."""
    stages = records[rank]["layout"]["pipeline"]
    return sorted({t for s in stages for t in records[s]["layout"]["tensor"]})


def choose_backend(config, placement):
    """What connects the ranks: "torch", "mpi" or "nccl", as the config says if it can run here.

    Parameters
    ----------
    config : zerofp8._C.Config
    placement : Host, Cuda or Offload
        The engine's; "auto" is NCCL where that is a CUDA device and NCCL was built in.
    """
    written = json.loads(config.canonical()).get("zerofp8", {}).get("comm_backend", "auto")
    if written == "mpi":
        mpi.check()
    elif written == "nccl":
        _check_nccl(placement)
    elif written == "auto" and placement.index is not None and _C.built_with_nccl():
        return "nccl"
    return "torch" if written == "auto" else written


def _check_nccl(placement):
    fix = 'or set it to "auto" or "torch"'
    if placement.index is None:
        raise ConfigError(mpi.KEY, f'"nccl", and state is on {placement.kind}',
                          "NCCL where state is on CUDA devices: it moves their memory",
                          f"move the model to a CUDA device, without offload, {fix}")
    if not _C.built_with_nccl():
        raise UnsupportedError(
            mpi.KEY, '"nccl", and this zerofp8 was built without NCCL', '"auto", "torch"',
            "install NCCL's development files (libnccl-dev) and zerofp8 again, with "
            f"-C cmake.define.ZEROFP8_WITH_NCCL=ON beside ZEROFP8_WITH_CUDA=ON, {fix}")


def check_same_backend(records):
    """Ranks that wait for each other in different libraries would wait for ever."""
    chosen = {r: record["backend"] for r, record in records.items()}
    if len(set(chosen.values())) > 1:
        raise ConfigError(mpi.KEY, ", ".join(f'"{b}" on rank {r}' for r, b in chosen.items()),
                          "the same on all ranks", "pass the same config to all ranks")


def communicator(ranks, timeout, backend="torch", made=None, device=None):
    """A communicator of zerofp8's own over these global ranks; called by all of them.

    Parameters
    ----------
    ranks : list of int
        Global ranks; ranks within the communicator are in ascending order of these, as in torch.
    timeout : float
        Seconds for one collective.
    backend : {"torch", "mpi", "nccl"}
        As `choose_backend` gives it; the same on all ranks.
    made : list, optional
        Gets the process groups that are made, also by a later ``split``, for `give_back`.
    device : int, optional
        With "nccl": index of the CUDA device whose memory it moves.
    """
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return _C.self_communicator()
    if not dist.is_initialized():
        raise Error("torch.distributed is not initialised; call zerofp8.init_distributed() first")
    if backend == "mpi":
        return mpi.communicator(ranks, timeout, _read)

    made = [] if made is None else made

    def make_group(members):
        made.append(_new_group([ranks[m] for m in members], timeout))
        return made[-1].group_name

    name = make_group(range(len(ranks)))
    if backend == "nccl":  # control calls go over the process group
        return _C.nccl_communicator(name, timeout, make_group, device)
    return _C.process_group_communicator(name, timeout, make_group)


def give_back(made, pid):
    """Destroy process groups whose communicators have gone: torch's register holds them, too.

    Not collective, ranks may come at different times.

    Parameters
    ----------
    made : list
        As `communicator` has filled it; empty afterwards.
    pid : int
        Of the process that made them; a forked one has none of their threads and leaves them.
    """
    if os.getpid() != pid:
        return
    while made:
        group = made.pop()
        try:
            dist.destroy_process_group(group)
        except (AssertionError, ValueError):  # went with the world, which was destroyed before
            pass


def _new_group(ranks, timeout):
    """A new process group of these global ranks, made by them alone.

    torch would name it after the number of groups that the calling rank is in. That differs between
    ranks (the ends of a pipeline are in one more, for the embedding), and ranks that have different
    names for a group wait for each other for ever. Ours is made of the members and of how many
    groups these have made.
    """
    members = "_".join(map(str, sorted(ranks)))
    _made[members] += 1
    name = hashlib.sha1(f"zerofp8 {members} {_made[members]}".encode()).hexdigest()
    c10d = dist.distributed_c10d
    torchs = c10d._process_group_name
    c10d._process_group_name = lambda ranks, use_hashed_name: name
    try:
        group = dist.new_group(ranks, timeout=timedelta(seconds=timeout), backend="gloo",
                               use_local_synchronization=True)
    finally:
        c10d._process_group_name = torchs
    if group.group_name != name:
        raise torch_names.lacks("a new_group that asks _process_group_name")
    return group
