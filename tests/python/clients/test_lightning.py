"""Lightning: losses beside its own AdamW's; checkpoints of it, killed, resumed."""

import logging
import warnings

import pytest

pytest.importorskip("zerofp8.edits", reason="clipping by the trainer")
lightning = pytest.importorskip("lightning")
pytest.importorskip("transformers")

from client_runs import FULL, die, killed_client, run_client  # noqa: E402
from lightning_fit import ACCUMULATE, Module, fit  # noqa: E402

STEPS, SAVED, KILLED = 6, 3, 5


class Killer(lightning.Callback):
    def on_train_batch_start(self, trainer, module, batch, index):
        if trainer.global_step == KILLED:
            die()


def losses(rank, ranks, options, folder=None, save=False, resume=None):
    """Of each micro-batch of this rank's."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = Module(steps=STEPS, **options)
    fit(module, ranks, folder, save_every=SAVED if save else 0, resume=resume,
        callbacks=[Killer()] if save else [])
    return module.losses


def mean(of_ranks):
    return [sum(row) / len(row) for row in zip(*of_ranks)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_are_those_of_adamw(ranks):
    theirs = mean(run_client(ranks, losses, ranks, {"level": None}))
    for stage in (0, 1) if FULL else (1,):
        ours = mean(run_client(ranks, losses, ranks, {"level": "O0", "stage": stage}))
        assert ours == pytest.approx(theirs, abs=1e-4), stage
    assert theirs[-1] < theirs[0] - 0.5


@pytest.mark.parametrize("level, stage", [("O2", 1)] + [("O0", 0)] * FULL)
def test_killed_and_resumed(level, stage, tmp_path):
    options = {"level": level, "stage": stage}
    unbroken = mean(run_client(2, losses, 2, options))
    killed_client(2, losses, 2, options, str(tmp_path), True)
    saved = str(tmp_path / f"step={SAVED}.ckpt")
    again = mean(run_client(2, losses, 2, options, None, False, saved))
    assert again == unbroken[SAVED * ACCUMULATE:]
    alone = mean(run_client(1, losses, 1, options, None, False, saved))
    assert alone == pytest.approx(unbroken[SAVED * ACCUMULATE:], abs=2e-3)
