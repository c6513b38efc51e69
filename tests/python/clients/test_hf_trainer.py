"""Hugging Face's Trainer: losses beside its own AdamW's; saved by it, killed, resumed."""

import os

import pytest

pytest.importorskip("zerofp8.edits", reason="clipping by the trainer")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from client_runs import FULL, die, killed_client, run_client  # noqa: E402
from hf_trainer import losses_of, trainer_of  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

STEPS, SAVED, KILLED = 8, 4, 6


class Killer(TrainerCallback):
    def on_step_begin(self, arguments, state, control, **_):
        if state.global_step == KILLED:
            die()


def losses(rank, folder, options=None, resume=None, killed=False):
    options = {"steps": STEPS, **(options or {})}
    trainer = trainer_of(folder, callbacks=[Killer()] if killed else [], **options)
    trainer.train(resume_from_checkpoint=resume)
    return losses_of(trainer)


@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_are_those_of_adamw(ranks, tmp_path):
    for stage in (0, 2) if FULL else (1,):
        theirs, *_ = run_client(ranks, losses, tmp_path, {"level": None})
        ours, *_ = run_client(ranks, losses, tmp_path, {"level": "O0", "stage": stage})
        assert ours == pytest.approx(theirs, abs=2e-3), stage
        assert theirs[-1] < theirs[0] - 0.5


@pytest.mark.parametrize("level, stage", [("O2", 1)] + [("O0", 0), ("O2", 2)] * FULL)
def test_killed_and_resumed(level, stage, tmp_path):
    options = {"level": level, "stage": stage}
    unbroken, *_ = run_client(2, losses, tmp_path / "unbroken", options)
    folder = tmp_path / "killed"
    killed_client(2, losses, folder, {**options, "save_every": SAVED}, None, True)
    saved = str(folder / f"checkpoint-{SAVED}")
    assert os.path.exists(saved)
    again, *_ = run_client(2, losses, tmp_path / "again", options, saved)
    assert again[SAVED:] == unbroken[SAVED:] or again == unbroken
    alone, *_ = run_client(1, losses, tmp_path / "alone", options, saved)
    assert alone[SAVED:] == pytest.approx(unbroken[SAVED:], abs=2e-3)
