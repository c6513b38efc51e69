"""One cell of the matrix, trained for real: by zerofp8 under DeepSpeed's engines and under
torch.distributed.pipelining, and by DeepSpeed itself.
"""

import contextlib
import io
import json
import logging
import os
import sys
import time

import torch
import torch.distributed as dist
from deepspeed_gpt import DTYPES, PARTS, Reference, Trainer, adamw_section, name_of
from torch_pipeline_gpt import TorchTrainer

import zerofp8

ACCUMULATIONS = ("fp32", "bf16", "fp16", "fp8")
LOSS_SCALE = 128.0
# Error of the reduced gradient, in the mean norm of what was added up; that of FP8 is derived.
BOUND = {"fp32": 1e-6, "bf16": 4e-3, "fp16": 1e-3}
# Largest distance of the losses from the reference, relative to the first loss.
FOLLOWS = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2, "fp8": 2e-2}
SGD_LR = 0.3
_references = {}


def cells():
    """(model, accumulation, sharded, stage), contradictions included."""
    return [(model, accumulation, sharded, stage) for model in DTYPES
            for accumulation in ACCUMULATIONS for stage in (0, 1, 2) for sharded in (False, True)]


def runs(cell):
    """``sharded: false`` holds for stages 0 and 1, ``sharded: true`` for 1 and 2."""
    return cell[3] in ((1, 2) if cell[2] else (0, 1))


def join(rank, size):
    """Bring DeepSpeed up on a rank of tests/python/ranks.py, without its shared-memory extension.

    That is compiled at the first use, and used for all-reduce on one node only.
    """
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size),
                      LOCAL_SIZE=str(size), DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1",
                      MASTER_PORT="29500")
    with contextlib.redirect_stdout(io.StringIO()):
        import deepspeed
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    from deepspeed.utils import logger
    logger.setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)


def config_of(cell):
    model, accumulation, sharded, stage = cell
    config = {
        "optimizer": adamw_section(), "gradient_clipping": 0.0,
        "gradient_accumulation_dtype": {"dtype": accumulation, "sharded": sharded},
        "zero_optimization": {"stage": stage},
        # The wire is as exact as the accumulator.
        "zerofp8": {"gradient_communication_dtype": "fp32" if accumulation == "fp16"
                    else accumulation}}
    if model != "fp32":
        config[model] = {"enabled": True}
    if model == "fp16":
        config["fp16"]["loss_scale"] = LOSS_SCALE
    return config


def reference_of(model, tied, accumulation, steps, rule="adamw"):
    """Losses of so many steps and the first one's parts, made once."""
    key = model, tied, accumulation, steps, rule
    if key not in _references:
        scale = LOSS_SCALE if model == "fp16" else 1.0
        reference, losses, first, norm = Reference(model, tied, scale, rule), [], None, None
        for step in range(steps):
            loss, parts = reference.gradients(step, accumulation)
            length = reference.update(reference.mean(parts), SGD_LR if rule == "sgd" else 3e-3)
            losses.append(loss)
            first, norm = first or parts, norm or length
        _references[key] = losses, first, norm
    return _references[key]


def errors_of(found, parts):
    """Worst error of a parameter in the mean norm of its parts, its name, and that of all."""
    mean, worst, name_of_worst, total, size = Reference.mean(parts), 0.0, "", 0.0, 0.0
    for name, gradient in found.items():
        difference = float((gradient.double() - mean[name]).norm())
        error = difference / (sum(float(p[name].norm()) for p in parts) / len(parts))
        if not error <= worst:  # NaN, too
            worst, name_of_worst = error, name
        total, size = total + difference**2, size + float(mean[name].square().sum())
    return worst, name_of_worst, (total / size)**0.5


def fp8_bound(parts, accumulation, names):
    """Each block is rounded once per addition and once on the wire, with .0265 of its norm.

    Largest over the parameters, in the mean norm of the parts; whole parameters are looked at,
    which is coarser than blocks.
    """
    def of(name):
        total = 0.0
        for begin in range(0, PARTS, accumulation):
            running = 0
            for part in parts[begin:begin + accumulation]:
                running = running + part[name]
                total += float(part[name].norm()) + float(running.norm())
        return 0.0265 * total / sum(float(p[name].norm()) for p in parts)
    return max(of(name) for name in names)


def train(trainer, steps, before_first_update):
    """Losses, what `before_first_update` returned, and the first step's norm."""
    inner, seen = trainer.stepper.step, []

    def step(*args, **kwargs):
        if not seen:
            seen.append(before_first_update())
        return inner(*args, **kwargs)

    trainer.stepper.step = step
    losses = [trainer.step(0)]
    norm = trainer.norm()
    return losses + [trainer.step(i) for i in range(1, steps)], seen[0], norm


@contextlib.contextmanager
def quiet():
    """DeepSpeed prints its topology for each engine."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def run_ours(cell, stages, steps, kind=Trainer):
    """What came out, as JSON-able values; the error's text where the cell is one of the table's."""
    begin = time.monotonic()
    zerofp8.deepspeed.install(timeout=50)
    world = dist.get_world_size()
    try:
        with quiet():
            trainer = kind(stages, config_of(cell), world)
    except zerofp8.ConfigError as error:
        return {"status": "error", "text": str(error)}
    optimizer = trainer.zerofp8
    losses, found, first_norm = train(trainer, steps, lambda: {
        n: optimizer.full_gradient(p) for n, p in trainer.parameters().items()})
    expected, parts, norm = reference_of(cell[0], stages == 1, trainer.loss_divisor, steps)
    worst, name, total = errors_of(found, parts)
    s = optimizer.settings
    result = {
        "error": worst, "worst": name, "total": total,
        "bound": BOUND.get(cell[1]) or fp8_bound(parts, trainer.accumulation, found),
        "deviation": max(abs(a - b) for a, b in zip(losses, expected)) / expected[0],
        "follows": max(FOLLOWS[cell[0]], FOLLOWS[cell[1]]),
        "norm": abs(first_norm / norm - 1), "losses": [losses[0], losses[-1]],
        "effective": [s.weight, s.accumulation, s.accumulation_sharded, s.stage],
        "seconds": time.monotonic() - begin}
    trainer.close()
    right = result["error"] <= result["bound"] and result["deviation"] <= result["follows"]
    return {"status": "right" if right else "WRONG", **result}


class RecordingSGD(torch.optim.SGD):
    """Keeps the first gradients that it is given: what DeepSpeed has reduced."""

    seen = None

    def step(self, closure=None):
        if self.seen is None:
            self.seen = {id(p): None if p.grad is None else p.grad.detach().double().clone()
                         for g in self.param_groups for p in g["params"]}
        return super().step(closure)


def _reduced_by_deepspeed(trainer, base):
    """By name, from DeepSpeed's wrapper: whole parameters, or a flat shard of all of them."""
    engine, optimizer = trainer.engine, trainer.engine.optimizer
    names = {id(p): name_of(n) for n, p in engine.module.named_parameters()}
    held = base.param_groups[0]["params"]
    groups = getattr(optimizer, "round_robin_bit16_groups", None) or getattr(
        optimizer, "bf16_groups", None)
    if groups is None:
        masters = getattr(optimizer, "fp16_groups", [held])[0]
        return {names[id(p)]: base.seen[id(h)].reshape(p.shape) for p, h in zip(masters, held)}
    shard = base.seen[id(held[0])]
    shards = [torch.empty_like(shard) for _ in range(trainer.data_ranks)]
    dist.all_gather(shards, shard, group=optimizer.dp_process_group if not isinstance(
        optimizer.dp_process_group, list) else optimizer.dp_process_group[0])
    flat, found, offset = torch.cat(shards), {}, 0
    for p in groups[0]:
        found[names[id(p)]] = flat[offset:offset + p.numel()].view_as(p)
        offset += p.numel()
    return found


def run_theirs(cell, stages, steps):
    """DeepSpeed's own: SGD, as Adam hides a wrong scale. `cell`: model, accumulation, stage."""
    model, accumulation, stage = cell
    zerofp8.deepspeed.uninstall()
    config = {"zero_optimization": {"stage": stage, "reduce_bucket_size": 100000,
                                    "allgather_bucket_size": 100000},
              "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True,
              "data_types": {"grad_accum_dtype": accumulation}}
    if model != "fp32":
        config[model] = {"enabled": True}
    if model == "fp16":
        config["fp16"]["loss_scale"] = LOSS_SCALE
        from deepspeed.accelerator import get_accelerator
        type(get_accelerator()).is_fp16_supported = lambda self: True
    base = []

    def make(parameters):
        base.append(RecordingSGD(parameters, lr=SGD_LR))
        return base[0]

    try:
        with quiet():
            trainer = Trainer(stages, config, dist.get_world_size(), optimizer=make)
        losses = [trainer.step(i) for i in range(steps)]
        found = _reduced_by_deepspeed(trainer, base[0])
    except Exception as error:
        return {"status": "raises", "text": f"{type(error).__name__}: {error}"[:160]}
    expected, parts, _ = reference_of(model, stages == 1, trainer.accumulation, steps, "sgd")
    worst, name, total = errors_of(found, parts)
    deviation = max(abs(a - b) for a, b in zip(losses, expected)) / expected[0]
    bound = 1e-6 if model == accumulation == "fp32" else 1e-2
    right = worst <= bound and deviation <= 2e-2
    return {"status": "right" if right else "WRONG", "error": worst, "worst": name, "total": total,
            "bound": bound, "deviation": deviation,
            "wrapper": type(trainer.engine.optimizer).__name__}


# Who trains a cell.
RUNS = {"zerofp8": run_ours, "deepspeed": run_theirs,
        "torch": lambda *arguments: run_ours(*arguments, kind=TorchTrainer)}


def walk(rank, size, whose, stages, steps, chosen, folder=None):
    """On every rank: ``{cell: result}``; each is written into `folder`, too, when it is there."""
    join(rank, size)
    import zerofp8.deepspeed  # noqa: F401
    results = {}
    for cell in chosen:
        results[cell] = RUNS[whose](cell, stages, steps)
        if folder is not None:
            with open(os.path.join(folder, f"rank{rank}.jsonl"), "a") as file:
                file.write(json.dumps([cell, results[cell]]) + "\n")
    return results
