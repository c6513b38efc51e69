#!/usr/bin/env python3
"""Trains the byte GPT with plain FP32 AdamW and with O0 to O3 for several seeds, and holds the levels' validation
losses against FP32's. Writes docs/results/byte_gpt.{json,md,png}; exit code 1 if a level is worse than allowed.

    scripts/loss_study.py --trainer build/release/examples/mpi/train_gpt
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
ALLOWED = {"O1": 0.004, "O2": 0.004, "O3": 0.006}  # mean over seeds, validation loss above FP32 AdamW's
BASE = {
    "train_batch_size": 16,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}},
}
VARIANTS = {
    "fp32 AdamW": None,
    "O0": {"opt_level": "O0"},
    "O1": {"opt_level": "O1"},
    "O2": {"opt_level": "O2"},
    "O2 without master": {"opt_level": "O2", "master_weights": "none"},
    "O3": {"opt_level": "O3"},
}


def run(arguments, name, seed, folder):
    """One training run; returns its entry of the results JSON."""
    config = dict(BASE, gradient_accumulation_steps=arguments.micro_batches)
    if VARIANTS[name] is not None:
        config["zerofp8"] = dict(VARIANTS[name], seed=seed)
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    out = folder / "result.json"
    command = ["mpirun", "-n", str(arguments.ranks), "--oversubscribe", arguments.trainer, "--config", str(path),
               "--steps", str(arguments.steps), "--seed", str(seed), "--results", str(out), "--quiet",
               "--only-baseline" if VARIANTS[name] is None else "--no-baseline"]
    environment = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMP_NUM_THREADS="1")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=arguments.timeout)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\nfailed with {done.returncode}:\n{done.stdout}{done.stderr}")
    return json.loads(out.read_text())["runs"][0]


def figure(value, digits):
    """Empty for what the plain FP32 run does not report."""
    return f"{value:.{digits}f}" if value else ""


def table(results, arguments):
    """Markdown of the study."""
    base = {r["seed"]: r for r in results if r["variant"] == "fp32 AdamW"}
    lines = ["# Byte-level GPT: loss by opt level", "",
             f"Made by `scripts/loss_study.py`: {arguments.steps} steps, {len(base)} seeds, {arguments.ranks} ranks, "
             f"{arguments.micro_batches} micro-batches, bf16 model ({results[0]['parameters']:,} parameters), "
             "text: the Python standard library. FP32 AdamW is LibTorch's, on an FP32 model and the same batches. "
             "Losses in nats per byte; differences are paired by seed.", "",
             "| run | training | validation | validation - FP32, mean | each seed | allowed | bytes per parameter | gradient + weight wire, kB per step |",
             "|---|---|---|---|---|---|---|---|"]
    bad = []
    for name in VARIANTS:
        rows = [r for r in results if r["variant"] == name]
        gaps = [r["validation_loss"] - base[r["seed"]]["validation_loss"] for r in rows]
        mean = statistics.mean(gaps)
        allowed = ALLOWED.get(name)
        if allowed is not None and mean > allowed + arguments.slack:
            bad.append(f"{name}: {mean:+.4f} above FP32 AdamW, allowed {allowed}")
        lines.append(f"| {name} | {statistics.mean(r['train_loss'] for r in rows):.4f} "
                     f"| {statistics.mean(r['validation_loss'] for r in rows):.4f} | {mean:+.4f} "
                     f"| {', '.join(f'{g:+.4f}' for g in gaps)} | {'' if allowed is None else f'+{allowed}'} "
                     f"| {figure(rows[0]['bytes_per_parameter'], 3)} | {figure(rows[0]['counted_wire_bytes'] / 1e3, 1)} |")
    spread = statistics.pstdev(r["validation_loss"] for r in base.values()) if len(base) > 1 else 0.0
    lines += ["", f"Standard deviation of FP32 AdamW's own validation loss over seeds: {spread:.4f}.", ""]
    return "\n".join(lines), bad


def update_readme(text):
    """The table between the markers of README.md."""
    rows = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    path = ROOT / "README.md"
    before, rest = path.read_text().split("<!-- results:begin -->")
    after = rest.split("<!-- results:end -->")[1]
    path.write_text(f"{before}<!-- results:begin -->\n{rows}\n<!-- results:end -->{after}")


def plot(results, path):
    """Mean training loss of each variant, smoothed, as its gap to FP32 AdamW."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    mean = {name: np.mean([r["losses"] for r in results if r["variant"] == name], axis=0) for name in VARIANTS}
    kernel = np.ones(50) / 50
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 7), sharex=True)
    for name, losses in mean.items():
        x = np.arange(49, len(losses))
        top.plot(x, np.convolve(losses, kernel, "valid"), label=name, linewidth=1)
        bottom.plot(x, np.convolve(losses - mean["fp32 AdamW"], kernel, "valid"), label=name, linewidth=1)
    top.set_ylabel("training loss, nats per byte")
    bottom.set_ylabel("difference to FP32 AdamW")
    bottom.set_xlabel("step (mean of 50 steps and all seeds)")
    bottom.set_ylim(-0.03, 0.03)
    for axis in (top, bottom):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", default=str(ROOT / "build/release/examples/mpi/train_gpt"))
    parser.add_argument("--out", default=str(ROOT / "docs/results/byte_gpt"), help="path without ending")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--readme", action="store_true", help="put the table into README.md, too")
    parser.add_argument("--slack", type=float, default=0.0, help="added to what is allowed: for short runs, which are noisier")
    parser.add_argument("--timeout", type=int, default=900, help="seconds per run")
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(arguments.seeds):
            for name in VARIANTS:
                result = run(arguments, name, seed, pathlib.Path(folder))
                result.update(variant=name, seed=seed)
                result.pop("plan", None)
                results.append(result)
                print(f"seed {seed} {name:<18} training {result['train_loss']:.4f} "
                      f"validation {result['validation_loss']:.4f}", flush=True)
    text, bad = table(results, arguments)
    pathlib.Path(arguments.out + ".md").write_text(text)
    if arguments.readme:
        update_readme(text)
    plot(results, arguments.out + ".png")
    for result in results:  # every tenth point is enough for a record
        result["losses"] = [round(x, 5) for x in result["losses"][::10]]
        result["norms"] = [round(x, 5) for x in result["norms"][::10]]
    pathlib.Path(arguments.out + ".json").write_text(json.dumps({"arguments": vars(arguments) | {"trainer": "train_gpt", "out": ""},
                                                               "runs": results}, indent=1) + "\n")
    print(text)
    if bad:
        sys.exit("\n".join(bad))


if __name__ == "__main__":
    main()
