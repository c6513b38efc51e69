"""torch.distributed.checkpoint with zerofp8: its getters, setters, save and load.

    torchrun --standalone --nproc-per-node 2 dcp.py
"""

import argparse

import torch
import torch.distributed.checkpoint as dcp
import zerofp8
from small import Bytes, adamw, batches_of, llama
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def started(level="O2", stage=1):
    model = llama()
    return zerofp8.initialize(model, adamw(model), {"zero_optimization": {"stage": stage}},
                              opt_level=level)


def train(model, optimizer, rank, ranks, first, steps):
    """Losses of this rank's samples."""
    data, losses = Bytes(), []
    for step in range(first, steps):
        loss = model(**batches_of(data, step, 0, rank, ranks)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def save(model, optimizer, folder):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)


def load(model, optimizer, folder):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"],
                   optim_state_dict=state["optimizer"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="build/clients/dcp")
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    info = zerofp8.init_distributed()
    model, optimizer = started()
    if given.resume:
        load(model, optimizer, given.folder)
    first = optimizer.applied_steps
    losses = train(model, optimizer, info.rank, info.size, first, first + 4)
    save(model, optimizer, given.folder)
    print("rank", info.rank, "losses", losses)
