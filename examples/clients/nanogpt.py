"""A loop as nanoGPT's train.py, with zerofp8 in the place of AdamW and its DDP left where it is.

    python nanogpt.py                                    # one process
    torchrun --standalone --nproc-per-node 2 nanogpt.py  # two
"""

import argparse
import os
from contextlib import nullcontext

import torch
import zerofp8
from small import ACCUMULATE, LR, Bytes, adamw, batches_of, llama
from torch.nn.parallel import DistributedDataParallel


def train(rank, ranks, level="O2", stage=1, clip=1.0, steps=8, compiled=None, scaled=False,
          file=None, save_at=None, resume=False, after_step=lambda number: None):
    """Losses of the steps; `level` None is torch's own AdamW.

    compiled: torch.compile "before" or "after" initialize. scaled: torch's GradScaler. file: what
    is saved after step `save_at` by rank 0 alone, and read by `resume`.
    """
    model = llama()
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    if compiled == "before":
        model = torch.compile(model, backend="aot_eager")
    if level is not None:
        config = {"gradient_accumulation_steps": ACCUMULATE, "zero_optimization": {"stage": stage}}
        model, optimizer = zerofp8.initialize(model, optimizer, config, opt_level=level,
                                              loss_is_divided=True)  # by ACCUMULATE, below
    if compiled == "after":
        model = torch.compile(model, backend="aot_eager")
    raw = model._orig_mod if compiled else model
    if ranks > 1:
        model = DistributedDataParallel(model)
    first = 0
    if resume:
        saved = torch.load(file, weights_only=True)
        raw.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    data, losses = Bytes(), []
    for step in range(first, steps):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / 4)
        total = torch.zeros(())
        for micro in range(ACCUMULATE):
            last = micro == ACCUMULATE - 1
            with nullcontext() if last or ranks == 1 else model.no_sync():
                batch = batches_of(data, step, micro, rank, ranks)
                loss = model(**batch).loss / ACCUMULATE
                scaler.scale(loss).backward()
            total += loss.detach()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if ranks > 1:
            torch.distributed.all_reduce(total)
        losses.append(total.item() / ranks)
        if step + 1 == save_at and rank == 0:
            torch.save({"model": raw.state_dict(), "optimizer": optimizer.state_dict(),
                        "step": step + 1}, file)
        after_step(step + 1)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--file", default="build/clients/nanogpt.pt")
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    info = zerofp8.init_distributed()
    os.makedirs(os.path.dirname(given.file) or ".", exist_ok=True)
    print("rank", info.rank, "losses", train(info.rank, info.size, file=given.file, save_at=4,
                                             resume=given.resume))
