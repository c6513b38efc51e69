"""A job as users start it: `torchrun job.py` or `mpirun python job.py`. Each rank tells of its run.

An argument is the comm_backend: one for all ranks, or one for each.
"""

import sys

import torch

import zerofp8
from reference import loss_of, seeded_model
from told import tell

info = zerofp8.init_distributed(timeout=60)
torch.set_num_threads(1)
model = seeded_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
backends = sys.argv[1:] or ["auto"]
config = {"zero_optimization": {"stage": 1},
          "zerofp8": {"comm_backend": backends[info.rank % len(backends)]}}
if info.size == 4:
    config["zerofp8"]["shard_group_size"] = 2  # groups that the engine splits off
model, optimizer = zerofp8.initialize(model, optimizer, config, opt_level="O1", timeout=60)
losses = []
for step in range(10):
    loss = loss_of(model, step, info.rank, 0)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
tell({"rank": info.rank, "size": info.size, "local_rank": info.local_rank,
      "source": info.source, "connected by": optimizer.plan.connected_by,
      "losses": losses})
