#!/usr/bin/env python3
"""Train every cell of the support table: with DeepSpeed's pipelines, torch's, and without.

    scripts/deepspeed_matrix.py                  writes docs/results/deepspeed_matrix.{md,json}
    scripts/deepspeed_matrix.py --steps 4 --out build/matrix

Four gloo ranks on one machine; pipelines of 2 stages x 2 data ranks, and 4 data ranks without.
DeepSpeed's own optimizers train the same cells in the same run. Exit code 1 if a cell of zerofp8 is neither right nor one of the table's errors.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "python"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import deepspeed_cells  # noqa: E402
from ranks import run_ranks  # noqa: E402

RANKS = 4
# Pipelines of, stages, who trains, and DeepSpeed's own beside it.
LAYOUTS = (("DeepSpeed", 2, "zerofp8", True), ("torch", 2, "torch", False),
           ("none", 1, "zerofp8", True))
THEIR_STEPS = 5
CHUNK = 14  # cells per set of processes


def their_cells():
    return [(model, accumulation, stage) for model in deepspeed_cells.DTYPES
            for accumulation in ("fp32", "bf16", "fp16") for stage in (0, 1, 2)]


def run(whose, stages, steps, chosen):
    """Results of these cells. What stops at one is begun again there, once."""
    found, failed = {}, None
    while len(found) < len(chosen):
        # DeepSpeed and gloo keep the threads of each engine's groups: new processes now and then.
        left = [cell for cell in chosen if cell not in found][:CHUNK]
        with tempfile.TemporaryDirectory() as folder:
            why = attempt(whose, stages, steps, left, folder)
            found.update(read(folder, left))
        if why:
            at = next((cell for cell in left if cell not in found), None)
            print(f"stopped at {at}: {why}", flush=True)
            if at is not None and at == failed:
                found[at] = {"status": "stops", "text": why}
            failed = at
    return {cell: found[cell] for cell in chosen}


def attempt(*arguments):
    """What went wrong; "" where nothing did."""
    try:
        ranks = run_ranks(RANKS, deepspeed_cells.walk, RANKS, *arguments, timeout=300, errors=True)
    except AssertionError as error:
        return str(error)[:160]
    texts = [repr(r)[:160] for r in ranks if isinstance(r, BaseException)]
    return min(texts, key=lambda text: "by peer" in text, default="")


def read(folder, cells):
    """Results of the cells that all ranks have come through."""
    ranks = []
    for rank in range(RANKS):
        path = Path(folder) / f"rank{rank}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        ranks.append({tuple(cell): result for cell, result in map(json.loads, lines)})
    return {cell: merge([r[cell] for r in ranks]) for cell in cells
            if all(cell in r for r in ranks)}


def merge(results):
    """The worst of the ranks; errors must have one text on all."""
    if any(r["status"] == "error" for r in results):
        same = len({json.dumps(r) for r in results}) == 1
        return results[0] if same else {"status": "WRONG", "text": "ranks differ"}
    order = ("raises", "WRONG", "right")
    worst = dict(min(results, key=lambda r: (order.index(r["status"]), -r.get("error", 0))))
    worst.pop("seconds", None)
    return worst


def torch_version():
    from importlib.metadata import version
    return version("torch").split("+")[0]


def number(value):
    return "" if value is None else f"{value:.1e}"


def their_text(result):
    if result is None:
        return "-"
    if "error" in result and result["status"] != "error":
        return f"{result['status']}, {number(result['error'])} ({result['wrapper']})"
    return f"{result['status']}: {result['text'].split(':')[0]}"


def table(ours, theirs):
    yield ("| pipelines of | stage | sharded | model | accumulation | zerofp8 | gradient error | bound | "
           "loss deviation | DeepSpeed |")
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for (pp, (model, accumulation, sharded, stage)), r in ours.items():
        if not deepspeed_cells.runs((model, accumulation, sharded, stage)):
            continue
        mark = " (*)" if model == "fp16" and accumulation != "fp8" else ""
        other = theirs.get((pp, (model, accumulation, stage)))
        yield (f"| {pp} | {stage} | {'yes' if sharded else 'no'} | {model} | {accumulation} | "
               f"{r['status']} | {number(r.get('error'))} | {number(r.get('bound'))} | "
               f"{number(r.get('deviation'))} | {their_text(other)}{mark} |")


def page(ours, theirs, steps, version):
    count = Counter(r["status"] for r in ours.values())
    their_count = Counter(r["status"] for r in theirs.values())
    def said(counted):
        return ", ".join(f"{n} {status}" for status, n in sorted(counted.items()))
    return "\n".join([
        "# The support table, trained for real", "",
        "<!-- Made by scripts/deepspeed_matrix.py. -->", "",
        f"DeepSpeed {version}, torch {torch_version()}, four gloo ranks on one machine, a GPT with a "
        "tied embedding. Pipelines have 2 stages x 2 data ranks: DeepSpeed's PipelineModule, or "
        "torch.distributed.pipelining's 1F1B. Without: DeepSpeed's plain engine on 4 data ranks. "
        "The same 8 micro-batches per step in all.", "",
        f"- zerofp8: {said(count)}, of {len(ours)} cells; each error is a contradiction of "
        "`sharded` and the stage, with the same text on all ranks. "
        f"AdamW, {steps} steps.",
        f"- DeepSpeed's own optimizers, in the same run: {said(their_count)}, of {len(theirs)}. "
        f"SGD, {THEIR_STEPS} steps, since Adam hides a wrong scale. `grad_accum_dtype` is the "
        "accumulation column; it has neither FP8 nor `sharded`. (*) DeepSpeed refuses fp16 on this "
        "CPU; its check was patched for these.", "",
        "*gradient error*: of the worst parameter on any rank, tied ones included, the L2 "
        "distance of the reduced gradient from a float64-accumulated one of one process, in the "
        "mean norm of the 8 parts. *bound*: 1e-6 for fp32, 4e-3 for bf16, 1e-3 for block-scaled "
        "fp16 (on an fp32 wire), derived from .0265 per rounding for FP8; for DeepSpeed 1e-6 where "
        "all is fp32, else 1e-2. *loss deviation*: largest distance of a step's loss from the "
        "reference's, relative to the first loss; right up to 1e-5 (fp32), 1e-2 (16 bits) and 2e-2 "
        "(FP8, and DeepSpeed).",
        "", *table(ours, theirs), ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="of each of zerofp8's cells")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    arguments = parser.parse_args()
    ours, theirs = {}, {}
    for pp, stages, who, beside in LAYOUTS:
        runs = [(who, deepspeed_cells.cells(), arguments.steps, ours)]
        if beside:
            runs.append(("deepspeed", their_cells(), THEIR_STEPS, theirs))
        for whose, chosen, steps, into in runs:
            begin = time.monotonic()
            found = run(whose, stages, steps, chosen)
            into.update({(pp, cell): r for cell, r in found.items()})
            print(f"pipelines of {pp}, {whose}: {dict(Counter(r['status'] for r in found.values()))}, "
                  f"{time.monotonic() - begin:.0f} s", flush=True)
    from importlib.metadata import version
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "deepspeed_matrix.md").write_text(
        page(ours, theirs, arguments.steps, version("deepspeed")))
    (arguments.out / "deepspeed_matrix.json").write_text(json.dumps(
        {name: [{"pipeline": pp, "cell": cell, **r} for (pp, cell), r in results.items()]
         for name, results in (("zerofp8", ours), ("deepspeed", theirs))}, indent=1) + "\n")
    bad = [key for key, r in ours.items()
           if r["status"] != ("right" if deepspeed_cells.runs(key[1]) else "error")]
    for key in bad:
        print("not as it should be:", key, ours[key])
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
