"""Tell what a checkpoint holds: ``python -m zerofp8.inspect``, or ``zerofp8 inspect``."""

import argparse
import re
import sys
from collections import Counter
from pathlib import Path

import torch

from . import folder_files, tensor_files
from .errors import CheckpointError, Error
from .training_files import kind_of, newest, of_universal
from .whole_state import FRESH, unpack


def parser():
    p = argparse.ArgumentParser(
        prog="zerofp8 inspect",
        description="Tell what a checkpoint holds: a zerofp8 folder, a state_dict or weights in a file "
        "of torch's or safetensors, a DeepSpeed folder (ZeRO-1/2 or universal).")
    p.add_argument("path")
    p.add_argument("--parameters", action="store_true", help="a line for each parameter")
    p.add_argument("--trust", action="store_true", help="run the code in the source's pickles")
    return p


def describe(path, trust=False, parameters=False):
    """Lines about a checkpoint."""
    kind = kind_of(path)
    if kind == "zerofp8":
        return _folder(path, parameters)
    if kind == "file":
        return _value(tensor_files.load(path, trust), str(path), parameters)
    if kind == "universal":
        return _universal(path, trust, parameters)
    return _deepspeed(path, trust, parameters)


def _folder(path, parameters):
    run, models = folder_files.indices(path)
    entries = {n: p for m in models for n, p in m["parameters"].items()}
    form, files = models[0]["format"], folder_files.files_of(path)
    ranks = {re.search(r"of-(\d+)", f["name"]).group(1) for m in models for f in m["files"]}
    yield f"{newest(path)}: zerofp8 checkpoint, version {run['zerofp8_checkpoint']}"
    yield f"  step          {run['applied_steps']} applied, {run['skipped_steps']} skipped"
    yield f"  written by    {int(max(ranks))} data ranks, {len(models)} parts of the model"
    count = sum(tensor_files.numel(p["shape"]) for p in entries.values())
    yield f"  parameters    {len(entries)}, {count:,} elements"
    yield (f"  formats       weight {form['weight']}, master {form['master']}, exp_avg "
           f"{form['exp_avg']}, exp_avg_sq {form['exp_avg_sq']}, blocks of {form['block_size']}")
    exact = sum(p["fp32_moments"] for p in entries.values())
    yield f"  FP32 moments  of {exact} parameters"
    for i, group in enumerate(run["groups"]):
        yield f"  group {i}       " + ", ".join(f"{k} {v}" for k, v in group.items())
    yield f"  loss scale    {run['loss_scale']['scale']:g}"
    yield f"  files         {len(files)}, {_size(sum(s for _, s in files))}"
    if parameters:
        for name, p in entries.items():
            yield f"    {name}  {p['dtype']} {_shape(p['shape'])}  step {p['step']}"


def _value(value, where, parameters):
    if not isinstance(value, dict):
        yield f"{where}: {type(value).__name__}"
        return
    if "param_groups" in value and "state" in value:
        yield from _optimizer(value, where, parameters)
        return
    tensors = {k: v for k, v in value.items() if isinstance(v, torch.Tensor)}
    if tensors:
        dtypes = Counter(str(t.dtype).removeprefix("torch.") for t in tensors.values())
        yield f"{where}: {len(tensors)} tensors"
        yield f"  elements      {sum(t.numel() for t in tensors.values()):,}"
        yield "  dtypes        " + ", ".join(f"{d} ({n})" for d, n in dtypes.items())
        yield f"  size          {_size(sum(t.numel() * t.element_size() for t in tensors.values()))}"
        if parameters:
            for name, t in tensors.items():
                yield f"    {name}  {str(t.dtype).removeprefix('torch.')} {_shape(t.shape)}"
    for key, part in value.items():
        if isinstance(part, dict) and part:
            yield from _value(part, f"{where}[\"{key}\"]", parameters)
        elif not isinstance(part, torch.Tensor):
            yield f"{where}[\"{key}\"]: {str(part)[:60]}"


def _optimizer(saved, where, parameters):
    entries = saved["state"]
    ours = {n: e["zerofp8"] for n, e in entries.items() if isinstance(e, dict) and "zerofp8" in e}
    steps = sorted({float(e["step"]) for e in entries.values() if isinstance(e, dict) and "step" in e})
    of = ("one rank's part of zerofp8's state" if "zerofp8" in saved else
          "zerofp8's whole state" if ours else "an optimizer's state")
    tensors = [t for e in entries.values() if isinstance(e, dict) for t in e.values()
               if isinstance(t, torch.Tensor)]
    yield f"{where}: {of}, {len(entries)} parameters in {len(saved['param_groups'])} groups"
    yield "  step          " + (f"{steps[0]:g} to {steps[-1]:g}" if steps else "none")
    keys = Counter(f"{k} {str(v.dtype).removeprefix('torch.')}" for e in entries.values()
                   if isinstance(e, dict) for k, v in e.items() if isinstance(v, torch.Tensor))
    yield "  holds         " + ", ".join(sorted(keys))
    yield f"  size          {_size(sum(t.numel() * t.element_size() for t in tensors))}"
    for number, packed in ours.items():
        run, weights, about = unpack(packed, f"state {number}")
        if number == next(iter(ours)):
            yield (f"  run           {run['applied']} steps applied, {run['skipped']} skipped, loss "
                   f"scale {run['loss_scale']:g}{', before the first step' if weights == FRESH else ''}")
        if parameters:
            kinds = ", ".join(f"{k} {d}" for k, d in about["dtypes"].items() if "." not in k)
            yield f"    {about['name']}  {_shape(about['shape'])}  step {run['step']}  {kinds}"
    for i, group in enumerate(saved["param_groups"]):
        shown = {k: group[k] for k in ("lr", "betas", "eps", "weight_decay") if k in group}
        yield (f"  group {i}       {len(group.get('params', ()))} parameters, "
               + ", ".join(f"{k} {v}" for k, v in shown.items()))


def _universal(path, trust, parameters):
    training = of_universal(path, trust)
    yield f"{newest(path)}: DeepSpeed's universal checkpoint"
    yield from _value(training.weights, "  weights", parameters)
    steps = {float(e["step"]) for e in training.state.values()}
    yield f"  step          {max(steps, default=0):g}"


def _deepspeed(path, trust, parameters):
    folder = newest(path)
    files = [p for p in sorted(folder.iterdir()) if p.suffix == ".pt"]
    states = [p for p in files if p.name.endswith("_optim_states.pt")]
    yield f"{folder}: DeepSpeed checkpoint, {len(states)} ranks of an optimizer"
    yield f"  files         {len(files)}, {_size(sum(p.stat().st_size for p in files))}"
    model = next((p for p in files if p.name.endswith("model_states.pt")), None)
    if model is not None:
        held = tensor_files.load(model, trust)
        yield f"  step          {held.get('global_steps')}"
        yield from _value(held.get("module") or {}, "  weights", parameters)
    if states:
        held = tensor_files.load(states[0], trust)["optimizer_state_dict"] or {}
        zero = held.get("zero_stage")
        yield f"  ZeRO stage    {int(zero) if zero is not None else 'none'}"


def _shape(shape):
    return "x".join(map(str, shape)) or "scalar"


def _size(count):
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.1f} {unit}" if unit != "B" else f"{count} B"
        count /= 1024
    raise AssertionError


def main(arguments=None):
    arguments = parser().parse_args(arguments)
    try:
        for line in describe(Path(arguments.path), arguments.trust, arguments.parameters):
            print(line)
    except CheckpointError as error:
        print(f"zerofp8 inspect: {error}", file=sys.stderr)
        return 2
    except (Error, OSError, KeyError, TypeError) as error:
        print(f"zerofp8 inspect: {arguments.path} is not as expected: {error!r}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
