#!/usr/bin/env python3
"""Train a byte-level GPT with DeepSpeed's pipeline engine and zerofp8. See README.md."""

import argparse
import json
import logging
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed  # noqa: E402
import torch  # noqa: E402
from deepspeed.pipe import PipelineModule  # noqa: E402
from model import Text, layers, loss_fn  # noqa: E402

import zerofp8  # noqa: E402
import zerofp8.deepspeed  # noqa: E402

HERE = Path(__file__).resolve().parent


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=HERE / "ds_config.json")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--stages", type=int, default=2, help="1, 2 or 4 pipeline stages")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--length", type=int, default=64, help="bytes of a sample")
    parser.add_argument("--out", type=Path, default=Path("out/deepspeed"),
                        help="folder for history, plots and checkpoints")
    parser.add_argument("--save-every", type=int, default=0, help="steps; 0: no checkpoints")
    parser.add_argument("--resume", action="store_true", help="from the newest checkpoint in --out")
    parser.add_argument("--stock", action="store_true", help="DeepSpeed's own optimizer instead")
    return parser.parse_args()


def make_engine(options):
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    launch = zerofp8.init_distributed()  # torchrun's or mpirun's variables
    os.environ.setdefault("LOCAL_RANK", str(launch.local_rank or 0))  # DeepSpeed knows torchrun's
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    deepspeed.utils.logger.setLevel(logging.WARNING)
    torch.manual_seed(1)
    if not options.stock:
        zerofp8.deepspeed.install()  # the one added line
    module = PipelineModule(
        layers(options.width, options.blocks, options.width // 32, options.length),
        num_stages=options.stages, loss_fn=loss_fn, partition_method="parameters")
    return deepspeed.initialize(model=module, model_parameters=list(module.parameters()),
                                config=str(options.config))[0]


def show(bar, engine, loss, report):
    said = {"loss": f"{loss:.3f}", "norm": f"{engine.get_global_grad_norm():.2f}",
            "skips": engine.skipped_steps}
    if report is not None:
        said["scale"] = f"{report.loss_scale:g}"
        said["wire"] = f"{sum(report.wire.values()) / 2**20:.2f} MiB"
    bar.set_postfix(said, refresh=False)
    bar.update()


def train(engine, options):
    """Losses of this run's steps."""
    from tqdm import tqdm

    rank, start = torch.distributed.get_rank(), engine.global_steps
    data = Text(options.length).batches(engine.grid.get_data_parallel_rank(),
                                        engine.train_micro_batch_size_per_gpu(), start)
    losses = []
    with tqdm(total=options.steps, disable=rank != 0, unit="step") as bar:
        for step in range(start + 1, start + options.steps + 1):
            losses.append(float(engine.train_batch(data)))
            show(bar, engine, losses[-1], getattr(engine.optimizer, "last_report", None))
            if options.save_every and step % options.save_every == 0:
                engine.save_checkpoint(str(options.out / "checkpoints"))
    return losses


def main():
    options = arguments()
    engine = make_engine(options)
    if options.resume:
        engine.load_checkpoint(str(options.out / "checkpoints"))
    losses = train(engine, options)
    if torch.distributed.get_rank() == 0:
        from plots import draw

        options.out.mkdir(parents=True, exist_ok=True)
        name = options.config.stem + ("_stock" if options.stock else "")
        history = {"name": name, "losses": losses}
        if not options.stock:
            plan = engine.optimizer.optimizer.plan
            history.update(rows=plan.as_dict()["rows"],
                           wire=engine.optimizer.last_report.wire)
        (options.out / f"history_{name}.json").write_text(json.dumps(history, indent=1))
        for path in draw(options.out):
            print("wrote", path)
    torch.distributed.barrier()
    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
