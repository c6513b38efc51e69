#!/usr/bin/env python3
"""Plots of one run of examples/mpi: loss curves, memory by component, wire bytes by collective (PNG)."""
import argparse
import json
import pathlib
import sys
import textwrap


def smooth(values, window=20):
    """Running mean over the last `window` values."""
    out, total = [], 0.0
    for i, value in enumerate(values):
        total += value - (values[i - window] if i >= window else 0.0)
        out.append(total / min(i + 1, window))
    return out


def plot_loss(plt, results, path):
    figure, axis = plt.subplots(figsize=(8, 4.5))
    for run in results["runs"]:
        label = f"{run['name']}: validation {run['validation_loss']:.4f}"
        axis.plot(smooth(run["losses"]), label=label, linewidth=1.2)
    axis.set_xlabel("step")
    axis.set_ylabel("training loss, nats per byte (mean of 20 steps)")
    axis.set_title(f"byte-level GPT, {results['runs'][0]['parameters']:,} parameters, {results['ranks']} ranks")
    axis.grid(alpha=0.3)
    axis.legend()
    save(plt, figure, path)


def plot_bars(plt, names, values, title, unit, path):
    names = [textwrap.fill(name, 34) for name in names]
    figure, axis = plt.subplots(figsize=(8, 0.9 + 0.5 * max(2, len(names))))
    bars = axis.barh(names, values, color="#4878a8")
    axis.bar_label(bars, labels=[f" {v:,.2f}" for v in values])
    axis.invert_yaxis()
    axis.set_xlim(0, 1.2 * max(values + [1e-9]))
    axis.set_xlabel(unit)
    axis.set_title(title)
    save(plt, figure, path)


def save(plt, figure, path):
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"wrote {path}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", help="JSON written by train_gpt --results")
    parser.add_argument("--out", default="out", help="folder for the pictures")
    arguments = parser.parse_args()
    try:
        results = json.loads(pathlib.Path(arguments.results).read_text())
    except (OSError, json.JSONDecodeError) as error:
        sys.exit(f"plot_run.py: {arguments.results}: {error}")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    out = pathlib.Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    plot_loss(plt, results, out / "loss.png")
    run = results["runs"][0]
    if not run["plan"]:
        return
    rows = [r for r in run["plan"]["rows"] if r["bytes"] > 0]
    plot_bars(plt, [f"{r['name']} ({r['dtype']})" for r in rows],
              [r["bytes"] / run["parameters"] for r in rows],
              f"memory of one rank at {run['name']}", "bytes per parameter", out / "memory.png")
    collectives = [c for c in run["plan"]["collectives"] if c["bytes_per_step"] > 0]
    if collectives:
        plot_bars(plt, [c["what"] for c in collectives], [c["bytes_per_step"] / 1e3 for c in collectives],
                  f"sent by one rank per step at {run['name']}", "kB", out / "wire.png")


if __name__ == "__main__":
    main()
