"""Handwritten digits (scikit-learn's 8x8 images), trained on any number of ranks.

    python train.py                                        one process
    torchrun --nproc-per-node 2 train.py --level O2
    mpirun -np 2 python train.py --config ds_config.json
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from tqdm import tqdm

import zerofp8

TEST_IMAGES = 360


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", help="DeepSpeed-style JSON; default: bf16, ZeRO stage 1")
    parser.add_argument("--level", choices=["O0", "O1", "O2", "O3"], default=None)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=64, help="images per step, over all ranks")
    parser.add_argument("--lr", type=float, default=2e-3)
    return parser.parse_args()


def load_images():
    """Training and test images (float, 0 to 1) and labels."""
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return (x[:-TEST_IMAGES], y[:-TEST_IMAGES]), (x[-TEST_IMAGES:], y[-TEST_IMAGES:])


def make_model():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(),
                         nn.Linear(128, 10))


def accuracy(model, images, labels, dtype):
    with torch.no_grad():
        return (model(images.to(dtype)).argmax(1) == labels).float().mean().item()


def main():
    arguments = parse_arguments()
    info = zerofp8.init_distributed()
    torch.manual_seed(0)
    config = arguments.config or {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    dtype = torch.bfloat16
    model = make_model().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    model, optimizer = zerofp8.initialize(model, optimizer, config, opt_level=arguments.level)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)

    (images, labels), test = load_images()
    generator = torch.Generator().manual_seed(1)  # the same on all ranks; each takes its part
    per_rank = max(1, arguments.batch // info.size)
    if info.rank == 0:
        print(info)
        print(optimizer.plan)
    progress = tqdm(range(arguments.steps), disable=info.rank != 0, unit="step", mininterval=1.0)
    for _ in progress:
        chosen = torch.randint(len(images), (per_rank * info.size,), generator=generator)
        mine = chosen[info.rank * per_rank:(info.rank + 1) * per_rank]
        loss = nn.functional.cross_entropy(model(images[mine].to(dtype)).float(), labels[mine])
        optimizer.backward(loss)
        report = optimizer.step()
        if report.applied:
            schedule.step()
        sent = sum(v for k, v in report.wire.items() if k not in ("control", "envelopes"))
        progress.set_postfix(loss=f"{loss.item():.3f}", norm=f"{report.grad_norm:.2f}",
                             skipped=report.skipped_steps, sent=f"{sent / 1e3:.0f} kB",
                             refresh=False)
    if info.rank == 0:
        print(f"test accuracy {accuracy(model, *test, dtype):.3f}, "
              f"{optimizer.plan.bytes_per_parameter:.2f} bytes per parameter")


if __name__ == "__main__":
    main()
