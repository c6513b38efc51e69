#!/usr/bin/env python3
"""The main job as a user runs it: train, resume on other ranks, wrong input, a killed rank. usage: example_test.py TRAIN_GPT"""
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
TRAINER = ""
SMALL = ["--layers", "1", "--width", "32", "--context", "32", "--log-every", "1000"]
ENVIRONMENT = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMP_NUM_THREADS="1")


def command(ranks, config, *arguments):
    return ["mpirun", "-n", str(ranks), "--oversubscribe", TRAINER, "--config", str(config), *SMALL, *map(str, arguments)]


def run(ranks, config, *arguments, timeout=240):
    return subprocess.run(command(ranks, config, *arguments), env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout)


class Example(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.path = pathlib.Path(self.folder.name)

    def config(self, **changes):
        base = {"train_batch_size": 8, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0, "bf16": {"enabled": True},
                "zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
                "zerofp8": {"opt_level": "O2"}}
        base.update(changes)
        path = self.path / f"config{len(list(self.path.iterdir()))}.json"
        path.write_text(json.dumps(base))
        return path

    def results(self, ranks, config, *arguments):
        out = self.path / f"results{len(list(self.path.iterdir()))}.json"
        done = run(ranks, config, "--results", out, *arguments)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return json.loads(out.read_text())["runs"], done.stdout

    def test_shipped_config_trains_and_keeps_its_plan(self):
        runs, text = self.results(2, ROOT / "examples/mpi/ds_config.json", "--steps", 60, "--warmup", 5)
        ours, plain = runs
        for r in runs:
            self.assertLess(r["train_loss"], r["losses"][0] - 0.5)
        self.assertLess(abs(ours["losses"][-1] - plain["losses"][-1]), 0.05)
        self.assertEqual(ours["planned_state_bytes"], ours["counted_state_bytes"])
        self.assertEqual(ours["planned_wire_bytes"], ours["counted_wire_bytes"])
        self.assertNotIn("NOT AS PLANNED", text)
        try:
            import matplotlib  # noqa: F401: the plots are checked where it is installed
        except ImportError:
            return
        plots = self.path / "plots"
        results = max(self.path.glob("results*.json"))
        subprocess.run([sys.executable, ROOT / "scripts/plot_run.py", results, "--out", plots], check=True, timeout=120)
        self.assertEqual({p.name for p in plots.iterdir()}, {"loss.png", "memory.png", "wire.png"})

    def test_every_model_dtype_and_stage_trains(self):
        for model in ("fp32", "bf16", "fp16"):
            for stage in (0, 2):
                changes = {"bf16": {"enabled": model == "bf16"}, "fp16": {"enabled": model == "fp16"},
                           "zero_optimization": {"stage": stage}}
                with self.subTest(model=model, stage=stage):
                    runs, _ = self.results(2, self.config(**changes), "--steps", 40, "--warmup", 5, "--no-baseline")
                    self.assertLess(runs[0]["losses"][-1], runs[0]["losses"][0] - 0.5)
                    self.assertEqual(runs[0]["planned_state_bytes"], runs[0]["counted_state_bytes"])
                    self.assertEqual(runs[0]["planned_wire_bytes"], runs[0]["counted_wire_bytes"])

    def test_resume_gives_the_bits_of_an_unbroken_run(self):
        for ranks in (1, 2):
            config = self.config()
            save = self.path / f"checkpoints{ranks}"
            whole, _ = self.results(ranks, config, "--steps", 20, "--save", save, "--save-every", 10, "--no-baseline")
            (save / "latest").write_text("step-00000010\n")  # as if it had been killed after step 10
            rest, _ = self.results(ranks, config, "--steps", 20, "--resume", save, "--no-baseline")
            self.assertEqual(rest[0]["losses"], whole[0]["losses"][10:])
            self.assertEqual(rest[0]["validation_loss"], whole[0]["validation_loss"])

    def test_resume_on_another_number_of_ranks_goes_on(self):
        save = self.path / "checkpoints"
        first, _ = self.results(3, self.config(train_batch_size=12), "--steps", 30, "--save", save, "--no-baseline")
        then, _ = self.results(2, self.config(), "--steps", 34, "--resume", save, "--no-baseline")
        self.assertEqual(len(then[0]["losses"]), 4)
        self.assertLess(then[0]["losses"][0], first[0]["losses"][10])

    def test_bad_input_is_told_once_with_exit_code_2(self):
        done = run(2, self.config(gradient_acumulation_dtype="fp8"), "--steps", 1)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("/gradient_acumulation_dtype", done.stderr)
        self.assertIn("gradient_accumulation_dtype", done.stderr)
        self.assertEqual(done.stderr.count("train_gpt:"), 1)
        missing = run(2, self.path / "missing.json", "--steps", 1)
        self.assertEqual(missing.returncode, 2, missing.stderr)
        self.assertIn("missing.json", missing.stderr)
        for wrong in (["--steps", "zero"], ["--steps", "0"], ["--context", "10000000"], ["--unknown"]):
            self.assertEqual(run(1, self.config(), *wrong).returncode, 2, wrong)

    def test_missing_data_and_checkpoints_are_named(self):
        data = run(2, self.config(), "--steps", 1, "--data", self.path / "absent.txt")
        self.assertEqual(data.returncode, 2, data.stderr)
        self.assertIn("absent.txt", data.stderr)
        resume = run(2, self.config(), "--steps", 1, "--no-baseline", "--resume", self.path / "absent")
        self.assertEqual(resume.returncode, 1)
        self.assertIn("absent", resume.stderr)

    def test_a_resumed_run_counts_its_own_bytes_and_ends_with_the_steps(self):
        saved = run(2, self.config(), "--steps", 3, "--no-baseline", "--save", self.path / "kept")
        self.assertEqual(saved.returncode, 0, saved.stderr)
        more = run(2, self.config(), "--steps", 5, "--no-baseline", "--resume", self.path / "kept")
        self.assertEqual(more.returncode, 0, more.stderr)
        self.assertNotIn("NOT AS PLANNED", more.stdout + more.stderr)
        done = run(2, self.config(), "--steps", 3, "--no-baseline", "--resume", self.path / "kept")
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("more than the 3 of the checkpoint", done.stderr)

    def started(self, *arguments):
        process = subprocess.Popen(command(2, self.config(), "--steps", 1000000, "--no-baseline", *arguments), env=ENVIRONMENT,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True)
        self.addCleanup(process.stderr.close)
        return process

    def ends(self, process, within):
        try:
            process.communicate(timeout=within)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            self.fail(f"still running {within} s later")
        return process.returncode

    def test_control_c_ends_all_ranks(self):
        process = self.started()
        time.sleep(4)
        process.send_signal(signal.SIGINT)
        self.assertNotEqual(self.ends(process, 30), 0)

    def test_a_killed_rank_ends_the_run_and_the_last_checkpoint_loads(self):
        save = self.path / "checkpoints"
        process = self.started("--save", save, "--save-every", 20)
        deadline = time.time() + 60
        while not (save / "latest").exists() and time.time() < deadline:
            time.sleep(0.1)
        self.assertTrue((save / "latest").exists())
        children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
        self.assertTrue(children)
        os.kill(int(children[0]), signal.SIGKILL)
        self.assertNotEqual(self.ends(process, 60), 0)
        step = int((save / "latest").read_text().split("-")[1])
        runs, _ = self.results(2, self.config(), "--steps", step + 2, "--resume", save, "--no-baseline")
        self.assertEqual(len(runs[0]["losses"]), 2)


if __name__ == "__main__":
    TRAINER = sys.argv.pop(1)
    unittest.main(verbosity=2)
