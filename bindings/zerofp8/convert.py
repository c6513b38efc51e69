"""Convert checkpoints: ``python -m zerofp8.convert``, or ``zerofp8 convert``."""

import argparse
import sys

import torch

from . import folder_files, tensor_files
from .errors import CheckpointError, Error
from .training_files import kind_of, of_deepspeed, of_torch, of_universal

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_EXAMPLES = """
examples:
  zerofp8 convert checkpoints --weights model.safetensors
      FP32 weights in one file, as DeepSpeed's zero_to_fp32 makes it
  zerofp8 convert checkpoints --optimizer adamw.pt --order model.safetensors
      a state_dict for torch.optim.AdamW
  zerofp8 convert adamw.pt --model model.safetensors --zerofp8 checkpoints --config ds_config.json
      go on with zerofp8 where torch's AdamW has stopped
  zerofp8 convert global_step500 --zerofp8 checkpoints --config ds_config.json --model-dtype bf16
      the same from DeepSpeed's ZeRO-1/2 or universal folder
"""


def parser():
    p = argparse.ArgumentParser(
        prog="zerofp8 convert", description="Convert checkpoints of training.", epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("source", help="a zerofp8 folder, a DeepSpeed folder (ZeRO-1/2 or universal), or "
                   "a file with a state_dict of torch's Adam or AdamW")
    p.add_argument("--model", metavar="FILE", help="weights that go with a state_dict")
    p.add_argument("--order", metavar="FILE", help="weights whose order is the model's: a zerofp8 or "
                   "universal folder does not hold it")
    p.add_argument("--weights", metavar="FILE", help="write weights: .safetensors, or torch's format")
    p.add_argument("--dtype", choices=list(_DTYPES), default="fp32", help="of --weights")
    p.add_argument("--optimizer", metavar="FILE", help="write a state_dict of torch's AdamW")
    p.add_argument("--zerofp8", metavar="FOLDER", help="write a zerofp8 checkpoint")
    p.add_argument("--config", metavar="FILE", help="of the training that loads --zerofp8")
    p.add_argument("--opt-level", choices=["O0", "O1", "O2", "O3"])
    p.add_argument("--model-dtype", choices=list(_DTYPES), help="of the model that loads --zerofp8; "
                   "default: as the source's weights")
    p.add_argument("--trust", action="store_true", help="run the code in the source's pickles")
    return p


def read(arguments):
    """The source as `Training`."""
    kind, source = kind_of(arguments.source), arguments.source
    order = None
    if arguments.order:
        order = list(tensor_files.load(arguments.order, arguments.trust))
    if kind == "zerofp8":
        return folder_files.read(source, order)
    if kind == "deepspeed":
        return of_deepspeed(source, arguments.trust)
    if kind == "universal":
        return _ordered(of_universal(source, arguments.trust), order)
    saved = tensor_files.load(source, arguments.trust)
    saved = saved.get("optimizer", saved) if isinstance(saved, dict) else {}
    if "param_groups" not in saved:
        raise CheckpointError(f"{source}: holds no state_dict of an optimizer")
    if any("zerofp8" in e for e in saved["state"].values()):
        raise CheckpointError(f"{source}: is a state_dict of zerofp8's, which any number of ranks "
                              "loads; for other programs save torch_state_dict()")
    if not arguments.model:
        raise CheckpointError(f"{source}: needs --model, the weights that go with it")
    return of_torch(saved, tensor_files.load(arguments.model, arguments.trust), source)


def _ordered(training, order):
    if order is not None:
        names = [n for n in order if n in training.weights]
        training.weights = {n: training.weights[n] for n in (*names, *training.weights)}
        if len(training.groups) == 1:
            training.groups[0]["params"] = list(training.weights)
    return training


def write(training, arguments):
    """What was asked for; the lines to tell."""
    if arguments.weights:
        dtype = _DTYPES[arguments.dtype]
        tensor_files.save(arguments.weights, {n: w.to(dtype) for n, w in training.weights.items()})
        yield f"{arguments.weights}: {len(training.weights)} tensors, {arguments.dtype}"
    if arguments.optimizer:
        _need_state(training, arguments.source)
        if any("lr" not in g for g in training.groups):
            raise CheckpointError(
                f"{arguments.source}: does not hold which parameter is in which group; load it in your "
                "program and save torch_state_dict()")
        names = [n for g in training.groups for n in g["params"]]
        numbers = {n: i for i, n in enumerate(names)}
        groups = [{**g, "params": [numbers[n] for n in g["params"]], "param_names": g["params"]}
                  for g in training.groups]
        state = {numbers[n]: training.state[n] for n in names if n in training.state}
        torch.save({"state": state, "param_groups": groups}, arguments.optimizer)
        yield f"{arguments.optimizer}: state of {len(state)} parameters"
    if arguments.zerofp8:
        _need_state(training, arguments.source)
        folder_files.write(training, arguments.zerofp8, arguments.config, arguments.opt_level,
                           _DTYPES.get(arguments.model_dtype))
        yield f"{arguments.zerofp8}: load it with optimizer.load(\"{arguments.zerofp8}\")"


def _need_state(training, source):
    if not training.state:
        raise CheckpointError(f"{source}: holds no state of an optimizer")


def main(arguments=None):
    arguments = parser().parse_args(arguments)
    if not (arguments.weights or arguments.optimizer or arguments.zerofp8):
        parser().error("nothing to write: pass --weights, --optimizer or --zerofp8")
    try:
        for line in write(read(arguments), arguments):
            print(line)
    except (Error, OSError) as error:
        print(f"zerofp8 convert: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
