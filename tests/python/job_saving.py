"""A job whose rank 0 saves alone, after the last step: `job_saving.py FOLDER WHERE`.

WHERE: "module", "function" (the optimizer is gone when rank 1 comes to its end) or "failing" (rank 1
ends by an exception, and must not stay).
"""

import sys
import time

import torch
import torch.distributed as dist
from reference import loss_of, seeded_model

import zerofp8

folder, where = sys.argv[1:]


def main():
    zerofp8.init_distributed("gloo")
    model = seeded_model(width=40)
    model, optimizer = zerofp8.initialize(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), {"zero_optimization": {"stage": 2}},
        timeout=30)
    for step in range(3):
        loss_of(model, step, 0, 0).backward()
        optimizer.step()
    if dist.get_rank() == 0:
        time.sleep(2)
        began = time.monotonic()
        try:
            torch.save(optimizer.state_dict(), f"{folder}/{where}.pt")
        except zerofp8.CommError:
            assert where == "failing" and time.monotonic() - began < 10
            print("named the rank that has failed")
    elif where == "failing":
        raise ValueError("of the user's")
    return model, optimizer


if where == "module":
    kept = main()
else:
    main()
