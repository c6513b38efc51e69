"""Files of tensors by name: safetensors and torch's, read and written."""

import json
import math
import pickle
import struct
from pathlib import Path

import torch

from .errors import CheckpointError

SAFETENSORS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
               "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8,
               "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
               "U16": torch.int16, "BOOL": torch.bool}
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_LENGTH = struct.Struct("<Q")


def load(path, trust=False):
    """What is in a file of torch's or of safetensors; tensors of the former are mapped, not read.

    Parameters
    ----------
    trust : bool
        Run the code that a pickle asks for, if torch cannot read it without.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        return load_safetensors(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        if not trust:
            raise CheckpointError(
                f"{path}: holds objects that torch reads only by running code of the file, or is "
                "damaged; pass --trust if you know who has written it") from error
    except (RuntimeError, ValueError, EOFError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from None
    return torch.load(path, map_location="cpu", weights_only=False)


def header_of(path):
    """Of a safetensors file: ``{name: {"dtype", "shape", "data_offsets"}}``, and where data begins."""
    with open(path, "rb") as file:
        length = _LENGTH.unpack(file.read(_LENGTH.size))[0]
        if length > Path(path).stat().st_size:
            raise ValueError("its header is longer than the file")
        header = json.loads(file.read(length).decode("utf-8"))
    header.pop("__metadata__", None)
    return header, _LENGTH.size + length


def load_safetensors(path):
    try:
        header, begin = header_of(path)
        data = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
        found = {}
        for name, about in header.items():
            first, last = about["data_offsets"]
            part = data[begin + first:begin + last]
            dtype = SAFETENSORS[about["dtype"]]
            if (begin + first) % dtype.itemsize:
                part = part.clone()
            found[name] = part.view(dtype).reshape(about["shape"])
        return found
    except (struct.error, ValueError, KeyError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{path}: is not a safetensors file, or damaged: {error}") from None


def save(path, tensors):
    """By the name's ending: safetensors, else torch's."""
    if Path(path).suffix != ".safetensors":
        torch.save(tensors, path)
        return
    header, at = {}, 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(_LENGTH.pack(len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def numel(shape):
    return math.prod(shape)
