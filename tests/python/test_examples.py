"""The example for torch.distributed.pipelining, as users start it; what the examples share."""

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launchers import has_mpirun, mpirun, run, torchrun

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "torch_pipeline"
SMALL = ("--width", "32", "--blocks", "4", "--length", "32")

sys.path.insert(0, str(ROOT / "examples"))
from common.byte_gpt import Text  # noqa: E402


def command(launcher, config, out, *options):
    return launcher(4, FOLDER / "train.py", "--config", FOLDER / f"{config}.json", "--out", out,
                    *SMALL, *options)


def losses(out, config):
    return json.loads((out / f"history_{config}.json").read_text())["losses"]


def train(*arguments):
    done = run(command(*arguments))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "100%" in done.stdout and ", loss=" in done.stdout  # the progress line
    return done.stdout


def test_torch_pipeline_trains_resumes_and_draws(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(torchrun, "config_fp32", whole, "--steps", "30")
    said = train(torchrun, "config_fp8", whole, "--steps", "30", "--schedule", "interleaved1f1b")
    assert "Ranks: connected by torch gloo" in said
    expected, found = losses(whole, "config_fp32"), losses(whole, "config_fp8")
    assert found[-1] < found[0] - 0.5 and found == pytest.approx(expected, abs=0.1)
    for name in ("loss", "memory", "wire"):
        assert (whole / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"wrote {whole / name}.png" in said
    # In two parts, by the other launcher: the same bits.
    launcher = mpirun if has_mpirun() else torchrun
    schedule = ("--schedule", "interleaved1f1b")
    train(launcher, "config_fp8", parts, "--steps", "6", "--save-every", "6", *schedule)
    train(launcher, "config_fp8", parts, "--steps", "4", "--resume", *schedule)
    assert losses(parts, "config_fp8") == found[:10]


def test_torch_pipeline_says_what_is_wrong_once(tmp_path):
    done = run(command(torchrun, "config", tmp_path, "--resume", "--steps", "1"))
    told = [line for line in done.stderr.splitlines() if line.startswith("train.py: ")]
    assert done.returncode != 0 and len(told) == 1 and "checkpoint" in told[0]
    assert "Traceback (most recent call last):\n  File \"" + str(FOLDER) not in done.stderr
    done = run([sys.executable, FOLDER / "train.py", "--stages", "3"])
    assert done.returncode == 2 and "--blocks 4 cannot be cut into 3" in done.stderr


def test_a_resumed_run_reads_on():
    text = Text(16, files=2)
    numbered = list(itertools.islice(text.batches(0, 1, 3), 5))
    for ours, expected in zip(itertools.islice(text.batches(3, 1, 3), 2), numbered[3:]):
        assert all(torch.equal(o, e) for o, e in zip(ours, expected))
    assert not torch.equal(text.batch(3, 0, 3)[0], numbered[3][0])  # another data rank's


DEMO = ROOT / "scripts" / "demo.sh"


def demo(*options, **environment):
    """The ended demo; `environment` may have OUT, a folder that is not the user's."""
    out = ["--out", environment["OUT"]] if "OUT" in environment else []
    return subprocess.run([DEMO, *out, *options], capture_output=True, text=True, timeout=60,
                          env={**os.environ, **environment})


def test_demo_explains_itself():
    for options in (["--help"], ["--mpi", "--help"]):
        done = demo(*options)
        assert done.returncode == 0 and "--mpi" in done.stdout
    missing = demo("--config", "absent.json")
    assert missing.returncode == 2 and "absent.json" in missing.stderr


@pytest.fixture
def fake_environment(tmp_path):
    """A virtual environment in which everything is installed, and torchrun does what it is told."""
    (tmp_path / "bin").mkdir()
    torchrun = ('case "$*" in *torch.distributed.run*)\n'
                'echo "$TORCHRUN_SAYS" >&2; echo begun; $TORCHRUN_DOES; exit 1;; esac\n')
    for name, text in (("python", torchrun), ("pip", ""),
                       ("zerofp8", 'echo "$CHECK_SAYS" >&2; [ -z "$CHECK_SAYS" ]\n')):
        program = tmp_path / "bin" / name
        program.write_text("#!/bin/bash\n" + text)
        program.chmod(0o755)
    return {"ZEROFP8_VENV": str(tmp_path), "ZEROFP8_SKIP_APT": "1", "TORCHRUN_DOES": "true",
            "OUT": str(tmp_path / "out")}


WALL = "E1129 failed (exitcode: -9)\nTraceback (most recent call last):\n" + "  File\n" * 30
WALL += "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
ROOT_CAUSE = ("Root Cause (first observed failure):\n[0]:\n  time      : now\n"
              "  rank      : 3 (local_rank: 3)\n  exitcode  : -9\n"
              "  traceback : Signal 9 (SIGKILL) received by PID 15484\n====")


@pytest.mark.parametrize("says, reason", [
    (f"noise\ntrain_pipeline.py: rank 2: ConfigError: wrong\n{WALL}", "rank 2: ConfigError: wrong"),
    (WALL + ROOT_CAUSE, "Signal 9 (SIGKILL)"), (WALL + "the last line", "the last line")])
def test_demo_tells_the_reason_and_no_more(fake_environment, says, reason):
    done = demo(TORCHRUN_SAYS=says, **fake_environment)
    assert done.returncode == 1 and reason in done.stderr
    assert len(done.stderr.splitlines()) <= 10 and "all messages: " in done.stderr


def test_demo_checks_the_config_first(fake_environment):
    done = demo(CHECK_SAYS="/bf16/enabled: wrong", **fake_environment)
    assert done.returncode == 2 and "/bf16/enabled: wrong" in done.stderr
    assert "begun" not in done.stdout


def test_a_signal_ends_the_demo_and_its_ranks(fake_environment, tmp_path):
    fake_environment["TORCHRUN_DOES"] = "exec sleep 77"
    process = subprocess.Popen([DEMO, "--out", tmp_path], env={**os.environ, **fake_environment},
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while "begun" not in process.stdout.readline():
        assert process.poll() is None
    child = int(subprocess.check_output(["pgrep", "-P", str(process.pid), "sleep"]))
    process.send_signal(signal.SIGTERM)
    assert "interrupted" in process.communicate(timeout=20)[1] and process.returncode == 130
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
