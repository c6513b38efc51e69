"""A tiny GPT with a tied embedding, as one module and as DeepSpeed's pipeline, and its reference.

All layouts train on the same PARTS micro-batches per step, so that one reference serves them all.
"""

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, WIDTH, LENGTH, BLOCKS = 64, 32, 16, 3
MICRO_SIZE, PARTS = 2, 8  # samples in a micro-batch; micro-batches in a step, over all data ranks
LR, BETAS, EPS, DECAY = 3e-3, (0.9, 0.95), 1e-5, 0.1
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _seeded(module, seed):
    """Weights that all dtypes hold exactly."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if p.dim() > 1:
                p.copy_((torch.randn(p.shape, generator=generator) * 0.08).bfloat16())
            elif name.endswith("bias"):
                p.zero_()
    return module


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCAB, WIDTH))
        _seeded(self, 1)

    def forward(self, tokens):
        return F.embedding(tokens, self.weight)


class Block(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        _seeded(self, seed)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        scores = (q @ k.transpose(-1, -2)) / WIDTH**0.5
        mask = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).tril()
        x = x + self.out(scores.masked_fill(~mask, -1e4).softmax(-1) @ v)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def head(embedding, x):
    return x @ embedding.weight.t()


def loss_fn(logits, targets):
    return F.cross_entropy(logits.float().view(-1, VOCAB), targets.reshape(-1))


class GPT(nn.Module):
    """In one piece. With ``tied=False`` the head has a copy, as a pipeline's last stage does."""

    def __init__(self, tied=True):
        super().__init__()
        self.emb = Embedding()
        self.copy = None if tied else Embedding()
        for i in range(BLOCKS):
            self.add_module(str(1 + i), Block(10 + i))
        self.add_module(str(1 + BLOCKS), nn.LayerNorm(WIDTH))

    def forward(self, tokens, targets=None):
        x = self.emb(tokens)
        for i in range(BLOCKS + 1):
            x = getattr(self, str(1 + i))(x)
        logits = head(self.copy or self.emb, x)
        return logits if targets is None else loss_fn(logits, targets)


def pipeline(stages, **options):
    """The same model as a PipelineModule."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    layers = [TiedLayerSpec("emb", Embedding), *(LayerSpec(Block, 10 + i) for i in range(BLOCKS)),
              LayerSpec(nn.LayerNorm, WIDTH), TiedLayerSpec("emb", Embedding, forward_fn=head)]
    return PipelineModule(layers=layers, num_stages=stages, loss_fn=loss_fn,
                          partition_method="uniform", **options)


def name_of(name):
    """The name in GPT of a parameter of either layout."""
    return name.replace("tied_modules.", "").replace("copy.", "emb.")


def micro_batch(step, part):
    """Tokens and targets: a chain that can be learned, begun anywhere."""
    generator = torch.Generator().manual_seed(1000 * (step % 4) + part)
    chain = [torch.randint(0, VOCAB, (MICRO_SIZE, 1), generator=generator)]
    for _ in range(LENGTH):
        chain.append((chain[-1] * 5 + 3) % VOCAB)
    chain = torch.cat(chain, 1)
    return chain[:, :-1].contiguous(), chain[:, 1:].contiguous()


class Reference:
    """One process: gradients of the model's own dtype, everything else in float64.

    Parameters
    ----------
    dtype : {"fp32", "bf16", "fp16"}
    tied : bool
        Whether autograd adds up the gradients of the embedding and the head (in the model's dtype).
    scale : float
        Loss scale.
    rule : {"adamw", "sgd"}
    """

    def __init__(self, dtype, tied, scale=1.0, rule="adamw", clip=0.0):
        self.model = GPT(tied).to(DTYPES[dtype])
        self.scale, self.rule, self.clip = scale, rule, clip
        self.master = {name_of(n): p.detach().double() for n, p in self.model.named_parameters()}
        self.m = {n: torch.zeros_like(w) for n, w in self.master.items()}
        self.v = {n: torch.zeros_like(w) for n, w in self.master.items()}
        self.t = 0

    def gradients(self, step, accumulation):
        """Mean loss, and each part's gradients by name, unscaled, in float64."""
        losses, parts = [], []
        for part in range(PARTS):
            self.model.zero_grad()
            loss = self.model(*micro_batch(step, part))
            (loss / accumulation * self.scale).backward()
            losses.append(loss.item())
            found = {}
            for name, p in self.model.named_parameters():
                grad = p.grad.double() * (accumulation / self.scale)
                found[name_of(name)] = found.get(name_of(name), 0) + grad
            parts.append(found)
        return sum(losses) / PARTS, parts

    @staticmethod
    def mean(parts):
        return {n: sum(p[n] for p in parts) / len(parts) for n in parts[0]}

    def update(self, gradients, lr=LR):
        """One step; the norm before clipping."""
        self.t += 1
        norm = float(sum(g.square().sum() for g in gradients.values()).sqrt())
        factor = self.clip / (norm + 1e-6) if self.clip and norm > self.clip else 1.0
        for name, g in gradients.items():
            g = g * factor
            w, m, v = self.master[name], self.m[name], self.v[name]
            if self.rule == "sgd":
                w -= lr * g
                continue
            m.mul_(BETAS[0]).add_(g, alpha=1 - BETAS[0])
            v.mul_(BETAS[1]).add_(g * g, alpha=1 - BETAS[1])
            root = (v / (1 - BETAS[1]**self.t)).sqrt() + EPS
            w.mul_(1 - lr * DECAY).sub_(lr * (m / (1 - BETAS[0]**self.t)) / root)
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(self.master[name_of(name)])
        return norm


def adamw_section(lr=LR):
    """The ``optimizer`` section that means the same."""
    return {"type": "AdamW", "params": {"lr": lr, "betas": list(BETAS), "eps": EPS,
                                        "weight_decay": DECAY}}


def plain_step(engine, parts):
    """One step of DeepSpeed's plain engine; the sum of its micro-batches' losses, of shape (1,)."""
    total = torch.zeros(1)
    for tokens, targets in parts:
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        total += loss.detach()
    return total


class Trainer:
    """A DeepSpeed engine for one layout, and its share of the micro-batches.

    Parameters
    ----------
    stages : int
        1: the plain engine with GPT; more: the pipeline's.
    config : dict
        Without the batch keys.
    """

    def __init__(self, stages, config, world, **arguments):
        import deepspeed

        self.data_ranks = world // stages
        self.accumulation = self.loss_divisor = PARTS // self.data_ranks
        config = {"train_micro_batch_size_per_gpu": MICRO_SIZE,
                  "gradient_accumulation_steps": self.accumulation, **config}
        self.model = arguments.pop("model", None)
        if self.model is None:
            self.model = GPT() if stages == 1 else pipeline(stages)
        self.engine, self.optimizer, _, self.scheduler = deepspeed.initialize(
            model=self.model, model_parameters=list(self.model.parameters()), config=config,
            **arguments)
        self.stages = stages
        rank = torch.distributed.get_rank()
        self.data_rank = rank if stages == 1 else self.engine.grid.get_data_parallel_rank()

    def step(self, step):
        """One step; the mean loss of all ranks' data."""
        mine = [micro_batch(step, self.data_rank * self.accumulation + i)
                for i in range(self.accumulation)]
        if self.stages > 1:
            return float(self.engine.train_batch(iter(mine)))
        total = plain_step(self.engine, mine) / self.accumulation
        torch.distributed.all_reduce(total)
        return float(total) / self.data_ranks

    def parameters(self):
        """This rank's parameters by their names in GPT."""
        return {name_of(n): p for n, p in self.engine.module.named_parameters()}

    @property
    def stepper(self):
        """What ``step`` is called of."""
        return self.engine.optimizer

    @property
    def zerofp8(self):
        return self.engine.optimizer.optimizer

    def norm(self):
        return float(self.engine.get_global_grad_norm())

    def close(self):
        self.engine.destroy()
