"""Rank 1 ends with an error while rank 0 waits for it over MPI."""

import torch
from reference import loss_of, seeded_model

import zerofp8

info = zerofp8.init_distributed(timeout=60)
model = seeded_model()
model, optimizer = zerofp8.initialize(model, torch.optim.AdamW(model.parameters()),
                                      {"zerofp8": {"comm_backend": "mpi"}}, timeout=60)
loss_of(model, 0, info.rank, 0).backward()
if info.rank == 1:
    raise ValueError("the batch of rank 1 is broken")
optimizer.step()
