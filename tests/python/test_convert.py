"""zerofp8 convert and inspect: between zerofp8's folders, torch's files and DeepSpeed's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launchers import HERE, run
from reference import loss_of, seeded_model
from test_torch_state import LR, close, ours, torchs, train

import zerofp8
from zerofp8 import convert, inspect, tensor_files


def make_folder(path, level="O2", dtype=torch.bfloat16):
    """A zerofp8 folder after 3 steps, its optimizer and the model's own file."""
    model = seeded_model(dtype, width=40)
    template = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    model, optimizer = ours(model, level=level, dtype=dtype, template=template)
    train(model, optimizer, range(3))
    optimizer.save(path / "folder")
    torch.save(model.state_dict(), path / "model.pt")
    return model, optimizer


@pytest.mark.parametrize("level,dtype", [("O0", torch.float32), ("O0", torch.bfloat16),
                                         ("O2", torch.bfloat16), ("O3", torch.bfloat16)])
def test_a_folder_as_torchs_files(tmp_path, level, dtype):
    model, optimizer = make_folder(tmp_path, level, dtype)
    assert convert.main([str(tmp_path / "folder"), "--order", str(tmp_path / "model.pt"),
                         "--weights", str(tmp_path / "w.safetensors"),
                         "--optimizer", str(tmp_path / "adamw.pt")]) == 0
    weights = tensor_files.load(tmp_path / "w.safetensors")
    saved = torch.load(tmp_path / "adamw.pt", weights_only=True)
    assert list(weights) == [n for n, _ in model.named_parameters()]
    for i, (name, p) in enumerate(model.named_parameters()):
        assert torch.equal(weights[name], optimizer.full_state(p, "master"))
        assert saved["state"][i]["step"] == 3
        for kind in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(saved["state"][i][kind], optimizer.full_state(p, kind))
    other = seeded_model(width=40)
    other.load_state_dict(weights)
    assert close(torchs(2, 3, saved, other)[2], train(model, optimizer, range(3, 5)), 3e-2)


def test_a_file_of_weights_in_bf16(tmp_path):
    model, _ = make_folder(tmp_path)
    convert.main([str(tmp_path / "folder"), "--weights", str(tmp_path / "w.pt"), "--dtype", "bf16"])
    weights = torch.load(tmp_path / "w.pt", weights_only=True)
    for name, p in model.named_parameters():
        assert (weights[name].float() - p.float()).abs().max() <= p.float().abs().max() * 2.0**-7


def test_torchs_files_as_a_folder(tmp_path):
    model, optimizer, _ = torchs(4)
    torch.save(optimizer.state_dict(), tmp_path / "adamw.pt")
    tensor_files.save(tmp_path / "model.safetensors", model.state_dict())
    expected = torchs(4, 4, optimizer.state_dict(), model)[2]
    assert convert.main([str(tmp_path / "adamw.pt"), "--model", str(tmp_path / "model.safetensors"),
                         "--zerofp8", str(tmp_path / "folder")]) == 0
    model, optimizer = ours(seeded_model(width=40, seed=3))
    optimizer.load(tmp_path / "folder")
    assert optimizer.applied_steps == 4 and optimizer.param_groups[0]["lr"] == LR
    assert close(train(model, optimizer, range(4, 8)), expected, 1e-4)


def deepspeeds(path, stage):
    result = run([sys.executable, HERE / "job_deepspeed_saving.py", path, str(stage)], timeout=150,
                 DS_ACCELERATOR="cpu", PYTHONPATH=os.pathsep.join(
                     [str(HERE), os.environ.get("PYTHONPATH", "")]))
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeeds_folder(tmp_path, stage):
    """Two files as of two ranks are made of the one; the numbers are DeepSpeed's own answers."""
    pytest.importorskip("deepspeed")
    deepspeeds(tmp_path, stage)
    expected = torch.load(tmp_path / "expected.pt", weights_only=True)
    split(tmp_path / "global_step3")
    assert convert.main([str(tmp_path), "--weights", str(tmp_path / "w.pt")]) == 2  # not trusted
    (tmp_path / "config.json").write_text('{"bf16": {"enabled": true}}')
    assert convert.main([str(tmp_path), "--trust", "--weights", str(tmp_path / "w.pt"),
                         "--optimizer", str(tmp_path / "adamw.pt"), "--zerofp8",
                         str(tmp_path / "folder"), "--model-dtype", "bf16",
                         "--config", str(tmp_path / "config.json")]) == 0
    weights = torch.load(tmp_path / "w.pt", weights_only=True)
    saved = torch.load(tmp_path / "adamw.pt", weights_only=True)
    model, optimizer = ours(seeded_model(width=40, seed=3), dtype=torch.bfloat16)
    optimizer.load(tmp_path / "folder")
    assert optimizer.applied_steps == 3
    for i, (name, p) in enumerate(model.named_parameters()):
        assert torch.equal(weights[name], expected[name]["fp32"])
        assert torch.equal(optimizer.full_state(p, "master"), expected[name]["fp32"])
        for kind in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(saved["state"][i][kind], expected[name][kind])
            assert torch.equal(optimizer.full_state(p, kind), expected[name][kind])


def split(folder):
    """The file of one rank as those of two ranks."""
    path = next(folder.glob("*_optim_states.pt"))
    saved = torch.load(path, weights_only=False)
    whole = saved["optimizer_state_dict"]
    for rank in range(2):
        part = {**whole, "single_partition_of_fp32_groups": [
            t.chunk(2)[rank].clone() for t in whole["single_partition_of_fp32_groups"]]}
        base = whole["base_optimizer_state"]
        part["base_optimizer_state"] = {**base, "state": {
            g: {k: v.chunk(2)[rank].clone() if k != "step" else v for k, v in e.items()}
            for g, e in base["state"].items()}}
        torch.save({**saved, "optimizer_state_dict": part},
                   folder / path.name.replace("rank_0_", f"rank_{rank}_", 1))


def test_a_universal_folder(tmp_path):
    model, optimizer, _ = torchs(4)
    saved = optimizer.state_dict()
    for i, (name, p) in enumerate(model.named_parameters()):
        place = tmp_path / "zero" / name
        place.mkdir(parents=True)
        torch.save({"param": p.detach().clone()}, place / "fp32.pt")
        torch.save(saved["state"][i]["step"], place / "step.pt")
        for kind in ("exp_avg", "exp_avg_sq"):
            torch.save({"param": saved["state"][i][kind]}, place / f"{kind}.pt")
    torch.save(model.state_dict(), tmp_path / "order.pt")
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    assert convert.main([str(tmp_path), "--order", str(tmp_path / "order.pt"),
                         "--zerofp8", str(tmp_path / "folder")]) == 0
    model, optimizer = ours(seeded_model(width=40, seed=3))
    optimizer.load(tmp_path / "folder")
    assert optimizer.applied_steps == 4
    for i, (name, p) in enumerate(model.named_parameters()):
        assert torch.equal(p, before[name])
        assert torch.equal(optimizer.full_state(p, "exp_avg"), saved["state"][i]["exp_avg"])


def told(capsys, *arguments):
    code = inspect.main([str(a) for a in arguments])
    output = capsys.readouterr()
    return code, output.out, output.err


def test_inspect(tmp_path, capsys):
    model, optimizer = make_folder(tmp_path)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()},
               tmp_path / "both.pt")
    code, text, _ = told(capsys, tmp_path / "folder", "--parameters")
    assert code == 0 and "3 applied" in text and "fp8_e4m3" in text and "2,365 elements" in text
    assert "4.weight  bf16 5x40  step 3" in text
    code, text, _ = told(capsys, tmp_path / "both.pt")
    assert code == 0 and "zerofp8's whole state" in text and "bfloat16 (6)" in text
    assert "lr 0.003" in text
    (tmp_path / "empty").mkdir()
    (tmp_path / "junk.pt").write_bytes(b"\xff\xfe junk")
    (tmp_path / "junk.safetensors").write_bytes(b"\xff\xfe junk that is none")
    for wrong in ("empty", "nowhere", "junk.pt", "junk.safetensors"):
        code, _, error = told(capsys, tmp_path / wrong)
        assert code == 2 and wrong in error, wrong
    (tmp_path / "folder" / "latest").write_bytes(b"step-\xff")
    assert told(capsys, tmp_path / "folder")[0] == 0


def test_errors_of_converting(tmp_path, capsys):
    model, optimizer = make_folder(tmp_path)
    torch.save(optimizer.state_dict(), tmp_path / "ours.pt")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    for source, text in (("ours.pt", "torch_state_dict"), ("weights.pt", "no state_dict of an opt"),
                         ("nowhere", "no such file")):
        assert convert.main([str(tmp_path / source), "--weights", str(tmp_path / "x.pt")]) == 2
        assert text in capsys.readouterr().err
    with pytest.raises(SystemExit):
        convert.main([str(tmp_path / "folder")])


def test_the_command_runs_them():
    beside = Path(sys.executable).with_name("zerofp8")  # of an environment that is not activated
    command = str(beside) if beside.exists() else "zerofp8"
    found = subprocess.run([command, "inspect", "--help"], capture_output=True, text=True,
                           timeout=100)
    assert found.returncode == 0 and "DeepSpeed folder" in found.stdout, found.stderr
