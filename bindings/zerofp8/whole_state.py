"""State of whole parameters as bytes, put together from the pieces of all ranks, and cut again.

The engine gives a rank's state in pieces: codes, scales or remainder bits of a run of elements,
named ``component@first element``. A parameter's runs begin on blocks, so that pieces of any number
of ranks fit together without recoding.
"""

import json
import struct

import torch

from .errors import CheckpointError

FORMAT = 2
_ITEM = {"F32": 4, "F16": 2, "BF16": 2, "U16": 2, "U8": 1, "F8_E4M3": 1}
_SCALE = ".scale"
_STORED = {"fp32": "F32", "bf16": "BF16", "fp16": "F16", "fp8_e4m3": "F8_E4M3", "fp8_ue4m4": "U8"}

# format, applied, skipped, clean steps, hysteresis, step; loss scale, guard's C; digest of weights
_HEAD = struct.Struct("<6q2d16s")
FRESH = bytes(16)  # in place of the digest: no step was taken and nothing loaded, state is zeros


def dtypes_of(settings, parameter):
    """Components of a parameter's state, as checkpoints name them, with safetensors' dtypes.

    The same on all ranks, also on those that hold nothing of the parameter.
    """
    few = parameter.dim() <= 1 or parameter.numel() < settings.fp32_moments_below
    exact = settings.fp32_moments_below > 0 and few
    found = {}
    for kind in ("exp_avg", "exp_avg_sq"):
        dtype = "fp32" if exact else getattr(settings, kind)
        name = kind + ("_root" if kind == "exp_avg_sq" and dtype != "fp32" else "")
        found[name] = _STORED[dtype]
        if dtype not in ("fp32", "bf16"):
            found[name + _SCALE] = "F32"
    if settings.master != "none" and parameter.dtype != torch.float32:
        found["master"] = {"bits8": "U8", "bits16": "U16", "fp32": "F32"}[settings.master]
    return found


class Places:
    """Where the pieces of one parameter lie in the bytes of the whole.

    Parameters
    ----------
    dtypes : dict of str to str
        As `dtypes_of` gives it.
    numel, block : int
        Elements of the parameter, and per scale.

    Attributes
    ----------
    sizes : dict of str to int
        Bytes by kind: ``exp_avg``, ``exp_avg_sq``, ``master``. Scales come after the codes.
    """

    def __init__(self, dtypes, numel, block):
        self._block, self._item, self._begin, self.sizes = block, {}, {}, {}
        for component, dtype in dtypes.items():
            kind, scales = kind_of(component), component.endswith(_SCALE)
            self._item[component] = 4 if scales else _ITEM[dtype]
            self._begin[component] = self.sizes.get(kind, 0)
            items = -(-numel // block) if scales else numel
            self.sizes[kind] = self._begin[component] + items * self._item[component]

    def of(self, name):
        """Kind and first byte of a piece."""
        component, at = name.rsplit("@", 1)
        first = int(at) // self._block if component.endswith(_SCALE) else int(at)
        return kind_of(component), self._begin[component] + first * self._item[component]


def kind_of(component):
    """``exp_avg_sq`` for ``exp_avg_sq_root.scale``."""
    return component.removesuffix(_SCALE).removesuffix("_root")


class WholeState:
    """Bytes of all parameters, filled with pieces.

    Parameters
    ----------
    places : list of Places
        Of the parameters, in the engine's order.
    """

    def __init__(self, places):
        self._places = places
        self.entries = [{k: torch.zeros(n, dtype=torch.uint8) for k, n in p.sizes.items()}
                        for p in places]
        self._left = [sum(p.sizes.values()) for p in places]
        self._seen = set()

    def wants(self, parameter, name):
        return (parameter, name) not in self._seen

    def target(self, parameter, name, size):
        """The bytes to fill with this piece, once."""
        self._seen.add((parameter, name))
        self._left[parameter] -= size
        kind, begin = self._places[parameter].of(name)
        return self.entries[parameter][kind][begin:begin + size]

    def add(self, parameter, name, data):
        """One piece; one that is there already (from a replica) is left out."""
        if self.wants(parameter, name) and len(data):
            view = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self.target(parameter, name, len(data)).copy_(view)

    def missing(self):
        """Parameters of which not every byte is there."""
        return [i for i, left in enumerate(self._left) if left != 0]


def pack(counters, index, digest, about):
    """What else belongs to a parameter's state, as one tensor of bytes.

    Of the same size at each step, so that it can be loaded in place.

    Parameters
    ----------
    counters : dict
        The engine's.
    digest : bytes
        16 of them, of all weights of this rank's part of the model.
    about : dict
        JSON-able: name, shape and dtypes of the parameter.
    """
    text = json.dumps(about, sort_keys=True).encode()
    head = _HEAD.pack(FORMAT, counters["applied"], counters["skipped"], counters["clean_steps"],
                      counters["hysteresis_left"], counters["steps"][index], counters["loss_scale"],
                      counters["guard_c"][index], digest)
    return torch.frombuffer(bytearray(head + text + b" " * (-len(text) % 256)), dtype=torch.uint8)


def unpack(packed, where):
    """``(counters of the run and this parameter, digest, about)`` of what `pack` made."""
    data = packed.cpu().contiguous().numpy().tobytes()
    try:
        version, applied, skipped, clean, hysteresis, step, scale, guard, digest = (
            _HEAD.unpack_from(data))
        if version != FORMAT:
            raise ValueError(f"format {version}; this build reads format {FORMAT}")
        about = json.loads(data[_HEAD.size:].decode("utf-8"))
    except (struct.error, ValueError) as error:
        raise CheckpointError(f"state_dict: {where} is damaged: {error}") from None
    counters = {"applied": applied, "skipped": skipped, "clean_steps": clean,
                "hysteresis_left": hysteresis, "loss_scale": scale, "step": step, "guard_c": guard}
    return counters, digest, about

