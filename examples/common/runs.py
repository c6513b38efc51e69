"""What the trainers share around their loops: options, the progress line, the history of a run."""

import json
import os
import shutil
import sys
import time
import traceback
from pathlib import Path

from tqdm import tqdm

import zerofp8

# Options that make losses comparable: runs that differ in one of them are not drawn together.
_JOB = ("width", "blocks", "length")


def add_options(parser, out, config):
    """Options that all trainers have.

    Parameters
    ----------
    out, config : pathlib.Path
        Defaults of the folder that is written to, and of the config file.
    """
    parser.add_argument("--config", type=Path, default=config)
    parser.add_argument("--steps", type=int, default=200, help="of this run")
    parser.add_argument("--stages", type=int, default=2, help="pipeline stages")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--length", type=int, default=64, help="bytes of a sample")
    parser.add_argument("--out", type=Path, default=out,
                        help="folder for history, plots and checkpoints")
    parser.add_argument("--save-every", type=int, default=0, help="steps; 0: no checkpoints")
    parser.add_argument("--resume", action="store_true", help="from the newest checkpoint in --out")


def run_main(main):
    """Run `main`; an error ends the process with a line on stderr and exit code 2.

    The other ranks may wait for this one, so that the launcher has to end them: both torchrun and
    mpirun do when a rank ends with another code than 0.
    """
    try:
        main()
    except (Exception, KeyboardInterrupt) as error:
        rank = int(os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
        if rank > 0:
            time.sleep(1)  # most errors are all ranks': the launcher ends us when rank 0 has ended
        if not isinstance(error, (zerofp8.Error, KeyboardInterrupt)):
            traceback.print_exc()
        what = str(error) or "interrupted"
        print(f"{Path(sys.argv[0]).name}: rank {rank}: {type(error).__name__}: {what}",
              file=sys.stderr, flush=True)
        os._exit(2)  # without atexit handlers, which may wait for ranks that have gone


def wire_bytes(report):
    """Payload that this rank sent in the step."""
    return sum(v for k, v in report.wire.items() if k not in ("control", "envelopes"))


class Progress(tqdm):
    """A line with loss, norm, skipped steps, loss scale and bytes sent; on rank 0, on stdout.

    stderr is left to warnings, so that the two can be looked at one without the other.
    """

    def __init__(self, steps, rank):
        # mpirun's ranks write to terminals of no size, on which tqdm would show nothing.
        columns, lines = shutil.get_terminal_size((110, 24))
        super().__init__(total=steps, disable=rank != 0, unit="step", file=sys.stdout,
                         mininterval=0.5, ncols=columns, nrows=lines)

    def show(self, loss, norm, skips, report):
        """After a step; without `report` (another optimizer) scale and bytes are left out."""
        said = {"loss": f"{loss:.3f}", "norm": f"{norm:.2f}", "skips": skips}
        if report is not None:
            said.update(scale=f"{report.loss_scale:g}",
                        wire=f"{wire_bytes(report) / 2**20:.2f} MiB")
        self.set_postfix(said, refresh=False)
        self.update()


class History:
    """Losses of one config in the folder ``--out``, over all resumes; rank 0 only.

    Parameters
    ----------
    options : argparse.Namespace
    name : str
        Of the run; a file of that name is continued if ``--resume`` was given.
    start : int
        Steps that were made before this run.
    """

    def __init__(self, options, name, start):
        self.path = options.out / f"history_{name}.json"
        self.run = {"name": name, "job": {k: getattr(options, k) for k in _JOB}, "first": start,
                    "losses": []}
        if options.resume and self.path.exists():
            before = json.loads(self.path.read_text())
            if before.get("job") == self.run["job"]:
                kept = before["losses"][:start - before["first"]]
                if before["first"] + len(kept) == start:
                    self.run.update(first=before["first"], losses=kept)

    def write(self, losses, plan=None, report=None):
        """Add this run's losses, and what was planned and counted of memory and wire."""
        self.run["losses"] += losses
        if plan is not None:
            planned = plan.as_dict()
            self.run.update(rows=planned["rows"], collectives=planned["collectives"],
                            sent=wire_bytes(report))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.run, indent=1))


def read_histories(folder, job):
    """All runs of `folder` that trained the same model, FP32 first."""
    runs = [json.loads(p.read_text()) for p in sorted(folder.glob("history_*.json"))]
    return sorted((r for r in runs if r.get("job") == job), key=lambda r: not is_reference(r))


def summary(runs):
    """A table of runs: what they cost and where they stand."""
    lines = [f"{'run':24}  steps  loss, mean of 10  memory, MiB  sent in a step, MiB"]
    for run in runs:
        last = run["losses"][-10:]
        steps = run["first"] + len(run["losses"])
        line = f"{run['name']:24}  {steps:5}  {sum(last) / len(last):16.4f}"
        if "rows" in run:
            memory = sum(row["bytes"] for row in run["rows"])
            line += f"  {memory / 2**20:11.2f}  {run['sent'] / 2**20:19.2f}"
        lines.append(line)
    return "\n".join(lines)


def is_reference(run):
    """Whether a run is the one that the others are compared with."""
    return run["name"].endswith("fp32")
