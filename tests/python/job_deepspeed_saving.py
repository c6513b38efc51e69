"""DeepSpeed's own optimizer on one rank: `job_deepspeed_saving.py FOLDER STAGE` trains and saves.

FOLDER/expected.pt is what DeepSpeed itself says of its state.
"""

import os
import sys

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from reference import loss_of, seeded_model

folder, stage = sys.argv[1:]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
model = seeded_model(torch.bfloat16, width=40)
config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True},
          "zero_optimization": {"stage": int(stage)},
          "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}}}
engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
for step in range(3):
    engine.backward(loss_of(model, step, 0, 0))
    engine.step()
engine.save_checkpoint(folder)
torch.save({n: {"fp32": safe_get_full_fp32_param(p).clone(),
                **{k: safe_get_full_optimizer_state(p, k).clone()
                   for k in ("exp_avg", "exp_avg_sq")}}
            for n, p in model.named_parameters()}, f"{folder}/expected.pt")
