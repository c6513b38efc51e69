"""Launchers: torchrun, mpirun, none; the command; what is installed."""

import subprocess
import sys
from pathlib import Path

import pytest
from launchers import HERE, has_mpirun, lines, mpirun, torchrun

import zerofp8
from zerofp8 import _C


def test_same_losses_under_torchrun_and_mpirun():
    by_torchrun = lines(torchrun(2, "job.py"))
    assert [r["source"] for r in by_torchrun] == ["torchrun"] * 2
    assert [(r["rank"], r["size"], r["local_rank"]) for r in by_torchrun] == [(0, 2, 0), (1, 2, 1)]
    if not has_mpirun():
        pytest.skip("no mpirun")
    by_mpirun = lines(mpirun(2, "job.py"))
    assert [r["source"] for r in by_mpirun] == ["Open MPI"] * 2
    assert [r["losses"] for r in by_mpirun] == [r["losses"] for r in by_torchrun]


def test_no_launcher():
    (alone,) = lines([sys.executable, HERE / "job.py"])
    assert alone["source"] == "no launcher" and alone["size"] == 1


def test_case_42_launchers_that_disagree():
    mpi = {"OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_RANK": "3"}
    torch = {"WORLD_SIZE": "8", "RANK": "3"}
    with pytest.raises(zerofp8.ConfigError) as error:
        _C.detect_launch_env({**mpi, **torch})
    assert all(t in str(error.value) for t in ("OMPI_COMM_WORLD_SIZE", "16", "WORLD_SIZE", "8"))
    assert (_C.detect_launch_env(mpi).rank, _C.detect_launch_env(mpi).size) == (3, 16)
    assert _C.detect_launch_env(torch).source == "torchrun"
    assert _C.detect_launch_env({}).size == 1
    slurm = _C.detect_launch_env({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"})
    assert (slurm.rank, slurm.size, slurm.local_rank) == (1, 4, 1)


def command(*arguments):
    path = Path(sys.executable).parent / "zerofp8"
    return subprocess.run([path, *arguments], capture_output=True, text=True, timeout=60)


def test_command(tmp_path):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 1}}')
    bad.write_text('{"bf16": {"enabled": "true"}}')
    assert command("check", good).returncode == 0
    assert command("plan", good, "--params", "7e9", "--world", "8").returncode == 0
    refused = command("check", bad)
    assert refused.returncode == 2 and "/bf16/enabled" in refused.stderr
    stage3 = tmp_path / "stage3.json"
    stage3.write_text('{"zero_optimization": {"stage": 3}}')
    assert command("check", stage3).returncode == 1
    assert command("--help").returncode == 0


def test_package_is_typed_and_documented():
    folder = Path(zerofp8.__file__).parent
    assert (folder / "py.typed").exists() and (folder / "_C.pyi").exists()
    for name in zerofp8.__all__:
        assert getattr(zerofp8, name).__doc__, name
    stub = (folder / "_C.pyi").read_text()
    for name in dir(_C):
        if not name.startswith("_"):
            assert f"class {name}" in stub or f"def {name}(" in stub, name
            value = getattr(_C, name)
            members = [m for m in vars(value) if not m.startswith("_")] if isinstance(
                value, type) else []
            assert all(f"def {m}(" in stub or f"    {m}:" in stub for m in members), (name, members)


def test_one_openmp_pool():
    import torch
    with open("/proc/self/maps") as maps:
        pools = {line.split()[-1] for line in maps if "libgomp" in line}
    assert len(pools) <= 1 and torch.get_num_threads() == 1
