"""Hugging Face's Trainer with DeepSpeed, whose engine trains with zerofp8 after one added line.

    torchrun --standalone --nproc-per-node 2 hf_deepspeed.py   # on CPUs: DS_ACCELERATOR=cpu
"""

import argparse

import torch
import zerofp8.deepspeed
from small import ACCUMULATE, BATCH, DECAY, LR, Bytes, llama, losses_of
from transformers import Trainer, TrainingArguments

CONFIG = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto",
                                              "weight_decay": "auto"}},
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
    "bf16": {"enabled": "auto"}}


def trainer_of(folder, steps=12, level="O2", stage=1, clip=1.0, save_every=0, callbacks=(), ranks=1):
    """A Trainer; `level` None is the Trainer's own AdamW, without DeepSpeed."""
    config = None
    if level is not None:
        zerofp8.deepspeed.install()  # the line
        config = {**CONFIG, "zero_optimization": {"stage": stage}, "zerofp8": {"opt_level": level}}
    arguments = TrainingArguments(
        folder, max_steps=steps, gradient_accumulation_steps=ACCUMULATE, max_grad_norm=clip,
        per_device_train_batch_size=BATCH // ranks, learning_rate=LR, weight_decay=DECAY,
        lr_scheduler_type="cosine", warmup_steps=2, deepspeed=config, optim="adamw_torch",
        use_cpu=True, logging_steps=1, report_to=[], disable_tqdm=True, dataloader_pin_memory=False,
        save_strategy="steps" if save_every else "no", save_steps=save_every or 1, seed=1)
    return Trainer(llama(), arguments, train_dataset=Bytes(), callbacks=list(callbacks))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="build/clients/hf_deepspeed")
    parser.add_argument("--resume", action="store_true", help="from the folder's last checkpoint")
    given = parser.parse_args()
    torch.set_num_threads(1)
    info = zerofp8.init_distributed()
    trainer = trainer_of(given.folder, save_every=6, ranks=info.size)
    trainer.train(resume_from_checkpoint=given.resume or None)
    if trainer.is_world_process_zero():
        print("losses", losses_of(trainer))
