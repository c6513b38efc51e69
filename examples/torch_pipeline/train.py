#!/usr/bin/env python3
"""Train a byte-level GPT with torch.distributed.pipelining and zerofp8. See README.md."""

import argparse
import json
import logging
import os
import sys
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

import zerofp8

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from common import runs  # noqa: E402
from common.byte_gpt import Block, Embedding, Position, Text, logits, loss_fn  # noqa: E402

# (schedule, stages on one rank)
SCHEDULES = {"gpipe": (pipelining.ScheduleGPipe, 1), "1f1b": (pipelining.Schedule1F1B, 1),
             "interleaved1f1b": (pipelining.ScheduleInterleaved1F1B, 2)}
WARMUP = 20


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    runs.add_options(parser, Path("out/torch_pipeline"), HERE / "config.json")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--lr", type=float, default=2e-3)
    options = parser.parse_args()
    if options.stages < 2:
        parser.error("--stages: at least 2; for one stage see examples/digits")
    options.cuts = options.stages * SCHEDULES[options.schedule][1]
    if options.blocks % options.cuts:
        parser.error(f"--blocks {options.blocks} cannot be cut into {options.cuts} equal stages")
    return options


class Head(Embedding):
    """The last stage's copy of the embedding."""

    def forward(self, x):
        return logits(self, x)


def make_parts(options, stage, dtype):
    """The stages of one rank: every `options.stages`-th of all cuts."""
    torch.manual_seed(1)  # every rank makes the whole model and keeps its part
    width, count = options.width, options.blocks // options.cuts
    blocks = [Block(width, width // 32) for _ in range(options.blocks)]
    first = [Embedding(width), Position(width, options.length)]
    last = [nn.LayerNorm(width), Head(width)]
    parts = {}
    for cut in range(stage, options.cuts, options.stages):
        layers = blocks[cut * count:(cut + 1) * count]
        layers = (first if cut == 0 else []) + layers + (last if cut == options.cuts - 1 else [])
        parts[cut] = nn.Sequential(*layers).to(dtype)
    if 0 in parts:  # one parameter on two ranks
        zerofp8.tie(parts[0][0].weight, "embedding")
    if options.cuts - 1 in parts:
        zerofp8.tie(parts[options.cuts - 1][-1].weight, "embedding")
    return parts


class Trainer:
    """One rank's part: rank = stage * data ranks + data rank."""

    def __init__(self, options, rank, world):
        if world % options.stages:
            raise zerofp8.ArgumentError(f"{world} ranks cannot be {options.stages} stages x data "
                                        "ranks; change --stages or the number of ranks")
        self.data_ranks = world // options.stages
        self.stage, self.data_rank = divmod(rank, self.data_ranks)
        self.last = self.stage == options.stages - 1
        pipeline, replicas = self.make_groups(options.stages)
        config = json.loads(zerofp8.Config.from_file(str(options.config)).canonical())
        self.samples = config.get("train_micro_batch_size_per_gpu", 4)
        self.micro_batches = config.get("gradient_accumulation_steps", 1)
        dtype = next((d for key, d in (("bf16", torch.bfloat16), ("fp16", torch.float16))
                      if config.get(key, {}).get("enabled")), torch.float32)
        parts = make_parts(options, self.stage, dtype)
        self.lr, self.losses = options.lr, []
        template = torch.optim.AdamW((p for m in parts.values() for p in m.parameters()),
                                     lr=options.lr, betas=(0.9, 0.95), weight_decay=0.01)
        _, self.optimizer = zerofp8.initialize(
            nn.ModuleList(parts.values()), template, str(options.config),
            data_parallel_group=replicas, pipeline_parallel_group=pipeline)
        cpu = torch.device("cpu")
        stages = [pipelining.PipelineStage(m, cut, options.cuts, cpu, group=pipeline)
                  for cut, m in parts.items()]
        kind, several = SCHEDULES[options.schedule]
        self.schedule = kind(stages if several > 1 else stages[0], self.micro_batches,
                             loss_fn=self.loss_of)

    def make_groups(self, stages):
        grid = torch.arange(stages * self.data_ranks).reshape(stages, self.data_ranks)
        pipelines = [dist.new_group(column.tolist()) for column in grid.T]
        replicas = [dist.new_group(row.tolist()) for row in grid]
        return pipelines[self.data_rank], replicas[self.stage]

    def loss_of(self, output, targets):
        loss = loss_fn(output, targets)
        self.losses.append(loss.detach())
        return self.optimizer.scale(loss)  # as it is, but for fp16

    def train_step(self, step, text):
        """Loss over all ranks and the optimizer's report; steps count from 0."""
        pieces = [text.batch(step * self.micro_batches + m, self.data_rank, self.samples)
                  for m in range(self.micro_batches)]
        inputs, targets = (torch.cat(p) for p in zip(*pieces))
        self.losses = []
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * min(1, (step + 1) / WARMUP)
        self.schedule.step(*([inputs] if self.stage == 0 else []),
                           **({"target": targets} if self.last else {}))
        report = self.optimizer.step()
        loss = torch.stack(self.losses).mean() if self.last else torch.zeros(())
        dist.all_reduce(loss)  # the last stages have it; rank 0 shows it
        return loss.item() / self.data_ranks, report


def train(trainer, options, rank):
    checkpoints, optimizer = options.out / "checkpoints", trainer.optimizer
    if options.resume:
        optimizer.load(checkpoints)
    start = optimizer.applied_steps + optimizer.skipped_steps
    history = runs.History(options, options.config.stem, start)
    text, losses, report = Text(options.length), [], None
    with runs.Progress(options.steps, rank) as bar:
        for step in range(start, start + options.steps):
            loss, report = trainer.train_step(step, text)
            losses.append(loss)
            bar.show(loss, report.grad_norm, report.skipped_steps, report)
            if options.save_every and (step + 1) % options.save_every == 0:
                optimizer.save(checkpoints)
    if rank == 0:
        from common.plots import draw

        history.write(losses, optimizer.plan, report)
        print(draw(options.out, history.run["job"]))


def main():
    options = arguments()
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    # torch's schedules stop gradients at a stage's border in their own way.
    warnings.filterwarnings("ignore", message=".*autograd kernel was not registered.*")
    info = zerofp8.init_distributed()
    trainer = Trainer(options, info.rank, info.size)
    if info.rank == 0:
        print(f"{info}: {options.stages} stages x {trainer.data_ranks} data ranks, "
              f"{options.schedule}, {trainer.micro_batches} micro-batches")
        print(trainer.optimizer.plan, flush=True)
    train(trainer, options, info.rank)
    dist.barrier()
    trainer.optimizer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    runs.run_main(main)
