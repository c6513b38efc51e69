"""torch.distributed.checkpoint: saved on two ranks, loaded on two and on one."""

import pytest

pytest.importorskip("transformers")

import dcp  # noqa: E402
from client_runs import FULL, die, killed_client, run_client  # noqa: E402

STEPS, SAVED = 5, 3


def losses(rank, ranks, options, folder=None, resume=False):
    model, optimizer = dcp.started(**options)
    if resume:
        dcp.load(model, optimizer, folder)
    return dcp.train(model, optimizer, rank, ranks, SAVED if resume else 0, STEPS)


def killed(rank, options, folder):
    model, optimizer = dcp.started(**options)
    dcp.train(model, optimizer, rank, 2, 0, SAVED)
    dcp.save(model, optimizer, folder)
    dcp.train(model, optimizer, rank, 2, SAVED, SAVED + 1)
    die()


@pytest.mark.parametrize("level, stage", [("O2", 1)] + [("O0", 0), ("O2", 2)] * FULL)
def test_killed_and_resumed(level, stage, tmp_path):
    options, folder = {"level": level, "stage": stage}, str(tmp_path / "saved")
    unbroken = run_client(2, losses, 2, options)
    killed_client(2, killed, options, folder)
    again = run_client(2, losses, 2, options, folder, True)
    assert again == [row[SAVED:] for row in unbroken]
    alone, = run_client(1, losses, 1, options, folder, True)
    assert alone == pytest.approx([sum(r) / 2 for r in zip(*unbroken)][SAVED:], abs=2e-3)
