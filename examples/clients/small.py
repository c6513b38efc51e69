"""What the examples of this folder train: a Llama of 90,000 parameters on this project's README."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SEQUENCE = 32
LR, DECAY = 3e-3, 0.1
ACCUMULATE, BATCH = 2, 8  # micro-batches per step, and samples in one over all ranks


class Bytes(torch.utils.data.Dataset):
    """Pieces of text at fixed places, byte by byte."""

    def __init__(self, pieces=96):
        text = (Path(__file__).resolve().parents[2] / "README.md").read_bytes()
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.pieces = pieces

    def __len__(self):
        return self.pieces

    def __getitem__(self, index):
        start = index * 97 % (len(self.text) - SEQUENCE)
        piece = self.text[start:start + SEQUENCE]
        return {"input_ids": piece, "labels": piece.clone()}


def llama(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=SEQUENCE,
        use_cache=False)).to(dtype)


def adamw(model):
    """The template: two groups, as trainers make them."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": DECAY},
                              {"params": vectors, "weight_decay": 0.0}], lr=LR)


def batches_of(data, step, micro, rank, ranks):
    """This rank's samples of a micro-batch."""
    first = (step * ACCUMULATE + micro) * BATCH + rank * (BATCH // ranks)
    items = [data[(first + i) % len(data)] for i in range(BATCH // ranks)]
    return {key: torch.stack([item[key] for item in items]) for key in items[0]}


def losses_of(trainer):
    """Of Hugging Face's Trainer."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
