"""Models that a trainer has wrapped in DistributedDataParallel, beside the same without it."""

import torch
from reference import loss_of, seeded_model
from torch.nn.parallel import DistributedDataParallel

import zerofp8

STEPS, LR = 4, 1e-2
WRAPPERS = {"plain": {}, "static_graph": {"static_graph": True},
            "find_unused": {"find_unused_parameters": True},
            "views": {"gradient_as_bucket_view": True}}


class Norms(torch.nn.Module):
    """With buffers that differ between ranks, and a parameter that no forward pass uses."""

    def __init__(self, dtype):
        super().__init__()
        body = list(seeded_model(width=80))
        self.body = torch.nn.Sequential(body[0], torch.nn.BatchNorm1d(80), *body[1:]).to(dtype)
        self.unused = torch.nn.Linear(3, 3).to(dtype)

    def forward(self, x):
        return self.body(x)


def started(model, stage, level, micro):
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    config = {"zero_optimization": {"stage": stage}, "gradient_accumulation_steps": micro,
              "bf16": {"enabled": next(model.parameters()).dtype == torch.bfloat16}}
    return zerofp8.initialize(model, optimizer, config, opt_level=level, loss_is_divided=False)


def train(model, optimizer, rank, micro, no_sync=False):
    """Weights after some steps, under the names of the bare model."""
    for step in range(STEPS):
        for m in range(micro):
            if no_sync and m + 1 < micro:
                with model.no_sync():
                    loss_of(model, step, rank, m).backward()
            else:
                loss_of(model, step, rank, m).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return [p.detach().clone() for p in model.parameters()]


def run(rank, order, kind, stage, level, micro, dtype=torch.float32, no_sync=False):
    """One training; `order` is when the wrapper is made: never, or before or after initialize."""
    model = Norms(dtype)
    if order == "before, inner":  # as Lightning, which gives configure_optimizers the bare one
        wrapped = DistributedDataParallel(model, **WRAPPERS[kind])
        model, optimizer = started(model, stage, level, micro)
        model = wrapped
    elif order == "before":
        given = DistributedDataParallel(model, **WRAPPERS[kind])
        model, optimizer = started(given, stage, level, micro)
        assert model is given
    else:
        model, optimizer = started(model, stage, level, micro)
        if order == "after":
            model = DistributedDataParallel(model, **WRAPPERS[kind])
    weights = train(model, optimizer, rank, micro, no_sync)
    if order != "never":
        assert not hasattr(model.reducer, "_get_zeros_like_grad_buckets")  # the buckets are gone
    return weights
