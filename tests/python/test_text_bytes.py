"""Files with bytes that are not UTF-8: an error that says which file, and nothing is changed.

A damaged ``latest`` is no error: the newest complete checkpoint is loaded, and the log says so.
"""

import logging

import pytest
import torch
from torch import nn

import zerofp8


def trained():
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    model, optimizer = zerofp8.initialize(
        model, torch.optim.AdamW(model.parameters(), lr=0.1), {})
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("name", ["index.json", "model-00000.json"])
def test_a_byte_that_is_no_text(tmp_path, name):
    model, optimizer = trained()
    optimizer.save(tmp_path)
    weights = [p.detach().clone() for p in model.parameters()]
    path = next(tmp_path.rglob(name))
    good = path.read_bytes()
    places = range(0, len(good), max(1, len(good) // 40))
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    changed = [p.detach().clone() for p in model.parameters()]
    for at in places:
        path.write_bytes(good[:at] + b"\xff" + good[at + 1:])
        with pytest.raises(zerofp8.CheckpointError) as error:
            optimizer.load(tmp_path)
        str(error.value).encode()
        assert all(map(torch.equal, changed, model.parameters()))
        assert optimizer.applied_steps == 2
    path.write_bytes(good)
    optimizer.load(tmp_path)
    assert all(map(torch.equal, weights, model.parameters()))


def test_latest(tmp_path, caplog):
    model, optimizer = trained()
    optimizer.save(tmp_path)
    weights = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    (tmp_path / "latest").write_bytes(b"step-0000\xff001\n")
    with caplog.at_level(logging.WARNING, "zerofp8"):
        optimizer.load(tmp_path)
    assert all(map(torch.equal, weights, model.parameters())) and optimizer.applied_steps == 1
    assert any("step-0000\\xff001" in r.getMessage() for r in caplog.records)


def test_a_config_with_such_a_byte(tmp_path):
    path = tmp_path / "ds_config.json"
    for text in (b'{"zero_optimization": {"st\xffage": 1}}', b'{"\xe4": 1}', b"\xff"):
        path.write_bytes(text)
        model = nn.Linear(2, 2)
        with pytest.raises(zerofp8.ConfigError) as error:
            zerofp8.initialize(model, torch.optim.AdamW(model.parameters()), str(path))
        str(error.value).encode()
