"""A job of test_cuda.py: `torchrun job_cuda.py DEVICE BACKEND OFFLOAD`. Prints a line per rank.

OFFLOAD is empty where state is with the parameters.
"""

import sys

import torch

import zerofp8
from cuda_runs import make, run
from told import tell
from zerofp8.weights import digest

info = zerofp8.init_distributed("gloo", timeout=60)
torch.set_num_threads(1)
device, backend, offload = sys.argv[1:4]
if device == "cuda":
    device = f"cuda:{info.rank % torch.cuda.device_count()}"
    torch.cuda.set_device(device)
model, optimizer = make(device, "O2", backend, bool(offload), stage=2)
found = run(model, optimizer, range(4), info.rank)[0]
tell({"rank": info.rank, "found": str(found),
      "connected by": optimizer.plan.connected_by,
      "weights": digest(optimizer._parameters)})
