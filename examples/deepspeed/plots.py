"""PNG plots of all runs in a folder: loss, bytes of memory by component, bytes on the wire."""

import json
from collections import Counter


def _smooth(values, window=10):
    return [sum(values[max(0, i - window + 1):i + 1]) / min(i + 1, window)
            for i in range(len(values))]


def _save(plt, figure, path):
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _bars(plt, runs, key, title, path):
    """One group of bars per run; ``run[key]`` is a dict of bytes."""
    names = sorted({n for r in runs for n, size in r[key].items() if size})
    figure, axis = plt.subplots(figsize=(8, 1 + 0.28 * len(names) * len(runs)))
    for i, run in enumerate(runs):
        places = [n * (len(runs) + 1) + i for n in range(len(names))]
        bars = axis.barh(places, [run[key].get(n, 0) / 2**20 for n in names], label=run["name"])
        axis.bar_label(bars, fmt=" %.2f")
    axis.set_yticks([n * (len(runs) + 1) + (len(runs) - 1) / 2 for n in range(len(names))], names)
    axis.invert_yaxis()
    axis.set_xlabel("MiB")
    axis.set_title(title)
    axis.legend()
    return _save(plt, figure, path)


def draw(folder):
    """The paths of the pictures that were written."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs = [json.loads(p.read_text()) for p in sorted(folder.glob("history_*.json"))]
    figure, axis = plt.subplots(figsize=(8, 4.5))
    for run in runs:
        axis.plot(_smooth(run["losses"]), label=f"{run['name']}: {run['losses'][-1]:.3f}")
    axis.set_xlabel("step")
    axis.set_ylabel("loss, nats per byte (mean of 10 steps)")
    axis.grid(alpha=0.3)
    axis.legend()
    written = [_save(plt, figure, folder / "loss.png")]
    ours = [r for r in runs if "rows" in r]
    for run in ours:
        run["memory"] = Counter()
        for row in run["rows"]:
            run["memory"][row["component"]] += row["bytes"]
    if ours:
        written.append(_bars(plt, ours, "memory", "memory of rank 0 by component",
                             folder / "memory.png"))
        written.append(_bars(plt, ours, "wire", "bytes that rank 0 sends in a step, by dtype",
                             folder / "wire.png"))
    return written
