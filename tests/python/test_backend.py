"""comm_backend: torch's process groups or Open MPI, with the same bits; errors."""

import importlib.util
import subprocess
import sys

import pytest
import torch
from launchers import has_mpirun, lines, mpirun, run, torchrun
from ranks import run_ranks
from reference import seeded_model

import zerofp8
from zerofp8 import mpi

needs_mpi = pytest.mark.skipif(
    not has_mpirun() or importlib.util.find_spec("zerofp8._mpi") is None,
    reason="no mpirun, or zerofp8 was built without MPI")


def of_backend(backend):
    model = seeded_model()
    return zerofp8.initialize(model, torch.optim.AdamW(model.parameters()),
                              {"zerofp8": {"comm_backend": backend}}, timeout=60)


@needs_mpi
@pytest.mark.parametrize("ranks", [2, 4])
def test_mpi_gives_the_bits_of_torch(ranks):
    by_mpi = lines(mpirun(ranks, "job.py", "mpi"))
    assert [r["connected by"] for r in by_mpi] == ["mpi"] * ranks
    by_torch = lines(mpirun(ranks, "job.py", "torch"))
    assert [r["connected by"] for r in by_torch] == ["torch gloo"] * ranks
    assert [r["losses"] for r in by_torch] == [r["losses"] for r in by_mpi]


@needs_mpi
def test_pipelines_over_mpi():
    by_mpi = lines(mpirun(4, "job_pipeline.py", "mpi"))
    assert by_mpi == lines(mpirun(4, "job_pipeline.py", "torch"))


@needs_mpi
def test_a_rank_that_fails_ends_all():
    done = run(mpirun(2, "job_failing.py"), timeout=150)
    assert done.returncode != 0 and "the batch of rank 1 is broken" in done.stderr


@needs_mpi
def test_ranks_that_say_different_backends():
    done = run(mpirun(2, "job.py", "mpi", "torch"), timeout=150)
    assert done.returncode != 0
    assert "/zerofp8/comm_backend" in done.stderr and '"torch" on rank 1' in done.stderr


def wrong_launcher(rank):
    of_backend("mpi")


@pytest.mark.parametrize("ranks", [1, 2])
def test_mpi_without_mpirun_is_an_error_on_all_ranks(ranks):
    errors = run_ranks(ranks, wrong_launcher, errors=True)
    for error in errors:
        assert isinstance(error, zerofp8.ConfigError), error
        assert error.pointer == "/zerofp8/comm_backend" and "mpirun -n" in error.fix
    assert len({str(e) for e in errors}) == 1


def test_mpi_under_torchrun_names_the_launcher():
    done = run(torchrun(2, "job.py", "mpi"))
    assert done.returncode != 0 and "the launcher is: torchrun" in done.stderr


@pytest.fixture
def under_mpirun(monkeypatch):
    for name, value in (("SIZE", "1"), ("RANK", "0")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)


def test_built_without_mpi(under_mpirun, monkeypatch):
    monkeypatch.setitem(sys.modules, "zerofp8._mpi", None)  # as if there were none
    with pytest.raises(zerofp8.UnsupportedError, match="built without MPI.*libopenmpi-dev"):
        of_backend("mpi")


def test_mpi_library_that_does_not_load(under_mpirun, monkeypatch):
    def fail(name):
        raise ImportError("libmpi.so.40: cannot open shared object file")

    monkeypatch.setattr(mpi.importlib, "import_module", fail)
    with pytest.raises(zerofp8.UnsupportedError, match="libmpi.so.40"):
        of_backend("mpi")


def nccl_with_host_memory(rank):
    of_backend("nccl")


@pytest.mark.parametrize("ranks", [1, 2])
def test_nccl_for_a_model_on_the_cpu_is_an_error_on_all_ranks(ranks):
    errors = run_ranks(ranks, nccl_with_host_memory, errors=True)
    assert len({str(e) for e in errors}) == 1 and isinstance(errors[0], zerofp8.ConfigError)
    assert 'comm_backend: given "nccl", and state is on the CPU' in str(errors[0])
    assert 'move the model to a CUDA device' in str(errors[0])


def test_package_needs_no_mpi_library():
    text = "import zerofp8; print('libmpi' in open('/proc/self/maps').read())"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


def test_auto_is_torch():
    assert of_backend("auto")[1].plan.connected_by == "self"  # one rank
    assert "Ranks: connected by self" in str(of_backend("torch")[1].plan)
