"""Checkpoints of models that are cut over tensor ranks, and what is refused at the start."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tensor_parallel import Ranks
from test_tensor_parallel import CONFIGS, Trainer
from torch import nn

import zerofp8

NAME = "bf16 O3, no masters"  # every bit of it depends on the random stream


def start(ranks, seed=0):
    dtype, config = CONFIGS[NAME]
    return Trainer(ranks, dtype, config, seed)


def train(trainer, steps):
    for step in steps:
        trainer.step(step)
    return trainer.digests()


def resume(rank, layout, folder):
    """Unbroken and resumed digests, through a folder and through a dict per rank."""
    ranks = Ranks(rank, *layout)
    trainer = start(ranks)
    train(trainer, range(3))
    trainer.optimizer.save(folder)
    saved = trainer.module.state_dict(), trainer.optimizer.state_dict()
    saved = torch.utils._pytree.tree_map(
        lambda t: t.clone() if isinstance(t, torch.Tensor) else t, saved)
    found = [train(trainer, range(3, 6))]
    trainer = start(ranks, seed=5)
    trainer.optimizer.load(folder)
    found.append(train(trainer, range(3, 6)))
    trainer = start(ranks, seed=5)
    trainer.module.load_state_dict(saved[0])
    trainer.optimizer.load_state_dict(saved[1])
    found.append(train(trainer, range(3, 6)))
    # A dict of another slice, whose shapes are the same.
    dicts = [None, None]
    dist.all_gather_object(dicts, saved[1], group=ranks.tensor_group)
    try:
        trainer.optimizer.load_state_dict(dicts[1 - ranks.tensor_rank])
        found.append("no error")
    except zerofp8.CheckpointError as error:
        found.append(str(error))
    return found


@pytest.mark.parametrize("layout", [(1, 2, 2), (2, 1, 2)], ids=str)
def test_case_39_slices_resume_bit_for_bit(layout, tmp_path):
    for unbroken, loaded, from_dicts, foreign in run_ranks(4, resume, layout, str(tmp_path)):
        assert unbroken == loaded == from_dicts
        assert "tensor0-of-2" in foreign and "tensor1-of-2" in foreign


def saved_at(rank, layout, folder):
    trainer = start(Ranks(rank, *layout))
    train(trainer, range(2))
    trainer.optimizer.save(folder)
    return trainer.digests()


def loaded_at(rank, layout, folder):
    trainer = start(Ranks(rank, *layout), seed=5)
    trainer.optimizer.load(folder)
    return trainer.digests()


def test_case_38_slices_load_on_other_numbers_of_data_ranks(tmp_path):
    saved = run_ranks(4, saved_at, (1, 2, 2), str(tmp_path))
    assert run_ranks(2, loaded_at, (1, 1, 2), str(tmp_path)) == saved[:2]
    assert saved[0] != saved[1]
    # Ranks in another order: each takes its slice from where it is.
    swapped = run_ranks(4, loaded_at, (1, 2, 2, True), str(tmp_path))
    assert swapped == [saved[0], saved[0], saved[1], saved[1]]
    # Tensor ranks are another matter.
    for error in run_ranks(2, loaded_at, (1, 2, 1), str(tmp_path), errors=True):
        assert isinstance(error, zerofp8.CheckpointError) and "emb.weight" in str(error)


def two_and_four(rank, folder):
    """A slice of 8 of two tensor ranks, and of four: the shapes fit, the model is another one."""
    def slices(tensor):
        ranks = Ranks(rank, 1, 4 // tensor, tensor)
        model = nn.ParameterDict({"w": torch.full([8], float(ranks.tensor_rank))})
        model.w.tensor_model_parallel = True
        return zerofp8.initialize(model, torch.optim.AdamW(model.parameters()), {}, timeout=60,
                                  **ranks.arguments())[1]

    slices(4).save(folder)
    slices(2).load(folder)


def test_case_38_other_numbers_of_tensor_ranks_are_refused(tmp_path):
    for error in run_ranks(4, two_and_four, str(tmp_path), errors=True):
        assert isinstance(error, zerofp8.CheckpointError) and "tensor0-of-2.w" in str(error)


class Holder(nn.Module):
    def __init__(self, value, cut=False, **marks):
        super().__init__()
        self.w = nn.Parameter(torch.full([8], float(value)))
        self.w.tensor_model_parallel = cut
        for name, mark in marks.items():
            setattr(self.w, name, mark)


def not_marked(rank):
    """Of two stages and two tensor ranks, the second stage's tensor ranks differ."""
    ranks = Ranks(rank, 2, 1, 2)
    model = Holder(rank if ranks.stage == 1 else 0)
    zerofp8.initialize(model, torch.optim.AdamW(model.parameters()), {}, timeout=60,
                       **ranks.arguments())


def test_slices_without_their_mark_are_an_error_on_all_ranks():
    errors = run_ranks(4, not_marked, errors=True)
    assert len({str(e) for e in errors}) == 1
    assert isinstance(errors[0], zerofp8.ConfigError) and "stage1.w" in str(errors[0])
    assert "tensor_model_parallel = True" in str(errors[0])


def differing_names(rank):
    """Of two data ranks and two stages, the second stage's data ranks have other shapes."""
    ranks = Ranks(rank, 2, 2, 1)
    model = nn.Linear(4, 4 + rank // 3)
    zerofp8.initialize(model, torch.optim.AdamW(model.parameters()), {}, timeout=60,
                       **ranks.arguments())


def test_models_that_differ_in_one_stage_are_an_error_on_all_ranks():
    errors = run_ranks(4, differing_names, errors=True, timeout=40)
    assert len({str(e) for e in errors}) == 1
    assert isinstance(errors[0], zerofp8.CommError) and "(5, 4)" in str(errors[0])


def weights_of_tensor_peers(rank):
    """Data rank 0's weights count, so that the other data ranks' may differ before."""
    ranks = Ranks(rank, 1, 2, 2)
    model = Holder(rank if ranks.data_rank == 1 else 7)
    zerofp8.initialize(model, torch.optim.AdamW(model.parameters()), {}, timeout=60,
                       **ranks.arguments())
    return model.w.tolist()


def test_weights_are_compared_as_they_are_sent():
    assert run_ranks(4, weights_of_tensor_peers) == [[7.0] * 8] * 4


def deepspeeds_mark(rank):
    ranks = Ranks(rank, 1, 1, 2)
    model = Holder(rank, model_parallel=True)
    optimizer = zerofp8.initialize(model, torch.optim.AdamW(model.parameters()), {}, timeout=60,
                                   **ranks.arguments())[1]
    (model.w * 2).sum().backward()
    return optimizer.step().grad_norm


def test_deepspeeds_mark_counts():
    assert run_ranks(2, deepspeeds_mark) == [8.0, 8.0]


def marks(rank, tied):
    """Texts of errors: the mark on one tensor rank only, or on a tied parameter."""
    ranks = Ranks(rank, 1, 1, 2)
    model = Holder(0, sequence_parallel=tied or rank == 0)
    if tied:
        zerofp8.tie(model.w, "w")
    zerofp8.initialize(model, torch.optim.AdamW(model.parameters()), {}, timeout=60,
                       **ranks.arguments())


@pytest.mark.parametrize("tied", [False, True])
def test_sequence_parallel_marks_that_cannot_be(tied):
    errors = run_ranks(2, marks, tied, errors=True)
    assert len({str(e) for e in errors}) == 1
    assert isinstance(errors[0], zerofp8.ConfigError) and "sequence_parallel" in str(errors[0])


def equal_slices(rank):
    """Weights and gradients are equal on both tensor ranks; only the random bits may differ."""
    ranks = Ranks(rank, 1, 1, 2)
    model = nn.ParameterDict({n: torch.ones(300, dtype=torch.bfloat16)
                              for n in ("replicated", "cut", "tied")})
    model.cut.tensor_model_parallel = model.tied.tensor_model_parallel = True
    zerofp8.tie(model.tied, "embedding")
    config = {"bf16": {"enabled": True}, "zerofp8": {"master_weights": "none"}}
    optimizer = zerofp8.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), config,
                                   timeout=60, **ranks.arguments())[1]
    for _ in range(3):
        sum(p.float().sum() for p in model.values()).backward()
        optimizer.step()
    return {n: p.tolist() for n, p in model.items()}


def test_slices_are_rounded_with_random_bits_of_their_own():
    first, second = run_ranks(2, equal_slices)
    assert first["replicated"] == second["replicated"] and len(set(first["replicated"])) > 1
    assert first["cut"] != second["cut"] and first["tied"] != second["tied"]
