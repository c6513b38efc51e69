"""Layers that are cut over tensor ranks, marked as Megatron marks them; a small model of them."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, INNER, LENGTH, BLOCKS = 24, 16, 32, 6, 2


class _Copy(torch.autograd.Function):
    """Into a cut layer: the parts of its input's gradient are added up."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return summed(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    """Out of a cut layer: the parts of its output are added up."""

    @staticmethod
    def forward(ctx, x, group):
        return summed(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _Gather(torch.autograd.Function):
    """Slices side by side; what follows is computed alike on all ranks."""

    @staticmethod
    def forward(ctx, x, group, dim=-1):
        ctx.group, ctx.dim = group, dim
        return gathered(x, dim, group)

    @staticmethod
    def backward(ctx, grad):
        return slice_of(grad, ctx.dim, ctx.group), None, None


class _Split(torch.autograd.Function):
    """This rank's part of the sequence."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return slice_of(x, 1, group)

    @staticmethod
    def backward(ctx, grad):
        return gathered(grad, 1, ctx.group), None


class _IntoCutLayer(torch.autograd.Function):
    """The whole sequence; its gradient's parts are added up and each rank keeps its piece."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gathered(x, 1, group)

    @staticmethod
    def backward(ctx, grad):
        return slice_of(summed(grad, ctx.group), 1, ctx.group), None


class _OutOfCutLayer(torch.autograd.Function):
    """The parts of the output are added up and each rank keeps its piece of the sequence."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return slice_of(summed(x, group), 1, group)

    @staticmethod
    def backward(ctx, grad):
        return gathered(grad, 1, ctx.group), None


def summed(x, group):
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x


def gathered(x, dim, group):
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format)
             for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)


def _through(function, x, group):
    return x if group is None else function.apply(x, group)


def slice_of(tensor, dim, group):
    """This rank's slice; all of it without a group."""
    if group is None or dim is None:
        return tensor
    return tensor.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()


def _cut(value, dim, group):
    parameter = nn.Parameter(slice_of(value, dim, group).clone())
    parameter.tensor_model_parallel = group is not None and dim is not None
    parameter.partition_dim = dim
    return parameter


class ColumnParallelLinear(nn.Module):
    """Each rank computes some of the outputs."""

    def __init__(self, weight, bias, group):
        super().__init__()
        self.group = group
        self.weight, self.bias = _cut(weight, 0, group), _cut(bias, 0, group)

    def forward(self, x):
        return F.linear(_through(_Copy, x, self.group), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """Each rank has some of the inputs; the bias is replicated and added once."""

    def __init__(self, weight, bias, group):
        super().__init__()
        self.group = group
        self.weight, self.bias = _cut(weight, 1, group), _cut(bias, None, group)

    def forward(self, x):
        return _through(_Reduce, F.linear(x, self.weight), self.group) + self.bias


class VocabParallelEmbedding(nn.Module):
    """Each rank has some of the words; ``logits`` uses the same weight."""

    def __init__(self, weight, group):
        super().__init__()
        self.group = group
        self.weight = _cut(weight, 0, group)

    def forward(self, tokens):
        if self.group is None:
            return F.embedding(tokens, self.weight)
        begin = dist.get_rank(self.group) * len(self.weight)
        mine = (tokens >= begin) & (tokens < begin + len(self.weight))
        x = F.embedding((tokens - begin).where(mine, 0), self.weight)
        return _Reduce.apply(x * mine.unsqueeze(-1), self.group)

    def logits(self, x):
        x = F.linear(_through(_Copy, x, self.group), self.weight)
        return _through(_Gather, x, self.group)


def initial_weights(seed=0):
    """By name, in FP32, with values that bf16 holds exactly."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return (torch.randn(shape, generator=generator) * 0.3).bfloat16().float()

    weights = {"emb.weight": normal(VOCABULARY, WIDTH)}
    for i in range(BLOCKS):
        weights.update({
            f"{i}.norm.weight": 1 + normal(WIDTH), f"{i}.norm.bias": normal(WIDTH),
            f"{i}.up.weight": normal(INNER, WIDTH), f"{i}.up.bias": normal(INNER),
            f"{i}.down.weight": normal(WIDTH, INNER), f"{i}.down.bias": normal(WIDTH)})
    return weights


class Embed(nn.Module):
    def __init__(self, weights, group=None):
        super().__init__()
        self.emb = VocabParallelEmbedding(weights["emb.weight"], group)

    def forward(self, tokens):
        return self.emb(tokens)


class Head(nn.Module):
    def __init__(self, weights, group=None, embed=None):
        super().__init__()
        self.emb = VocabParallelEmbedding(weights["emb.weight"], group) if embed is None \
            else embed.emb

    def forward(self, x):
        return self.emb.logits(x)


class Block(nn.Module):
    def __init__(self, weights, i, group=None):
        super().__init__()
        w = {k.removeprefix(f"{i}."): v for k, v in weights.items()}
        self.norm = nn.LayerNorm(WIDTH)
        self.norm.load_state_dict({"weight": w["norm.weight"], "bias": w["norm.bias"]})
        self.up = ColumnParallelLinear(w["up.weight"], w["up.bias"], group)
        self.down = RowParallelLinear(w["down.weight"], w["down.bias"], group)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class SequenceParallelModel(nn.Module):
    """In one stage; between the cut layers each tensor rank has a part of the sequence."""

    def __init__(self, weights, group):
        super().__init__()
        self.group = group
        self.embed = Embed(weights, group)
        self.blocks = nn.ModuleList([Block(weights, i, group) for i in range(BLOCKS)])
        for b in self.blocks:
            for p in (b.norm.weight, b.norm.bias, b.down.bias):
                p.sequence_parallel = True

    def forward(self, tokens):
        x = _Split.apply(self.embed(tokens), self.group)
        for b in self.blocks:
            h = _IntoCutLayer.apply(b.norm(x), self.group)
            h = F.linear(F.gelu(F.linear(h, b.up.weight, b.up.bias)), b.down.weight)
            x = x + _OutOfCutLayer.apply(h, self.group) + b.down.bias
        return self.embed.emb.logits(_Gather.apply(x, self.group, 1))

    def named(self):
        """By the names of `initial_weights`."""
        return {"emb.weight": self.embed.emb.weight, **{
            f"{i}.{n}": p for i, b in enumerate(self.blocks) for n, p in b.named_parameters()}}


def stage_of(stage, stages, group, dtype, seed=0):
    """One pipeline stage's layers; its own copy of the embedding on the last one.

    Returns
    -------
    nn.Sequential
    dict of str to nn.Parameter
        By the names of `initial_weights`.
    """
    weights = initial_weights(seed)
    per_stage = BLOCKS // stages
    blocks = {i: Block(weights, i, group)
              for i in range(stage * per_stage, (stage + 1) * per_stage)}
    embed = Embed(weights, group) if stage == 0 else None
    head = Head(weights, group, embed) if stage == stages - 1 else None
    module = nn.Sequential(*(m for m in (embed, *blocks.values(), head) if m is not None)).to(dtype)
    named = {f"{i}.{n}": p for i, b in blocks.items() for n, p in b.named_parameters()}
    for end in (embed, head):
        if end is not None:
            named["emb.weight"] = end.emb.weight
    return module, named


def loss_of(logits, targets):
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def micro_batch(step, part, size=2):
    """Tokens and targets."""
    generator = torch.Generator().manual_seed(100 * step + part)
    tokens = torch.randint(VOCABULARY, (size, LENGTH), generator=generator)
    return tokens, (5 * tokens + 3) % VOCABULARY


class Reference:
    """The model in one piece, without these layers, in float64, trained by AdamW in float64."""

    def __init__(self, parts, lr, betas=(0.9, 0.999), eps=1e-8):
        self.weights = {n: w.double() for n, w in initial_weights().items()}
        self.parts, self.lr, self.betas, self.eps = parts, lr, betas, eps
        self.m = {n: torch.zeros_like(w) for n, w in self.weights.items()}
        self.v = {n: torch.zeros_like(w) for n, w in self.weights.items()}
        self.t = 0

    @staticmethod
    def logits(w, tokens):
        x = F.embedding(tokens, w["emb.weight"])
        for i in range(BLOCKS):
            h = F.layer_norm(x, (WIDTH,), w[f"{i}.norm.weight"], w[f"{i}.norm.bias"])
            h = F.gelu(h @ w[f"{i}.up.weight"].t() + w[f"{i}.up.bias"])
            x = x + h @ w[f"{i}.down.weight"].t() + w[f"{i}.down.bias"]
        return x @ w["emb.weight"].t()

    def gradient(self, step):
        """Mean loss over all micro-batches, and its gradient by name."""
        w = {n: v.clone().requires_grad_() for n, v in self.weights.items()}
        batches = [micro_batch(step, part) for part in range(self.parts)]
        loss = sum(loss_of(self.logits(w, x), y) for x, y in batches) / self.parts
        loss.backward()
        return loss.item(), {n: v.grad for n, v in w.items()}

    def update(self, gradient, clip=0.0):
        self.t += 1
        b1, b2 = self.betas
        factor = min(1.0, clip / (norm_of(gradient) + 1e-6)) if clip else 1.0
        for n, g in gradient.items():
            g = g * factor
            self.m[n] = b1 * self.m[n] + (1 - b1) * g
            self.v[n] = b2 * self.v[n] + (1 - b2) * g * g
            root = (self.v[n] / (1 - b2**self.t)).sqrt() + self.eps
            self.weights[n] = self.weights[n] - self.lr * self.m[n] / (1 - b1**self.t) / root


# Largest distances from the reference: a reduced gradient (relative L2), the norm, a loss.
FP32_ERRORS = {"gradient": 2e-6, "norm": 1e-6, "loss": 1e-5}
# Of a bf16 model: in one piece, trained by torch, it was at .0085 (gradient) and .0114 (loss).
BF16_ERRORS = {"gradient": 2e-2, "norm": 1e-2, "loss": 2e-2}


def fp8_error(micro_batches):
    """What FP8 adds to a gradient's relative error, at most.

    Each sum in the accumulator and the message are rounded by .0265; the k-th of A sums is taken
    for k/A of the last one.
    """
    return 0.0265 * ((micro_batches + 1) / 2 + 1)


def norm_of(gradient):
    return float(sum(g.double().square().sum() for g in gradient.values()).sqrt())


class Ranks:
    """Ranks laid out as (stage, data rank, tensor rank), and this one's groups.

    `swapped`: as (stage, tensor rank, data rank).
    """

    def __init__(self, rank, stages, data, tensor, swapped=False):
        grid = torch.arange(stages * data * tensor).reshape(stages, data, tensor)
        if swapped:
            grid = grid.reshape(stages, tensor, data).transpose(1, 2)
        self.stage, self.data_rank, self.tensor_rank = ((grid == rank).nonzero()[0]).tolist()
        self.stages, self.data, self.tensor = stages, data, tensor

        def group(table):
            made = [(row, dist.new_group(row)) for row in table.tolist()]
            return next(g for row, g in made if rank in row)

        self.pipeline_group = group(grid.permute(1, 2, 0).reshape(-1, stages))
        self.data_group = group(grid.permute(0, 2, 1).reshape(-1, data))
        self.tensor_group = group(grid.reshape(-1, tensor))

    def arguments(self):
        """Of ``zerofp8.initialize``."""
        return {"data_parallel_group": self.data_group,
                "pipeline_parallel_group": self.pipeline_group if self.stages > 1 else None,
                "tensor_parallel_group": self.tensor_group if self.tensor > 1 else None}
