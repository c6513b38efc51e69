"""optimizer.state and torch's hooks around state_dict and load_state_dict."""

import pytest
import torch
from ranks import run_ranks
from reference import loss_of, seeded_model

import zerofp8

KINDS = ("step_pre", "step_post", "state_dict_pre", "state_dict_post", "load_state_dict_pre",
         "load_state_dict_post")


def with_hooks(kind, seen, on_template):
    model = seeded_model()
    template = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = template
    if kind == "zerofp8" and not on_template:
        model, optimizer = zerofp8.initialize(model, template, {})
    handles = [getattr(optimizer, f"register_{name}_hook")(
        lambda *given, name=name: seen.append((name, len(given)))) for name in KINDS]
    optimizer.register_state_dict_post_hook(lambda o, saved: {**saved, "ema": 0.5})
    optimizer.register_load_state_dict_pre_hook(lambda o, saved: seen.append(saved.pop("ema")))
    if kind == "zerofp8" and on_template:
        model, optimizer = zerofp8.initialize(model, template, {})
    return model, optimizer, handles


@pytest.mark.parametrize("on_template", [False, True])
def test_hooks_run_as_torch_runs_them(on_template):
    ran = {}
    for kind in ("torch", "zerofp8"):
        seen = ran[kind] = []
        model, optimizer, handles = with_hooks(kind, seen, on_template)
        loss_of(model, 0, 0, 0).backward()
        optimizer.step()
        saved = optimizer.state_dict()
        assert saved["ema"] == 0.5
        optimizer.load_state_dict(saved)
        assert saved["ema"] == 0.5  # the hook has a copy
        for handle in handles:
            handle.remove()
        optimizer.load_state_dict(optimizer.state_dict())
    assert ran["zerofp8"] == ran["torch"] and len(ran["torch"]) == 8


def test_state_answers_from_the_start_and_is_read_only():
    model = seeded_model(torch.bfloat16, width=80)
    model, optimizer = zerofp8.initialize(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), {"bf16": {"enabled": True}},
        opt_level="O2")
    weight = model[2].weight
    assert len(optimizer.state) == 6 and set(optimizer.state) == set(model.parameters())
    assert weight in optimizer.state and torch.nn.Parameter(weight) not in optimizer.state
    state = optimizer.state[weight]
    assert {"step", "exp_avg", "exp_avg_sq", "master"} < set(state) and state["step"] == 0
    assert torch.equal(state["exp_avg"], torch.zeros(80, 80))
    for step in range(2):
        loss_of(model, step, 0, 0).backward()
        optimizer.step()
    whole = optimizer.full_state(weight)
    assert state["step"] == 2
    for kind in ("exp_avg", "exp_avg_sq", "master"):
        assert torch.equal(state[kind], whole[kind]) and whole[kind].any()
    with pytest.raises(zerofp8.UnsupportedError, match="load_state_dict"):
        state["step"] = 0
    with pytest.raises(zerofp8.UnsupportedError, match="load_state_dict"):
        optimizer.state.clear()
    with pytest.raises(KeyError):
        optimizer.state[torch.zeros(1)]
    with pytest.raises(KeyError):
        state["momentum_buffer"]


def own_parts(rank):
    model = seeded_model(width=80)
    model, optimizer = zerofp8.initialize(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), {"zero_optimization": {"stage": 1}},
        timeout=30)
    loss_of(model, 0, 0, 0).backward()
    optimizer.step()
    own = [optimizer.state[p]["exp_avg"].flatten() for p in model.parameters()]
    return own, [optimizer.full_state(p, "exp_avg") for p in model.parameters()]


def test_state_is_what_is_here():
    (first, whole), (second, _) = run_ranks(2, own_parts)
    for a, b, expected in zip(first, second, whole):
        assert torch.equal(torch.cat([a, b]), expected.flatten())
    assert any(a.numel() and b.numel() for a, b in zip(first, second))
