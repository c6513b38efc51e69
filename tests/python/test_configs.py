"""Configs and models: what the model is decides, "auto" is filled, all mistakes are told at once."""

import logging
import pickle

import pytest
import torch
from ranks import run_ranks
from torch import nn

import zerofp8
from zerofp8 import _C


def start(config, dtype=torch.float32, **arguments):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 64), nn.Linear(64, 8)).to(dtype)
    return zerofp8.initialize(model, torch.optim.AdamW(model.parameters()), config, **arguments)


def step(model, optimizer):
    dtype = next(model.parameters()).dtype
    loss = model(torch.ones(4, 96, dtype=dtype)).float().square().mean()
    (optimizer.backward(loss) if optimizer.settings.loss_scaling else loss.backward())
    return optimizer.step()


def flags(name, **more):
    return {name: {"enabled": True}, **more}


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("dtype, config, runs", [
    (torch.float32, flags("bf16"), "fp32"), (torch.float32, flags("fp16"), "fp32"),
    (torch.float32, {}, "fp32"), (torch.bfloat16, {}, "bf16"), (torch.float16, {}, "fp16"),
    (torch.bfloat16, {"bf16": {"enabled": False}}, "bf16"),
    (torch.bfloat16, flags("bf16"), "bf16"), (torch.float16, flags("fp16"), "fp16"),
    (torch.float32, {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, "fp32"),
    (torch.bfloat16, {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, "bf16"),
    (torch.float16, {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, "fp16")])
def test_the_models_dtype_is_what_the_plan_says(dtype, config, runs, stage, level):
    config = {**config, "zero_optimization": {"stage": stage}, "zerofp8": {"opt_level": level}}
    model, optimizer = start(config, dtype)
    assert optimizer.settings.weight == runs
    rows = {row["name"]: row for row in optimizer.plan.as_dict()["rows"]}
    elements = sum(p.numel() for p in model.parameters())
    assert rows["weight"]["dtype"] == runs
    assert rows["weight"]["bytes"] == elements * dtype.itemsize
    allocated = optimizer.plan.allocated_bytes
    assert optimizer.plan.state_bytes == sum(allocated.values()) - allocated.get("transient", 0)
    assert optimizer.settings.loss_scaling == ("fp16" in (runs, *(k for k, v in config.items()
                                                                  if v == {"enabled": True})))
    before = [p.detach().clone() for p in model.parameters()]
    assert step(model, optimizer).applied
    assert all((a != b).any() for a, b in zip(before, model.parameters()))


@pytest.mark.parametrize("master", ["none", "bits8", "bits16", "fp32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp32_parameters_beside_a_16_bit_model_are_planned_as_they_are(dtype, master):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 64).to(dtype), nn.LayerNorm(64))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = zerofp8.initialize(model, optimizer,
                                          {"zerofp8": {"opt_level": "O2", "master_weights": master}})
    rows = {row["name"]: row["bytes"] for row in optimizer.plan.as_dict()["rows"]}
    assert rows["weight"] == 2 * (96 * 64 + 64)
    assert rows["weight of fp32 parameters"] == 4 * 128
    allocated = optimizer.plan.allocated_bytes
    assert optimizer.plan.state_bytes == sum(allocated.values()) - allocated.get("transient", 0)
    assert rows["master weight"] == allocated.get("master", 0)


def test_a_flag_above_an_fp32_model_is_said(caplog):
    with caplog.at_level(logging.WARNING, "zerofp8"):
        _, optimizer = start(flags("bf16"))
    assert "/bf16/enabled" in caplog.text and "trained as fp32" in caplog.text
    assert "trained as fp32" in str(optimizer.plan)


@pytest.mark.parametrize("flag, dtype", [("bf16", torch.float16), ("fp16", torch.bfloat16)])
def test_a_flag_of_another_16_bit_dtype_is_an_error(flag, dtype):
    with pytest.raises(zerofp8.ConfigError, match=f"/{flag}/enabled: given true, but the model"):
        start(flags(flag), dtype)


def test_auto_without_a_trainer(caplog):
    config = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
              "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
              "bf16": {"enabled": "auto"}, "steps_per_print": float("inf"),
              "optimizer": {"type": "AdamW", "params": {
                  "lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
              "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}},
              "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto",
                                    "stage3_prefetch_bucket_size": "auto"}}
    with caplog.at_level(logging.WARNING, "zerofp8"):
        model, optimizer = start(config, torch.bfloat16)
    assert step(model, optimizer).applied
    assert optimizer.settings.gradient_clipping == 0
    for part in ("/gradient_clipping 0", "/zero_optimization/reduce_bucket_size 500000000"):
        assert part in caplog.text
    assert "/optimizer" not in caplog.text  # the template says these


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -float("inf")])
def test_non_finite_numbers(value):
    _, optimizer = start({"steps_per_print": value, "wandb": {"x": [value]}})
    assert optimizer.settings.stage == 0
    with pytest.raises(zerofp8.ConfigError) as error:
        start({"gradient_clipping": value})
    assert error.value.pointer == "/gradient_clipping"


def test_all_mistakes_of_a_config_are_told():
    with pytest.raises(zerofp8.ConfigError) as caught:
        start({"gradient_acumulation_dtype": "fp32", "bf16": {"enabled": "true"},
               "zero_optimization": {"stage": 3, "reduce_bucket_size": -1},
               "optimizer": {"params": {"amsgrad": True}}})
    error = caught.value
    assert error.pointer == "/gradient_acumulation_dtype" and error.given
    for path in ("/bf16/enabled", "/zero_optimization/reduce_bucket_size",
                 "/optimizer/params/amsgrad", "/zero_optimization/stage"):
        assert f"\n{path}: given" in str(error)
    assert len(error.others) == 4
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    with pytest.raises(zerofp8.UnsupportedError) as caught:
        start({"zero_optimization": {"stage": 3}})
    assert caught.value.others == []


def test_a_level_in_ms_amps_section():
    config = {"msamp": {"enabled": True, "opt_level": "O2"}, "bf16": {"enabled": True}}
    assert start(config, torch.bfloat16)[1].settings.opt_level == "O2"
    config["msamp"]["enabled"] = False
    assert start(config, torch.bfloat16)[1].settings.opt_level == "O0"
    with pytest.raises(zerofp8.ConfigError, match="/msamp/opt_level"):
        _C.resolve(_C.Config.parse('{"msamp": {"enabled": true, "opt_level": "O1"}, '
                                   '"zerofp8": {"opt_level": "O2"}}'))


def temporaries(rank):
    found = []
    for level in ("O0", "O1", "O2"):
        for stage in (0, 1, 2):
            for wire in ("fp32", "bf16", "fp8"):
                torch.manual_seed(0)
                model = nn.Linear(256, 256, bias=False).to(torch.bfloat16)
                model, optimizer = zerofp8.initialize(
                    model, torch.optim.AdamW(model.parameters()),
                    {"zero_optimization": {"stage": stage},
                     "zerofp8": {"gradient_communication_dtype": wire}}, opt_level=level)
                model(torch.ones(1, 256, dtype=torch.bfloat16)).sum().backward()
                optimizer.step()
                found.append((f"{level} {stage} {wire}", optimizer.plan.allocated_bytes["transient"],
                              optimizer.plan.as_dict()["temporary_bytes"]))
    return found


def test_temporaries_are_about_what_the_plan_says():
    for case, counted, planned in run_ranks(2, temporaries)[0]:
        most = planned["per_bucket"] + planned["weights"]
        assert planned["per_bucket"] * 0.99 <= counted <= most * 1.05 + 2048, (case, counted, planned)
