"""Which placement a model's parameters need, and what is said where there is none."""

import torch

from . import _C
from .errors import ConfigError
from .offload import Offload
from .placement import Cuda, Host

OFFLOAD_KEY = "/zero_optimization/offload_optimizer/device"


def choose(model, parameters, settings):
    """The placement of a model's parameters.

    Parameters
    ----------
    model : torch.nn.Module
    parameters : list of NamedParameter
        Those of the optimizer; without any, what else the model has decides.
    settings : zerofp8._C.Settings

    Raises
    ------
    ConfigError
        Parameters are on several devices, or this build cannot run on theirs.
    """
    places = [(n.name, n.parameter.device) for n in parameters]
    if not places:
        rest = [*model.named_parameters(), *model.named_buffers()]
        places = [(n, t.device) for n, t in rest if t.device.type in ("cpu", "cuda")][:1]
    device = common_device(places)
    if device.type != "cuda":
        return Host(device)
    if settings.offload_optimizer == "cpu":
        return Offload(device, settings.accumulation_sharded)
    check_cuda(device, _C.why_no_cuda(device.index))
    return Cuda(device)


def common_device(places):
    """The one device of all parameters.

    Parameters
    ----------
    places : list of (str, torch.device)
        Names and devices.
    """
    if not places:
        return torch.device("cpu")
    first, device = places[0]
    for name, other in places:
        if other != device:
            raise ConfigError(
                "model", f"parameter \"{first}\" on {device} and parameter \"{name}\" on {other}",
                "all parameters of an optimizer on one device",
                "move the model to one device before initialize, or give each device's part an "
                "optimizer and a rank of its own")
    return device


def check_cuda(device, reason):
    """Refuse a CUDA device that the engine cannot run on, for a reason that it gives."""
    if not reason:
        return
    raise ConfigError(
        "model", f"parameters on {device}, and {reason}", "parameters on the CPU, or a build and a "
        "driver that run CUDA",
        "install with: pip install --no-build-isolation . -C cmake.define.ZEROFP8_WITH_CUDA=ON; "
        f"or set {OFFLOAD_KEY} to \"cpu\", which needs torch's CUDA only; or move the model to the "
        "CPU")


def check_same(records):
    """Ranks exchange gradients and weights: all of them keep theirs alike.

    Raises
    ------
    ConfigError
        The same on all ranks.
    """
    kinds = {rank: record["placement"] for rank, record in records.items()}
    if len(set(kinds.values())) > 1:
        raise ConfigError(
            "model", ", ".join(f"state on {kind} on rank {rank}" for rank, kind in kinds.items()),
            "the same kind of place on all ranks", "move all ranks' models to CUDA devices, or all "
            f"to the CPU, and set {OFFLOAD_KEY} alike")


def identity(index):
    """What a CUDA device has and no other one, on any host."""
    return str(torch.cuda.get_device_properties(index).uuid)


def check_own_gpus(records):
    """NCCL wants a device per rank; it would say so only after all ranks have met.

    Parameters
    ----------
    records : dict of int to dict
        Of `groups.exchange`, with `identity` under ``"gpu"``; None where NCCL is not used.
    """
    first = {}
    for rank, record in records.items():
        gpu = record["gpu"]
        other = first.setdefault(gpu, rank)
        if gpu is not None and other != rank:
            raise ConfigError(
                "/zerofp8/comm_backend", f"NCCL, and ranks {other} and {rank} on one CUDA device "
                f"({gpu})", "a device per rank",
                "move the model of each rank to a device of its own, e.g. "
                "cuda:LOCAL_RANK, or set the key to \"torch\"")
