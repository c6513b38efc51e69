"""accelerate's loops: losses beside its own AdamW's; saved by it, killed, resumed."""

import os

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")
pytest.importorskip("zerofp8.edits", reason="clipping by the trainer")
pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from accelerate_loop import Run  # noqa: E402
from client_runs import FULL, die, killed_client, run_client  # noqa: E402

STEPS, SAVED, KILLED = 6, 3, 5


def losses(rank, options, folder=None, save=False, resume=False):
    run = Run(steps=STEPS, **options)
    if resume:
        run.accelerator.load_state(folder)

    def after_step(number):
        if save and number == SAVED:
            run.accelerator.save_state(folder)
        if save and number == KILLED:
            die()

    return run.train(SAVED if resume else 0, after_step)


@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_are_those_of_adamw(ranks):
    theirs, *_ = run_client(ranks, losses, {"level": None})
    for stage in (0, 1, 2) if FULL else (1,):
        ours, *_ = run_client(ranks, losses, {"level": "O0", "stage": stage})
        assert ours == pytest.approx(theirs, abs=1e-4), stage
    assert theirs[-1] < theirs[0] - 0.5


@pytest.mark.parametrize("level, stage", [("O2", 1)] + [("O0", 0), ("O2", 2)] * FULL)
def test_killed_and_resumed(level, stage, tmp_path):
    options = {"level": level, "stage": stage}
    unbroken, *_ = run_client(2, losses, options)
    folder = str(tmp_path / "state")
    killed_client(2, losses, options, folder, True)
    again, *_ = run_client(2, losses, options, folder, False, True)
    assert again == unbroken[SAVED:]
    alone, *_ = run_client(1, losses, options, folder, False, True)
    assert alone == pytest.approx(unbroken[SAVED:], abs=2e-3)


def test_deepspeeds_plugin(tmp_path):
    pytest.importorskip("deepspeed")
    theirs, *_ = run_client(2, losses, {"level": None})
    options = {"level": "O0", "deepspeed": True}
    ours, *_ = run_client(2, losses, options)
    assert ours == pytest.approx(theirs, abs=2e-3)
    folder = str(tmp_path / "state")
    killed_client(2, losses, options, folder, True)
    again, *_ = run_client(2, losses, options, folder, False, True)
    assert again == ours[SAVED:]
