"""A byte-level GPT as a list of layers, to be cut into pipeline stages, and the text it reads."""

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 256


class Embedding(nn.Module):
    """Also the head's weight: tied over the first and the last stage."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, width) * 0.02)

    def forward(self, tokens):
        return F.embedding(tokens, self.weight)


class Position(nn.Module):
    def __init__(self, width, length):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(length, width) * 0.02)

    def forward(self, x):
        return x + self.weight[:x.shape[1]]


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2)
                   for t in self.qkv(self.norm1(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def logits(embedding, x):
    """The head: an Embedding, used the other way round."""
    return x @ embedding.weight.t()


def loss_fn(logits, targets):
    """Nats per byte."""
    return F.cross_entropy(logits.float().reshape(-1, VOCAB), targets.reshape(-1))


class Text:
    """The Python standard library's sources as bytes; the same on all ranks.

    Parameters
    ----------
    length : int
        Bytes of a sample.
    files : int
        How many sources, largest first.
    """

    def __init__(self, length, files=120):
        sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"),
                         key=lambda p: (-p.stat().st_size, p.name))[:files]
        data = b"".join(p.read_bytes() for p in sources)
        self.bytes = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
        self.length = length

    def batch(self, index, data_rank, size):
        """Inputs and targets, ``(size, length)`` each, of one micro-batch of one data rank.

        A function of its arguments, so that a resumed run reads on where the first one stopped.
        """
        generator = torch.Generator().manual_seed(index * 65536 + data_rank)
        starts = torch.randint(len(self.bytes) - self.length - 1, (size,), generator=generator)
        rows = torch.stack([self.bytes[s:s + self.length + 1] for s in starts])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def batches(self, first, data_rank, size):
        """Endless micro-batches of one data rank, from number `first` on."""
        index = first
        while True:
            yield self.batch(index, data_rank, size)
            index += 1
