"""The GPT of deepspeed_gpt.py under torch.distributed.pipelining, as a trainer of the matrix."""

import torch
import torch.distributed as dist
from deepspeed_gpt import (BETAS, BLOCKS, DECAY, DTYPES, EPS, GPT, LR, MICRO_SIZE, PARTS, head,
                           loss_fn, micro_batch, name_of)
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import zerofp8


class Stage(nn.Module):
    """Some of the GPT's layers, under their names there; the last stage has a copy of the head."""

    def __init__(self, names):
        super().__init__()
        whole = GPT(tied=False)
        self.names = names
        for name in names:
            self.add_module(name, getattr(whole, name))
            if name in ("emb", "copy"):
                zerofp8.tie(getattr(self, name).weight, "emb")

    def forward(self, x):
        for name in self.names:
            layer = getattr(self, name)
            x = head(layer, x) if name == "copy" else layer(x)
        return x


class TorchTrainer:
    """One rank of a pipeline of `stages` x data ranks, scheduled 1F1B.

    Parameters
    ----------
    config : dict
        As for DeepSpeed's trainer: the ``optimizer`` section, without the batch keys.
    """

    def __init__(self, stages, config, world):
        rank, self.stages, self.data_ranks = dist.get_rank(), stages, world // stages
        self.stage, self.data_rank = divmod(rank, self.data_ranks)
        self.accumulation = PARTS // self.data_ranks
        self.loss_divisor = 1  # fp16 rounds small gradients otherwise where the loss is divided
        grid = torch.arange(world).reshape(stages, self.data_ranks)
        columns = [dist.new_group(column.tolist()) for column in grid.t()]
        rows = [dist.new_group(row.tolist()) for row in grid]
        layers = ["emb", *(str(1 + i) for i in range(BLOCKS + 1)), "copy"]
        per_stage = -(-len(layers) // stages)
        mine = layers[self.stage * per_stage:(self.stage + 1) * per_stage]
        dtype = next((DTYPES[d] for d in ("bf16", "fp16") if d in config), torch.float32)
        self.model = Stage(mine).to(dtype)
        template = torch.optim.AdamW(self.model.parameters(), lr=LR, betas=BETAS, eps=EPS,
                                     weight_decay=DECAY)
        config = {"gradient_accumulation_steps": self.accumulation,
                  **{k: v for k, v in config.items() if k != "optimizer"}}
        self.model, self.zerofp8 = zerofp8.initialize(
            self.model, template, config, data_parallel_group=rows[self.stage],
            pipeline_parallel_group=columns[self.data_rank], timeout=50)
        self.stepper = self.zerofp8
        piece = PipelineStage(self.model, self.stage, stages, torch.device("cpu"),
                              group=columns[self.data_rank])
        self.schedule = Schedule1F1B(piece, self.accumulation, loss_fn=self._scaled_loss)

    def _scaled_loss(self, logits, targets):
        return self.zerofp8.scale(loss_fn(logits, targets))

    def step(self, step):
        """One step; the mean loss of all ranks' data."""
        parts = [micro_batch(step, self.data_rank * self.accumulation + i)
                 for i in range(self.accumulation)]
        tokens, targets = (torch.cat(t) for t in zip(*parts))
        assert tokens.shape[0] == MICRO_SIZE * self.accumulation
        losses, scale = [], self.zerofp8.loss_scale
        inputs = [tokens] if self.stage == 0 else []
        last = {"target": targets, "losses": losses} if self.stage == self.stages - 1 else {}
        self.schedule.step(*inputs, **last)
        self.stepper.step()
        total = torch.tensor([sum(loss.item() for loss in losses) / self.accumulation / scale])
        dist.all_reduce(total)
        return float(total) / self.data_ranks

    def parameters(self):
        """This rank's parameters by their names in GPT."""
        return {name_of(n): p for n, p in self.model.named_parameters()}

    def norm(self):
        return self.zerofp8.last_report.grad_norm

    def close(self):
        self.zerofp8.close()
