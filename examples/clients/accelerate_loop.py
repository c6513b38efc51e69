"""A loop of accelerate with zerofp8 as its optimizer: accumulate, clip, save and load.

    python accelerate_loop.py                                    # one process
    torchrun --standalone --nproc-per-node 2 accelerate_loop.py  # two; DDP may stay around the model
"""

import argparse

import torch
import zerofp8
from accelerate import Accelerator, DataLoaderConfiguration, PartialState
from accelerate.utils import DeepSpeedPlugin
from small import ACCUMULATE, BATCH, Bytes, adamw, llama


def plugin_of(level, stage, clip):
    """DeepSpeed's plugin, whose engine trains with zerofp8."""
    import zerofp8.deepspeed
    zerofp8.deepspeed.install()
    plugin = DeepSpeedPlugin(zero_stage=stage, gradient_clipping=clip,
                             gradient_accumulation_steps=ACCUMULATE)
    plugin.deepspeed_config["zerofp8"] = {"opt_level": level}
    return plugin


class Run:
    """What a loop needs; `level` None is torch's own AdamW, `deepspeed` accelerate's plugin."""

    def __init__(self, level="O2", stage=1, clip=1.0, steps=8, deepspeed=False):
        options = {"cpu": True}
        if deepspeed:
            PartialState(cpu=True, backend="gloo")
            options = {"deepspeed_plugin": plugin_of(level, stage, clip)}
        self.accelerator = Accelerator(  # split_batches: the schedule goes on once per step
            gradient_accumulation_steps=ACCUMULATE,
            dataloader_config=DataLoaderConfiguration(split_batches=True), **options)
        model = llama().to(self.accelerator.device)
        optimizer = adamw(model)
        if level is not None and not deepspeed:
            config = {"gradient_accumulation_steps": ACCUMULATE,
                      "zero_optimization": {"stage": stage}}
            # accelerate divides the loss by the micro-batches.
            model, optimizer = zerofp8.initialize(model, optimizer, config, opt_level=level,
                                                  loss_is_divided=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        loader = torch.utils.data.DataLoader(Bytes(), BATCH)
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            model, optimizer, loader, schedule)
        self.clip, self.steps, self.losses = clip, steps, []

    def train(self, first=0, after_step=lambda number: None):
        """From step `first` on; `after_step` is called with the number of steps that are done."""
        accelerator, total = self.accelerator, 0.0
        batches = accelerator.skip_first_batches(self.loader, first * ACCUMULATE)
        for index, batch in enumerate(batches, first * ACCUMULATE):
            if index == self.steps * ACCUMULATE:
                break
            with accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            total += accelerator.reduce(loss.detach(), "mean").item() / ACCUMULATE
            if accelerator.sync_gradients:
                self.losses.append(total)
                total = 0.0
                after_step((index + 1) // ACCUMULATE)
        return self.losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="build/clients/accelerate")
    parser.add_argument("--resume", action="store_true", help="from what was saved after step 4")
    parser.add_argument("--deepspeed", action="store_true", help="on CPUs: DS_ACCELERATOR=cpu")
    given = parser.parse_args()
    torch.set_num_threads(1)
    run = Run(deepspeed=given.deepspeed)
    if given.resume:
        run.accelerator.load_state(given.folder)

    def save(number):
        if number == 4 and not given.resume:
            run.accelerator.save_state(given.folder)

    losses = run.train(4 if given.resume else 0, save)
    run.accelerator.print("losses", losses)
