"""Notices weights that were written from outside, and keeps contiguous copies where needed."""

import hashlib
import zlib
from contextlib import nullcontext

import torch

from .errors import ArgumentError, ConfigError


class WeightWatch:
    """Looks at the version counters of the parameters before each step.

    Masters hold more bits than weights. When a weight was written from outside (a weights-only
    load), its masters have to follow; when a checkpoint's state and weights were both loaded, they
    must not. The digest of the weights that go with the state tells the two apart.
    """

    def __init__(self, engine, parameters):
        self._engine = engine
        self._placement = engine.placement
        self._parameters = parameters
        self.following = nullcontext  # around what lets masters follow weights
        self._expected = None  # digest of the weights that a loaded state belongs to
        # The engine writes here: held, so that a replaced storage is an error and not a crash.
        self._storages = [n.parameter.detach() for n in parameters]
        self._remember()

    def _remember(self):
        self._versions = [n.parameter._version for n in self._parameters]

    @torch.no_grad()
    def replaced(self):
        """What is wrong with storages that were replaced since ``initialize``; "" if none were."""
        for named, storage in zip(self._parameters, self._storages):
            if named.parameter.data_ptr() != storage.data_ptr():
                if _take_back(named.parameter, storage):
                    continue
                return (f"the storage of parameter \"{named.name}\" was replaced after initialize "
                        "(e.g. by model.to() or load_state_dict(assign=True)): move the model to "
                        "the trainer's device before initialize (model.to(accelerator.device), "
                        "model.to(training_arguments.device)), or initialize again")
        return ""

    def check(self):
        """Refuse storages that were replaced."""
        text = self.replaced()
        if text:
            raise ArgumentError(text)

    @torch.no_grad()
    def look(self):
        """Let masters follow weights that were changed; called before anything is reduced."""
        self.check()
        changed = [i for i, (named, version) in enumerate(zip(self._parameters, self._versions))
                   if named.parameter._version != version]
        if not changed:
            return
        self._remember()
        if self._expected is not None:
            if digest(self._parameters) != self._expected:
                self.reset()
            else:
                self._fetch(changed)
            return
        with self.following():
            for i in changed:
                self._fetch([i])
                self._engine.weight_changed(i)

    def _fetch(self, indices):
        for i in indices:
            if self._parameters[i].mirror is not None:
                self._placement.fetch(self._parameters[i])

    def awaited(self):
        """The digest of weights that a loaded state belongs to and the model does not have yet."""
        waits = self._expected is not None and digest(self._parameters) != self._expected
        return self._expected if waits else None

    @torch.no_grad()
    def reset(self):
        """Masters become what the weights are."""
        self._fetch(range(len(self._parameters)))
        with self.following():
            self._engine.weights_changed()
        self._expected = None
        self._remember()

    @torch.no_grad()
    def updated(self):
        """The engine has written new weights."""
        self._placement.send_back(self._parameters)
        for named in self._parameters:
            if named.mirror is None and named.parameter.numel() > 0:
                # So that autograd notices weights that change between forward and backward.
                torch.autograd.graph.increment_version(named.parameter)
        self._expected = None
        self._remember()

    def about_to_update(self):
        """The engine will write new weights, and nobody here will be told."""
        self._expected = None

    def loaded(self, expected):
        """State was loaded that belongs to weights of this digest."""
        self._expected = expected
        # Looked at before the next step, whether or not the model is loaded in between.
        self._versions = [-1] * len(self._parameters)


@torch.no_grad()
def digest(parameters):
    """Hash of all weights, as hexadecimal digits."""
    hasher = hashlib.blake2b(digest_size=16)
    for named in parameters:
        if named.parameter.numel() > 0:
            hasher.update(memoryview(_bytes(named.parameter)))
    return hasher.hexdigest()


@torch.no_grad()
def replicated_digests(parameters, layout):
    """Shape, dtype and checksum of what tensor ranks have to hold alike.

    Returns
    -------
    dict of str to str
        By key; empty with one tensor rank.
    """
    if len(layout.tensor) == 1:
        return {}
    return {n.key: f"{tuple(n.parameter.shape)} {n.parameter.dtype} {_checksum(n.parameter):08x}"
            for n in parameters if not n.is_cut}


def _checksum(parameter):
    return zlib.crc32(_bytes(parameter)) if parameter.numel() > 0 else 0


def _bytes(parameter):
    return parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def check_replicated(records):
    """Parameters without the mark of a slice have the same weights on all tensor ranks.

    A slice without the mark would be left out of the norm on all tensor ranks but one.

    Parameters
    ----------
    records : dict of int to dict
        Of `groups.exchange`, with `replicated_digests` under ``"replicated"``.

    Raises
    ------
    ConfigError
        The same on all ranks.
    """
    for rank, record in records.items():
        first = record["layout"]["tensor"][0]
        mine, expected = record["replicated"], records[first]["replicated"]
        for name in {**expected, **mine}:
            here, there = (d.get(name, "nothing, or marked there") for d in (mine, expected))
            if here != there:
                raise ConfigError(
                    f"parameter \"{name}\"", f"without the mark tensor_model_parallel, and not the "
                    f"same on all tensor ranks (shape, dtype, checksum: {here} on rank {rank}, "
                    f"{there} on rank {first})", "the same weights on all tensor ranks, or the mark",
                    "set parameter.tensor_model_parallel = True if tensor ranks hold different "
                    "slices of it, else begin with the same weights on all of them")


def _take_back(p, storage):
    """Give a parameter that was copied within its place the engine's memory again; whether it did.

    accelerate does so between CPU ranks (``model.to("cpu:0")`` copies), and the Trainer loads
    weights afterwards. Memory that somebody else holds, too, with other bits may be the way back
    of a swap: it is left alone.
    """
    w = p.data
    if (w.device, w.dtype, w.shape, w.stride()) != (storage.device, storage.dtype, storage.shape,
                                                    storage.stride()):
        return False
    if not torch.equal(w, storage):
        # One is ours, one is that of the object that is asked here.
        if torch._C._storage_Use_Count(storage.untyped_storage()._cdata) > 2:
            return False
        storage.copy_(w)  # seen by the version counter, which the two share
    p.data = storage
    return True
