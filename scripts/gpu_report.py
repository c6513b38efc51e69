#!/usr/bin/env python3
"""Runs device_bench and, where torch has CUDA, torch's fused AdamW beside it; writes docs/results/gpu.{json,md}.

    scripts/gpu_report.py --bench build/cuda/benchmarks/device_bench       (scripts/bench-gpu.sh builds it and calls this)

Speeds are medians; shares are of the device's own copy in the same run.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def ours(arguments):
    command = [arguments.bench, "--benchmark_format=json", f"--benchmark_repetitions={arguments.repetitions}",
               "--benchmark_enable_random_interleaving=true", f"--benchmark_min_time={arguments.min_time}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\nfailed with {done.returncode}: {done.stderr.strip()}")
    runs = {}
    for run in json.loads(done.stdout)["benchmarks"]:
        if run["run_type"] != "aggregate":
            runs.setdefault(run["name"].removesuffix("/real_time").split("/repeats")[0], []).append(run)
    rows = []
    for name, values in sorted(runs.items()):
        speeds = [v["bytes_per_second"] / 1e9 for v in values]
        rows.append({"name": name, "gb_per_s": statistics.median(speeds), "gb_per_s_min": min(speeds), "gb_per_s_max": max(speeds),
                     "elements_per_s": statistics.median(v["elements_per_second"] for v in values)})
    copy = next(r["gb_per_s"] for r in rows if r["name"].startswith("copy/"))
    for row in rows:
        row["share_of_copy"] = row["gb_per_s"] / copy
    return rows


def peers(elements, repetitions):
    """Parameters per second of torch's fused AdamW: FP32 parameters, and bf16 ones with an FP32 master copy."""
    try:
        import torch
    except ImportError:
        return [], "torch is not installed"
    if not torch.cuda.is_available():
        return [], "torch has no CUDA device"

    def median_seconds(work):
        seconds = []
        for repetition in range(repetitions + 2):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            work()
            end.record()
            torch.cuda.synchronize()
            if repetition >= 2:
                seconds.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(seconds)

    master = torch.zeros(elements, device="cuda", requires_grad=True)
    weight = torch.zeros(elements, device="cuda", dtype=torch.bfloat16)
    master.grad = torch.zeros_like(master)
    optimizer = torch.optim.AdamW([master], lr=1e-3, fused=True)

    def with_copy():
        optimizer.step()
        weight.copy_(master.detach())

    found = transformer_engine(torch, weight, median_seconds, elements)
    return found + [{"name": f"torch {torch.__version__} fused AdamW, FP32", "elements_per_s": elements / median_seconds(optimizer.step)},
            {"name": f"torch {torch.__version__} fused AdamW, FP32 master + bf16 weight",
             "elements_per_s": elements / median_seconds(with_copy)}], ""


def transformer_engine(torch, weight, median_seconds, elements):
    """TransformerEngine's own FusedAdam, where it is installed; device_bench has a kernel of its kind (peer/adam_fp32_state)."""
    try:
        from transformer_engine.pytorch.optimizers import FusedAdam
    except ImportError:
        return []
    parameter = torch.nn.Parameter(weight.clone())
    parameter.grad = torch.zeros_like(parameter)
    optimizer = FusedAdam([parameter], lr=1e-3, master_weights=True)
    return [{"name": "TransformerEngine FusedAdam, FP32 state and master + bf16 weight",
             "elements_per_s": elements / median_seconds(optimizer.step)}]


def page(rows, others, why, device):
    lines = ["# Kernel speed on a GPU", "", f"Made by `scripts/bench-gpu.sh` on {device}. Share: of the device's own copy in the same run.", "",
             "| kernel | GB/s, median | range | share of copy | 1e9 elements/s |", "|---|---|---|---|---|"]
    lines += [f"| {r['name']} | {r['gb_per_s']:.1f} | {r['gb_per_s_min']:.1f} to {r['gb_per_s_max']:.1f} | {r['share_of_copy']:.2f} "
              f"| {r['elements_per_s'] / 1e9:.2f} |" for r in rows]
    lines += ["", "## Beside other optimizers", ""]
    if why:
        return "\n".join([*lines, f"Not measured: {why}.", ""])
    lines += ["| optimizer | 1e9 parameters/s |", "|---|---|"]
    adams = [r for r in rows if r["name"].startswith(("adam/", "peer/"))]
    lines += [f"| {r['name']} | {r['elements_per_s'] / 1e9:.2f} |" for r in [*others, *adams]]
    return "\n".join([*lines, ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", required=True)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs/results")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--min-time", default="0.2")
    arguments = parser.parse_args()
    rows = ours(arguments)
    emulated = os.environ.get("ZEROFP8_BENCH_DEVICE") == "emulated"
    device = "the emulation on the host: no speed of a GPU"
    if not emulated:
        done = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True)
        device = done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else "an unnamed GPU"
    others, why = peers(1 << 28, arguments.repetitions)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "gpu.json").write_text(json.dumps({"device": device, "kernels": rows, "peers": others, "no_peers": why}, indent=1) + "\n")
    (arguments.out / "gpu.md").write_text(page(rows, others, why, device))
    print(page(rows, others, why, device))


if __name__ == "__main__":
    main()
