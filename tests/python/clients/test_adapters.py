"""peft's adapters, over plain and quantised frozen weights (torchao, bitsandbytes)."""

import pytest
import torch
import torch.distributed as dist

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")

import zerofp8  # noqa: E402
from client_runs import run_client  # noqa: E402
from small import ACCUMULATE, LR, Bytes, batches_of, llama  # noqa: E402

STEPS = 4


def quantised(model, kind):
    """The same with frozen weights in eight bits."""
    if kind == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
        quantize_(model.model, Int8WeightOnlyConfig())
    elif kind == "bitsandbytes":
        import bitsandbytes as bnb
        for layer in model.model.layers:
            old = layer.mlp.down_proj
            new = bnb.nn.Linear8bitLt(old.in_features, old.out_features, bias=False)
            new.load_state_dict(old.state_dict())
            layer.mlp.down_proj = new.requires_grad_(False)
    return model


def losses(rank, ranks, kind, level):
    model = quantised(llama().requires_grad_(False), kind)
    torch.manual_seed(3)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"],
                                                       init_lora_weights=False))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR)
    if level is not None:
        model, optimizer = zerofp8.initialize(
            model, optimizer, {"gradient_accumulation_steps": ACCUMULATE}, opt_level=level,
            loss_is_divided=True)
    data, losses = Bytes(), []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(ACCUMULATE):
            loss = model(**batches_of(data, step, micro, rank, ranks)).loss / ACCUMULATE
            loss.backward()
            losses.append(loss.item() * ACCUMULATE)
        if level is None and ranks > 1:  # torch's DDP cannot send torchao's weights
            for p in trained:
                dist.all_reduce(p.grad, dist.ReduceOp.SUM)
                p.grad /= ranks
        optimizer.step()
    return losses


@pytest.mark.parametrize("kind", ["plain", "torchao", "bitsandbytes"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_are_those_of_adamw(ranks, kind):
    if kind != "plain":
        pytest.importorskip(kind)
    theirs = run_client(ranks, losses, ranks, kind, None)
    for row, expected in zip(run_client(ranks, losses, ranks, kind, "O0"), theirs):
        assert row == pytest.approx(expected, abs=1e-4)


def trainable_too(rank, kind):
    """The error for quantised weights that are in the optimizer's groups."""
    model = quantised(llama(), kind)
    weight = model.model.layers[0].mlp.down_proj.weight
    try:
        zerofp8.initialize(model, torch.optim.AdamW([weight, model.lm_head.weight]), {})
    except zerofp8.ConfigError as error:
        return str(error)
    return "no error"


def test_quantised_weights_to_be_trained_are_refused_by_name():
    pytest.importorskip("torchao")
    for text in run_client(2, trainable_too, "torchao"):
        assert "model.layers.0.mlp.down_proj.weight" in text and "leave it out" in text
