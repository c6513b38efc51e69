"""A rank that comes to its end stays while another one may still save; not if it has failed."""

import os
import time

import pytest
import torch
from launchers import HERE, run, torchrun


def run_job(folder, where):
    return run(torchrun(2, "job_saving.py", folder, where), timeout=100, PYTHONPATH=os.pathsep.join(
        [str(HERE), os.environ.get("PYTHONPATH", "")]))


@pytest.mark.parametrize("where", ["module", "function"])
def test_rank_0_saves_after_the_others_have_ended(tmp_path, where):
    began = time.monotonic()
    result = run_job(tmp_path, where)
    assert result.returncode == 0, result.stdout + result.stderr
    assert time.monotonic() - began < 28  # nobody has waited for the time-out
    saved = torch.load(tmp_path / f"{where}.pt", weights_only=True)
    assert all(e["exp_avg"].any() and e["step"] == 3 for e in saved["state"].values())


def test_a_rank_that_has_failed_does_not_stay(tmp_path):
    result = run_job(tmp_path, "failing")
    assert result.returncode != 0 and "of the user's" in result.stderr
    assert not list(tmp_path.iterdir())
