"""A loop as nanoGPT's: DDP, torch.compile before and after, GradScaler, rank 0's torch.save."""

import pytest

pytest.importorskip("zerofp8.edits", reason="clipping by the trainer")
pytest.importorskip("transformers")

import nanogpt  # noqa: E402
from client_runs import FULL, die, killed_client, run_client  # noqa: E402

STEPS, SAVED, KILLED = 6, 3, 5
VARIANTS = {"plain": {}, "scaler": {"scaled": True}, "compiled before": {"compiled": "before"},
            "compiled after": {"compiled": "after"}}


def losses(rank, ranks, all_options):
    """A row for each of the options, in one start."""
    return [nanogpt.train(rank, ranks, steps=STEPS, **options) for options in all_options]


@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_are_those_of_adamw(ranks):
    options = [{"level": None}] + [{"level": "O0", **v} for v in VARIANTS.values()]
    options += [{"level": "O0", "stage": 0}, {"level": "O0", "scaled": True, "stage": 0}] * FULL
    theirs, *ours = run_client(ranks, losses, ranks, options)[0]
    for row, option in zip(ours, options[1:]):
        assert row == pytest.approx(theirs, abs=1e-4), option
    assert theirs[-1] < theirs[0] - 0.5


def killed(rank, options):
    nanogpt.train(rank, 2, steps=STEPS, save_at=SAVED, **options,
                  after_step=lambda number: number == KILLED and die())


@pytest.mark.parametrize("level, stage", [("O2", 1)] + [("O0", 0)] * FULL)
def test_killed_and_resumed(level, stage, tmp_path):
    options = {"level": level, "stage": stage}
    unbroken = run_client(2, losses, 2, [options])[0][0]
    options["file"] = str(tmp_path / "saved.pt")
    killed_client(2, killed, options)
    again = run_client(2, losses, 2, [{**options, "resume": True}])[0][0]
    assert again == unbroken[SAVED:]
    alone = run_client(1, losses, 1, [{**options, "resume": True}])[0][0]
    assert alone == pytest.approx(unbroken[SAVED:], abs=2e-3)
