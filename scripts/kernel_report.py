#!/usr/bin/env python3
"""Runs the kernel benchmark and writes docs/results/kernels.{json,md}: nanoseconds per element and core, median of the repetitions.

    scripts/kernel_report.py --bench build/benchmarks/benchmarks/kernels_bench
"""
import argparse
import json
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def cpu_name():
    """Model name of the CPU, without anything that names the machine."""
    match = re.search(r"^model name\s*:\s*(.+)$", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return match.group(1).strip() if match else "unknown CPU"


def measure(arguments):
    command = [arguments.bench, "--benchmark_format=json", f"--benchmark_repetitions={arguments.repetitions}",
               f"--benchmark_min_time={arguments.min_time}", "--benchmark_enable_random_interleaving=true",
               f"--benchmark_filter={arguments.filter}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\nfailed with {done.returncode}:\n{done.stderr}")
    rows = {}
    for run in json.loads(done.stdout)["benchmarks"]:
        if run["run_type"] == "aggregate":
            continue
        rows.setdefault(run["name"].split("/repeats")[0], []).append((run["per_element"] * 1e9, run["bytes_per_second"] / 1e9))
    result = []
    for name, values in rows.items():
        operation, what, isa, elements = name.split("/")
        ns = sorted(v[0] for v in values)
        middle = len(ns) // 2
        result.append({"operation": operation, "what": what, "isa": isa, "elements": int(elements), "ns": round(ns[middle], 4),
                       "ns_min": round(ns[0], 4), "ns_max": round(ns[-1], 4),
                       "gb_per_s": round(sorted(v[1] for v in values)[middle], 2)})
    return result


def table(rows, arguments, cpu):
    sizes = sorted({r["elements"] for r in rows})
    isas = sorted({r["isa"] for r in rows}, key=["base", "v3", "v4"].index)
    lines = ["# Kernel speed", "",
             f"Made by `scripts/kernel_report.py`: one core of {cpu}, median of {arguments.repetitions} interleaved repetitions, in nanoseconds per "
             f"element (range in brackets). {sizes[0]:,} elements stay in cache, {sizes[-1]:,} do not. All instruction sets give the same bits; "
             "`base` exists for correctness only (its fma is a library call). The machine was shared: read ratios, not absolute times.", "",
             "| operation | " + " | ".join(f"{isa}, {size:,}" for size in sizes for isa in isas) + f" | GB/s, {isas[-1]}, {sizes[-1]:,} |",
             "|---" * (2 + len(sizes) * len(isas)) + "|"]
    index = {(r["operation"], r["what"], r["isa"], r["elements"]): r for r in rows}
    for operation, what in sorted({(r["operation"], r["what"]) for r in rows}):
        cells = []
        for size in sizes:
            for isa in isas:
                r = index.get((operation, what, isa, size))
                cells.append(f"{r['ns']:.2f} ({r['ns_min']:.2f}-{r['ns_max']:.2f})" if r else "")
        last = index.get((operation, what, isas[-1], sizes[-1]))
        lines.append(f"| {operation} {what} | " + " | ".join(cells) + f" | {last['gb_per_s'] if last else ''} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", default=str(ROOT / "build/benchmarks/benchmarks/kernels_bench"))
    parser.add_argument("--out", default=str(ROOT / "docs/results/kernels"), help="path without ending")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--min-time", type=float, default=0.03, help="seconds per repetition")
    parser.add_argument("--filter", default="/(v3|v4)/|base/16384", help="base is too slow for the large size")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = measure(arguments)
    cpu = cpu_name()
    pathlib.Path(arguments.out + ".json").write_text(json.dumps({"cpu": cpu, "rows": rows}, indent=1) + "\n")
    text = table(rows, arguments, cpu)
    pathlib.Path(arguments.out + ".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
