"""Starts jobs as users do, with torchrun or mpirun."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from told import FOLDER, told

HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1",
               "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def run(command, timeout=200, **environment):
    """The ended process; its output is text."""
    return subprocess.run([str(c) for c in command], env={**ENVIRONMENT, **environment},
                          capture_output=True, text=True, timeout=timeout)


def torchrun(ranks, script, *arguments):
    """The command that starts `script` of this folder, or any path."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={ranks}", HERE / script, *arguments]


def mpirun(ranks, script, *arguments):
    return ["mpirun", "--oversubscribe", "-np", str(ranks), sys.executable, HERE / script,
            *arguments]


def has_mpirun():
    return shutil.which("mpirun") is not None


def lines(command):
    """What each rank of a job tells, in the order of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        done = run(command, **{FOLDER: folder})
        assert done.returncode == 0, done.stderr[-3000:]
        return told(folder)
