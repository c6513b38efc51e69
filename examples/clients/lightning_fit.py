"""Lightning's Trainer with zerofp8 as its optimizer.

    python lightning_fit.py                                    # one process
    torchrun --standalone --nproc-per-node 2 lightning_fit.py  # two; strategy "ddp" stays
"""

import argparse
import os

import lightning
import torch
import zerofp8
from small import ACCUMULATE, BATCH, Bytes, adamw, llama


class Module(lightning.LightningModule):
    """`level` None is torch's own AdamW."""

    def __init__(self, level="O2", stage=1, steps=6):
        super().__init__()
        self.model, self.level, self.stage, self.steps = llama(), level, stage, steps
        self.losses = []  # of each micro-batch

    def training_step(self, batch, index):
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = adamw(self.model)
        if self.level is not None:
            config = {"gradient_accumulation_steps": ACCUMULATE,
                      "zero_optimization": {"stage": self.stage}}
            # Lightning divides the loss by the micro-batches, wraps in DDP before, and clips.
            _, optimizer = zerofp8.initialize(self.model, optimizer, config, opt_level=self.level,
                                              loss_is_divided=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        return {"optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(module, ranks, folder=None, save_every=0, resume=None, callbacks=(), clip=1.0):
    """Train as many steps as the module says; the Trainer."""
    callbacks = list(callbacks)
    if save_every:
        callbacks.insert(0, lightning.pytorch.callbacks.ModelCheckpoint(
            folder, every_n_train_steps=save_every, save_top_k=-1, filename="{step}"))
    trainer = lightning.Trainer(
        max_steps=module.steps, accelerator="cpu", devices=ranks,
        strategy="ddp" if ranks > 1 else "auto", gradient_clip_val=clip,
        accumulate_grad_batches=ACCUMULATE, callbacks=callbacks, logger=False,
        enable_checkpointing=bool(save_every), enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False)
    # 3 steps an epoch: Lightning begins an epoch anew if it is resumed within one.
    data = Bytes(48)
    sampler = torch.utils.data.DistributedSampler(data, ranks, int(os.environ.get("RANK", 0)),
                                                  shuffle=False)
    loader = torch.utils.data.DataLoader(data, BATCH // ranks, sampler=sampler)
    trainer.fit(module, loader, ckpt_path=resume)
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="build/clients/lightning")
    parser.add_argument("--resume", help="a checkpoint's file")
    given = parser.parse_args()
    torch.set_num_threads(1)
    info = zerofp8.init_distributed()
    module = Module()
    fit(module, info.size, given.folder, save_every=3, resume=given.resume)
    print("rank", info.rank, "losses", module.losses)
