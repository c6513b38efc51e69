"""An independent reference: one process, gradients accumulated in float64, AdamW in float64."""

import copy

import torch


def seeded_model(dtype=torch.float32, width=24, seed=0):
    """A small model whose tensors are neither multiples of a block nor all of one block."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(12, width), torch.nn.Tanh(),
                                torch.nn.Linear(width, width), torch.nn.Tanh(),
                                torch.nn.Linear(width, 5))
    return model.to(dtype)


def batch(step, rank, micro, dtype=torch.float32, size=16):
    """Inputs and targets of one micro-batch."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    x = torch.randn(size, 12, generator=generator)
    y = torch.stack([x.sum(1), x[:, 0] * x[:, 1], x[:, 2].sin(), x[:, 3] - x[:, 4], x[:, 5]], 1)
    return x.to(dtype), y.to(dtype)


def loss_of(model, step, rank, micro):
    dtype = next(model.parameters()).dtype
    x, y = batch(step, rank, micro, dtype)
    return (model(x) - y).float().square().mean()


class Reference:
    """Trains a copy of a model on all ranks' batches.

    Gradients are those of the model's own dtype; sums, state and masters are float64.
    """

    def __init__(self, model, ranks, micro_batches, lr, weight_decay=0.0, scale=1.0,
                 betas=(0.9, 0.999), eps=1e-8):
        self.model = copy.deepcopy(model)
        self.ranks, self.micro_batches, self.scale = ranks, micro_batches, scale
        self.lr, self.weight_decay, self.betas, self.eps = lr, weight_decay, betas, eps
        self.master = [p.detach().double() for p in self.model.parameters()]
        self.m = [torch.zeros_like(w) for w in self.master]
        self.v = [torch.zeros_like(w) for w in self.master]
        self.t = 0

    def gradients(self, step):
        """Mean loss, and per rank and micro-batch the gradients as float64."""
        losses, parts = [], {}
        for rank in range(self.ranks):
            for micro in range(self.micro_batches):
                self.model.zero_grad()
                loss = loss_of(self.model, step, rank, micro)
                (loss * self.scale).backward()
                losses.append(loss.item())
                parts[rank, micro] = [p.grad.double() / self.scale for p in self.model.parameters()]
        return sum(losses) / len(losses), parts

    def mean(self, parts):
        return [sum(g) / len(parts) for g in zip(*parts.values())]

    def update(self, gradients):
        self.t += 1
        b1, b2 = self.betas
        for i, (p, g) in enumerate(zip(self.model.parameters(), gradients)):
            self.m[i] = b1 * self.m[i] + (1 - b1) * g
            self.v[i] = b2 * self.v[i] + (1 - b2) * g * g
            mhat, vhat = self.m[i] / (1 - b1**self.t), self.v[i] / (1 - b2**self.t)
            self.master[i] = self.master[i] * (1 - self.lr * self.weight_decay)
            self.master[i] = self.master[i] - self.lr * mhat / (vhat.sqrt() + self.eps)
            p.data.copy_(self.master[i])


def relative_l2(found, expected):
    """|found - expected| / |expected| over lists of tensors."""
    difference = sum((f.double() - e).square().sum() for f, e in zip(found, expected))
    return float((difference / sum(e.square().sum() for e in expected)).sqrt())
