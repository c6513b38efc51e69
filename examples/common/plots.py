"""PNG plots of all runs of a folder: loss, memory by component, bytes by collective."""

from collections import Counter

from .runs import is_reference, read_histories, summary

_SMOOTH = 10
_COMPONENT_NAMES = {"caller": "weight", "accumulator": "gradient accumulator"}


def draw(folder, job):
    """Pictures and a table of all runs, as text that tells where they are.

    Parameters
    ----------
    folder : pathlib.Path
    job : dict
        Of ``History.run``: other jobs' runs in the folder are left out.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs = read_histories(folder, job)
    for i, run in enumerate(runs):
        run["color"] = "black" if is_reference(run) else f"C{i}"
    written = [_losses(plt, runs, folder / "loss.png")]
    ours = [r for r in runs if "rows" in r]
    for run in ours:
        run["memory"], run["wire"] = _memory(run["rows"]), _wire(run["collectives"])
    if ours:
        written.append(_bars(plt, ours, "memory", "optimizer memory of rank 0, weights included",
                             folder / "memory.png"))
        written.append(_bars(plt, ours, "wire", "sent by rank 0 in a step", folder / "wire.png"))
    return "\n".join([summary(runs), *(f"wrote {path}" for path in written)])


def _losses(plt, runs, path):
    reference = next((r for r in runs if is_reference(r)), None)
    compared = [r for r in runs if r is not reference] if reference else []
    ratios = (2, 1) if compared else (1,)
    figure, axes = plt.subplots(len(ratios), figsize=(8, 6.5 if compared else 4.5), sharex=True,
                                squeeze=False, height_ratios=ratios)
    axis = axes[0][0]
    for run in runs:
        smooth = _smooth(run["losses"])
        axis.plot(_steps(run), smooth, color=run["color"], label=f"{run['name']}: {smooth[-1]:.3f}",
                  linestyle="--" if run is reference else "-")
    axis.set_ylabel(f"loss, nats per byte\n(mean of {_SMOOTH} steps)")
    axis.set_title("training loss" + ("" if reference else " (no FP32 run in this folder yet)"))
    axis.grid(alpha=0.3)
    axis.legend()
    for run in compared:
        known = dict(zip(_steps(reference), reference["losses"]))
        pairs = [(s, loss - known[s]) for s, loss in zip(_steps(run), run["losses"]) if s in known]
        axes[1][0].plot([s for s, _ in pairs], _smooth([d for _, d in pairs]), color=run["color"])
    if compared:
        axes[1][0].axhline(0, color="black", linestyle="--", linewidth=1)
        axes[1][0].set_ylabel(f"minus {reference['name']}\n(same batches)")
        axes[1][0].grid(alpha=0.3)
    axes[-1][0].set_xlabel("step")
    return _save(plt, figure, path)


def _steps(run):
    return range(run["first"] + 1, run["first"] + 1 + len(run["losses"]))


def _smooth(values):
    return [sum(values[max(0, i - _SMOOTH + 1):i + 1]) / min(i + 1, _SMOOTH)
            for i in range(len(values))]


def _memory(rows):
    """(bytes, dtypes) by component, in the plan's order, and their sum."""
    sizes, dtypes = Counter(), {}
    for row in rows:
        if row["bytes"]:
            name = _COMPONENT_NAMES.get(row["component"], row["component"])
            sizes[name] += row["bytes"]
            # "fp8_e4m3 + fp32 scale / 128": the first word is enough here.
            dtypes.setdefault(name, []).append(" ".join(row["dtype"].split(" + ")[0].split()))
    return _with_total({n: (size, _join(dtypes[n])) for n, size in sizes.items()})


def _wire(collectives):
    """(bytes, dtype) by collective, and their sum; what repeats says so."""
    every = ", every micro-batch"
    return _with_total({
        c["what"].split(" (")[0].split(",")[0]:
            (c["bytes_per_step"], c["dtype"] + (every if c["what"].endswith(every) else ""))
        for c in collectives if c["bytes_per_step"]})


def _with_total(parts):
    return {**parts, "total": (sum(size for size, _ in parts.values()), "")}


def _join(words):
    return ", ".join(dict.fromkeys(words))


def _bars(plt, runs, key, title, path):
    """One group of bars per name; ``run[key]`` maps names to (bytes, dtype)."""
    names = [n for n in dict.fromkeys(n for r in runs for n in r[key]) if n != "total"] + ["total"]
    figure, axis = plt.subplots(figsize=(9, 1.2 + 0.3 * len(names) * (len(runs) + 0.5)))
    for i, run in enumerate(runs):
        parts = [(n * (len(runs) + 1) + i, *run[key][name]) for n, name in enumerate(names)
                 if name in run[key]]
        bars = axis.barh([place for place, _, _ in parts], [size / 2**20 for _, size, _ in parts],
                         height=0.85, color=run["color"], alpha=0.8, label=run["name"])
        axis.bar_label(bars, [f" {size / 2**20:.2f} {dtype}" for _, size, dtype in parts],
                       fontsize=8)
    axis.set_yticks([n * (len(runs) + 1) + (len(runs) - 1) / 2 for n in range(len(names))], names)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.25 * max(size for r in runs for size, _ in r[key].values()) / 2**20)
    axis.set_xlabel("MiB")
    axis.set_title(title)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=len(runs))
    return _save(plt, figure, path)


def _save(plt, figure, path):
    figure.set_layout_engine("constrained")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
