"""A job as users start it: `torchrun job.py` or `mpirun python job.py`. Prints a line per rank.

An argument is the comm_backend: one for all ranks, or one for each.
"""

import json
import os
import sys

import torch

import zerofp8
from reference import loss_of, seeded_model

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
# One write, so that lines of several ranks do not mix.
os.write(1, (json.dumps({"rank": info.rank, "size": info.size, "local_rank": info.local_rank,
                         "source": info.source, "connected by": optimizer.plan.connected_by,
                         "losses": losses}) + "\n").encode())
