"""A job of test_cuda.py: `torchrun job_cuda.py DEVICE BACKEND HOW`. Prints a line per rank.

HOW is "plain", "offload" (state on the CPU) or "captured" (steps are replays of a CUDA graph).
"""

import sys

import torch

import zerofp8
from cuda_runs import Captured, make, run
from told import tell
from zerofp8.weights import digest

info = zerofp8.init_distributed("gloo", timeout=60)
torch.set_num_threads(1)
device, backend, how = sys.argv[1:4]
if device == "cuda":
    device = f"cuda:{info.rank % torch.cuda.device_count()}"
    torch.cuda.set_device(device)
model, optimizer = make(device, "O2", backend, how == "offload", stage=2,
                        capturable=how == "captured", transposed=how != "captured")
if how == "captured":
    graph = Captured(model, optimizer, info.rank)
    found = [(r.applied, str(r.grad_norm)) for r in map(graph.step, range(4))]
else:
    found = run(model, optimizer, range(4), info.rank)[0]
tell({"rank": info.rank, "found": str(found),
      "connected by": optimizer.plan.connected_by,
      "weights": digest(optimizer._parameters)})
