#!/usr/bin/env python3
"""Train a byte-level GPT with DeepSpeed's pipeline engine and zerofp8. See README.md."""

import argparse
import logging
import os
import sys
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

import zerofp8
import zerofp8.deepspeed

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from common import runs  # noqa: E402
from common.byte_gpt import Block, Embedding, Position, Text, logits, loss_fn  # noqa: E402


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    runs.add_options(parser, Path("out/deepspeed"), HERE / "ds_config.json")
    parser.add_argument("--stock", action="store_true", help="DeepSpeed's own optimizer instead")
    return parser.parse_args()


def layers(options):
    """The first and the last layer are one parameter on two stages."""
    width = options.width
    return [TiedLayerSpec("embedding", Embedding, width),
            LayerSpec(Position, width, options.length),
            *(LayerSpec(Block, width, width // 32) for _ in range(options.blocks)),
            LayerSpec(nn.LayerNorm, width),
            TiedLayerSpec("embedding", Embedding, width, forward_fn=logits)]


def make_engine(options, launch):
    os.environ.setdefault("LOCAL_RANK", str(launch.local_rank or 0))  # DeepSpeed knows torchrun's
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    torch.manual_seed(1)
    if not options.stock:
        zerofp8.deepspeed.install()  # the one added line
    module = PipelineModule(layers(options), num_stages=options.stages, loss_fn=loss_fn,
                            partition_method="parameters")
    return deepspeed.initialize(model=module, model_parameters=list(module.parameters()),
                                config=str(options.config))[0]


def train(engine, options, rank):
    """Losses of this run's steps."""
    start = engine.global_steps
    data = Text(options.length).batches(start * engine.gradient_accumulation_steps(),
                                        engine.grid.get_data_parallel_rank(),
                                        engine.train_micro_batch_size_per_gpu())
    losses = []
    with runs.Progress(options.steps, rank) as bar:
        for step in range(start + 1, start + options.steps + 1):
            losses.append(float(engine.train_batch(data)))
            bar.show(losses[-1], engine.get_global_grad_norm(), engine.skipped_steps,
                     getattr(engine.optimizer, "last_report", None))
            if options.save_every and step % options.save_every == 0:
                engine.save_checkpoint(str(options.out / "checkpoints"))
    return losses


def quiet(rank):
    """What libraries say goes to stderr, and only the plan and warnings of rank 0."""
    # DeepSpeed asks the schedule for a rate before its first step; it also writes to stdout.
    deepspeed.utils.logger.setLevel(logging.ERROR)
    # torch's pipeline communication is not recorded by autograd, and need not be.
    warnings.filterwarnings("ignore", message=".*autograd kernel was not registered.*")
    plan = logging.StreamHandler(sys.stdout)
    logging.basicConfig(format="%(message)s", handlers=[plan] if rank == 0 else None,
                        level=logging.INFO if rank == 0 else logging.WARNING)


def main():
    options = arguments()
    launch = zerofp8.init_distributed()  # torchrun's or mpirun's variables
    quiet(launch.rank)
    engine = make_engine(options, launch)
    if options.resume and engine.load_checkpoint(str(options.out / "checkpoints"))[0] is None:
        raise zerofp8.CheckpointError(f"{options.out / 'checkpoints'} has no checkpoint to resume; "
                                      "run with --save-every first")
    history = runs.History(options, options.config.stem + ("_stock" if options.stock else ""),
                           engine.global_steps)
    losses = train(engine, options, launch.rank)
    if launch.rank == 0:
        from common.plots import draw

        optimizer = engine.optimizer
        history.write(losses, *(() if options.stock else (optimizer.optimizer.plan,
                                                          optimizer.last_report)))
        print(draw(options.out, history.run["job"]))
    torch.distributed.barrier()
    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    runs.run_main(main)
