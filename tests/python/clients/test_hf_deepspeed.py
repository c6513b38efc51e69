"""Hugging Face's Trainer with deepspeed=: losses beside its own AdamW's; killed and resumed."""

import os

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")
pytest.importorskip("deepspeed")
pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from client_runs import FULL, die, killed_client, run_client  # noqa: E402
from hf_deepspeed import losses_of, trainer_of  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

STEPS, SAVED, KILLED = 6, 3, 5


class Killer(TrainerCallback):
    def on_step_begin(self, arguments, state, control, **_):
        if state.global_step == KILLED:
            die()


def losses(rank, ranks, folder, options, resume=None, killed=False):
    trainer = trainer_of(folder, steps=STEPS, ranks=ranks, callbacks=[Killer()] if killed else [],
                         **options)
    trainer.train(resume_from_checkpoint=resume)
    return losses_of(trainer)


def test_losses_are_those_of_adamw(tmp_path):
    theirs, *_ = run_client(2, losses, 2, tmp_path, {"level": None})
    for stage in (0, 1, 2) if FULL else (1,):
        ours, *_ = run_client(2, losses, 2, tmp_path, {"level": "O0", "stage": stage})
        assert ours == pytest.approx(theirs, abs=2e-3), stage
    assert theirs[-1] < theirs[0] - 0.3


@pytest.mark.parametrize("level, stage", [("O2", 1)] + [("O2", 2)] * FULL)
def test_killed_and_resumed(level, stage, tmp_path):
    options = {"level": level, "stage": stage}
    unbroken, *_ = run_client(2, losses, 2, tmp_path / "unbroken", options)
    folder = tmp_path / "killed"
    killed_client(2, losses, 2, folder, {**options, "save_every": SAVED}, None, True)
    saved = str(folder / f"checkpoint-{SAVED}")
    again, *_ = run_client(2, losses, 2, tmp_path / "again", options, saved)
    assert again == unbroken
    alone, = run_client(1, losses, 1, tmp_path / "alone", options, saved, connected=True)
    assert alone == pytest.approx(unbroken, abs=2e-3)


def engine_of(rank):
    """MS-AMP's ``msamp.deepspeed.initialize``; the engine's inner optimizer."""
    import zerofp8.deepspeed as msamp_deepspeed
    from small import Bytes, adamw, llama
    model = llama()
    engine, optimizer, *_ = msamp_deepspeed.initialize(
        model=model, optimizer=adamw(model), config={
            "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1},
            "msamp": {"enabled": True, "opt_level": "O2"}})
    batch = {key: value[None] for key, value in Bytes()[0].items()}
    engine.backward(engine(**batch).loss)
    engine.step()
    return engine.global_steps, type(optimizer).__module__.split(".")[0]


def test_ms_amps_deepspeed_initialize():
    assert run_client(1, engine_of, connected=True) == [(1, "zerofp8")]
