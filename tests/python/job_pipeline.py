"""2 stages x 2 data ranks with a tied weight, as users start it; the argument is the comm_backend."""

import sys

import torch
from test_pipeline import Schedule1F1B, config_of, run_pipeline
from told import tell

import zerofp8

info = zerofp8.init_distributed(timeout=60)
torch.set_num_threads(1)
config = config_of("bf16", 2, "fp8")
config["zerofp8"]["comm_backend"] = sys.argv[1]
result = run_pipeline(info.rank, 2, 2, "bf16", config, Schedule1F1B, 5)
tell({"rank": info.rank, "losses": result["losses"], "norm": result["norm"],
      "tied": [t.tolist() for t in result["tied"]]})
