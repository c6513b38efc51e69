"""Hugging Face's Trainer with zerofp8 as its optimizer.

    python hf_trainer.py                                    # one process
    torchrun --standalone --nproc-per-node 2 hf_trainer.py  # two; DDP may stay around the model
"""

import argparse

import torch
import zerofp8
from small import ACCUMULATE, BATCH, Bytes, adamw, llama, losses_of
from transformers import Trainer, TrainingArguments, get_cosine_schedule_with_warmup


def trainer_of(folder, steps=12, level="O2", stage=1, clip=1.0, save_every=0, callbacks=()):
    """A Trainer; `level` None is torch's own AdamW."""
    arguments = TrainingArguments(  # first: it connects the ranks
        folder, max_steps=steps, gradient_accumulation_steps=ACCUMULATE, max_grad_norm=clip,
        use_cpu=True, logging_steps=1, report_to=[], disable_tqdm=True, dataloader_pin_memory=False,
        save_strategy="steps" if save_every else "no", save_steps=save_every or 1, seed=1)
    arguments.per_device_train_batch_size = BATCH // arguments.world_size
    model = llama().to(arguments.device)  # before initialize: where the Trainer would move it
    optimizer = adamw(model)
    if level is not None:
        config = {"gradient_accumulation_steps": ACCUMULATE, "zero_optimization": {"stage": stage}}
        # The Trainer divides its loss by the micro-batches, and clips.
        model, optimizer = zerofp8.initialize(model, optimizer, config, opt_level=level,
                                              loss_is_divided=True)
    schedule = get_cosine_schedule_with_warmup(optimizer, 2, steps)
    return Trainer(model, arguments, train_dataset=Bytes(), optimizers=(optimizer, schedule),
                   callbacks=list(callbacks))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="build/clients/hf_trainer")
    parser.add_argument("--resume", action="store_true", help="from the folder's last checkpoint")
    given = parser.parse_args()
    torch.set_num_threads(1)
    trainer = trainer_of(given.folder, save_every=6)
    trainer.train(resume_from_checkpoint=given.resume or None)
    if trainer.is_world_process_zero():
        print("losses", losses_of(trainer))
