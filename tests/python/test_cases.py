"""Cases from public bug reports, through the hook; the number is the case's name."""

import math

import pytest
import torch
from ranks import run_ranks
from torch import nn

import zerofp8


class One(nn.Module):
    """Parameters whose gradient is what the loss multiplies them with."""

    def __init__(self, *values, dtype=torch.float32):
        super().__init__()
        self.p = nn.ParameterList([torch.tensor(v, dtype=dtype) for v in values])

    def push(self, optimizer, *gradients):
        terms = [(p * torch.tensor(g, dtype=p.dtype)).sum()
                 for p, g in zip(self.p, gradients) if g is not None]
        optimizer.backward(sum(terms))


def start(model, config, **options):
    keywords = {"lr": 0.1, "weight_decay": 0, **options.pop("adam", {})}
    template = torch.optim.AdamW(model.parameters(), **keywords)
    return zerofp8.initialize(model, template, config, timeout=60, **options)[1]


BF16 = {"bf16": {"enabled": True}}


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "fp8", None])
def test_case_5(stage, dtype):
    config = {**BF16, "zero_optimization": {"stage": stage}, "gradient_accumulation_steps": 2,
              "zerofp8": {"gradient_communication_dtype": "fp32"}}
    if dtype:
        config["gradient_accumulation_dtype"] = dtype
    model = One([0.0], dtype=torch.bfloat16)
    optimizer = start(model, config, loss_is_divided=True)
    model.push(optimizer, [256.0])
    model.push(optimizer, [1.0])
    found = optimizer.full_gradient(model.p[0]).item()
    expected = {"fp32": 257.0, None: 257.0, "bf16": 256.0}
    if dtype in expected:
        assert found == expected[dtype]
    else:
        assert found == pytest.approx(257.0, rel=0.0625)
    assert optimizer.settings.accumulation == {"fp8": "fp8_e4m3", None: "fp32"}.get(dtype, dtype)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "fp8"])
def test_case_6(dtype):
    model = One([0.0], dtype=torch.bfloat16)
    optimizer = start(model, {**BF16, "gradient_accumulation_steps": 3,
                              "gradient_accumulation_dtype": dtype}, loss_is_divided=True)
    for g in (1.0, 2.0, 4.0):
        model.push(optimizer, [g])
        assert all(p.grad is None or not p.grad.untyped_storage().nbytes() > 2 for p in model.p)
        # Nothing to clear, so that DeepSpeed's hook for it has nothing to do [deepspeed_cases.py].
    assert optimizer.full_gradient(model.p[0]).item() == pytest.approx(
        7.0, rel=0.0625 if dtype == "fp8" else 0)
    optimizer.step()


def case_7(rank, sharded):
    model = One([0.0])
    optimizer = start(model, {"gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1},
                              "gradient_accumulation_dtype": {"dtype": "fp32",
                                                              "sharded": sharded}},
                      loss_is_divided=False)
    for g in ((1.0, 3.0), (5.0, 7.0))[rank]:
        model.push(optimizer, [g])
    return optimizer.full_gradient(model.p[0]).item()


@pytest.mark.parametrize("sharded", [False, True])
def test_case_7(sharded):
    assert run_ranks(2, case_7, sharded) == [4.0, 4.0]


def case_8(rank, wire):
    config = dict(BF16, zero_optimization={"stage": 1})
    if wire:
        config["communication_data_type"] = wire
    model = One([0.0] * 128, dtype=torch.bfloat16)
    optimizer = start(model, config)
    model.push(optimizer, [99840.0] * 128)
    gradient = optimizer.full_gradient(model.p[0])
    report = optimizer.step()
    return gradient[0].item(), report.applied, report.bad_parameter, report.wire


def test_case_8():
    for gradient, applied, _, wire in run_ranks(2, case_8, None):
        assert gradient == 99840.0 and applied
        assert wire["fp32"] >= 4 * 128
    for _, applied, bad, wire in run_ranks(2, case_8, "fp16"):
        assert not applied and bad == "p.0" and wire["fp16"] == 2 * 4 * 128  # a shard is 4 blocks


def case_12(rank, deferred):
    model = One([0.0])
    a = 4
    optimizer = start(model, {"gradient_accumulation_steps": a}, loss_is_divided=False)
    for i in range(a):
        g = [0.1 * (i + 1) + rank]
        if deferred and i < a - 1:
            with optimizer.no_sync():
                model.push(optimizer, g)
        else:
            model.push(optimizer, g)
    return optimizer.full_gradient(model.p[0]).item()


def test_case_12():
    model = One([0.0])
    optimizer = start(model, {})
    model.push(optimizer, [1.0])
    model.push(optimizer, [2.0])
    assert optimizer.full_gradient(model.p[0]).item() == 3.0
    assert run_ranks(2, case_12, True) == run_ranks(2, case_12, False)


def test_case_16(caplog):
    model = One([1.0] * 3, dtype=torch.bfloat16)
    optimizer = start(model, {**BF16, "zerofp8": {"master_weights": "fp32"}}, adam={"lr": 0.0})
    lrs = []
    for attempt in range(4):
        lr = 1e-3 * optimizer.applied_steps / 4
        optimizer.param_groups[0]["lr"] = lr
        before = optimizer.full_state(model.p[0])
        model.push(optimizer, [1.0, math.inf if attempt == 1 else 1.0, 1.0])
        report = optimizer.step()
        assert report.applied == (attempt != 1)
        if not report.applied:
            after = optimizer.full_state(model.p[0])
            assert all(torch.equal(torch.as_tensor(after[k]), torch.as_tensor(before[k]))
                       for k in before)
            continue
        lrs.append(lr)
    assert lrs == [0, 2.5e-4, 5e-4] and optimizer.skipped_steps == 1
    assert optimizer.full_state(model.p[0])["step"] == 3
    lines = [x for x in caplog.messages if "skipped" in x]
    assert len(lines) == 1 and "p.0" in lines[0] and "step 2" in lines[0]


def case_19(rank):
    model = One([0.0, 0.0])
    optimizer = start(model, {})
    model.push(optimizer, [3.0, 4.0])
    return optimizer.step().grad_norm


def test_case_19_c():
    assert run_ranks(4, case_19) == [5.0] * 4


def case_19_b(rank):
    import torch.distributed as dist
    tensor = dist.new_group(list(range(8)))
    alone = [dist.new_group([r]) for r in range(8)][rank]
    model = One([0.0] * 4, [0.0])
    model.p[1].tensor_model_parallel = True
    optimizer = start(model, {}, data_parallel_group=alone, tensor_parallel_group=tensor)
    model.push(optimizer, [3.0] * 4, [1.0])
    return optimizer.step().grad_norm


def test_case_19_b_replicated_parameter_counts_once():
    assert run_ranks(8, case_19_b) == [pytest.approx(6.633250, rel=1e-6)] * 8


def norms_of_parameters(rank, stage, level):
    model = One([0.0] * 5000, [0.0] * 3, [0.0])
    optimizer = start(model, {"zero_optimization": {"stage": stage}}, opt_level=level)
    model.push(optimizer, [3.0 + 2 * rank] * 5000, [0.0, 3.0, 4.0], [float("nan") if rank else 1.0])
    found = optimizer.grad_norms()
    assert list(found) == [n for n, _ in model.named_parameters()]
    report = optimizer.step()
    assert not report.applied and "p.2" in report.skip_reason
    return list(found.values())


@pytest.mark.parametrize("stage, level", [(0, "O0"), (1, "O2"), (2, "O1")])
def test_norms_by_parameter(stage, level):
    for found in run_ranks(2, norms_of_parameters, stage, level):
        assert found[:2] == pytest.approx([4 * 5000**0.5, 5.0], rel=0 if level == "O0" else 0.03)
        assert found[2] != found[2]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_case_22(stage):
    config = {"fp16": {"enabled": True, "initial_scale_power": 12}, "gradient_clipping": 1,
              "zero_optimization": {"stage": stage}}
    model = One([0.0, 0.0], dtype=torch.float16)
    optimizer = start(model, config)
    model.push(optimizer, [3.0, 4.0])
    report = optimizer.step()
    assert (report.grad_norm, report.loss_scale) == (5.0, 4096)
    assert report.clip_coefficient == pytest.approx(0.19999996, abs=1e-8)
    assert report.clipped_norm == pytest.approx(0.9999998, abs=1e-7)


def case_24(rank, with_empty):
    sizes = [8, 0, 24, 0, 5] if with_empty else [8, 24, 5]
    model = One(*([1.0] * n for n in sizes))
    if with_empty:
        model.p.append(nn.Parameter(torch.zeros(0, 8)))
    optimizer = start(model, {"zero_optimization": {"stage": 1}})
    for step in range(3):
        terms = [(p * p).sum() * (step + 1) for p in model.p]
        optimizer.backward(sum(terms))
        assert optimizer.step().applied
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert not with_empty or model.p[-1].shape == (0, 8)
    return [p.detach().tolist() for p in model.p if p.numel()]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_case_24(ranks):
    assert run_ranks(ranks, case_24, True) == run_ranks(ranks, case_24, False)


def case_27(rank, sharded):
    config = {"zero_optimization": {"stage": 1},
              "gradient_accumulation_dtype": {"dtype": "fp32", "sharded": sharded}}
    model = One([1.0], [1.0], [1.0])
    optimizer = start(model, config, adam={"weight_decay": 0.1})
    # (a) p.0 is unused everywhere, (b) p.1 has a gradient on rank 0 only
    if rank == 0:
        model.push(optimizer, None, [1.0], [1.0])
    else:
        model.push(optimizer, None, None, [1.0])
    middle = optimizer.full_gradient(model.p[1]).item()
    report = optimizer.step()
    unused = optimizer.full_state(model.p[0])
    return model.p[0].item(), middle, report.unused_parameters, unused["step"]


@pytest.mark.parametrize("sharded", [False, True])
def test_case_27_unused(sharded):
    assert run_ranks(2, case_27, sharded) == [(1.0, 0.5, 1, 0)] * 2


def frozen_stage(rank):
    import torch.distributed as dist
    pipeline, alone = dist.new_group([0, 1]), [dist.new_group([r]) for r in range(2)][rank]
    model = One([3.0, 4.0])
    model.requires_grad_(rank == 1)
    optimizer = start(model, {}, pipeline_parallel_group=pipeline, data_parallel_group=alone)
    if rank == 1:
        model.push(optimizer, [3.0, 4.0])
    report = optimizer.step()
    return report.applied, report.grad_norm


def test_case_27_frozen_stage():
    assert run_ranks(2, frozen_stage) == [(True, 5.0)] * 2


def test_case_27_frozen_later():
    model = One([1.0, 2.0], [1.0])
    optimizer = start(model, {})
    for _ in range(5):
        model.push(optimizer, [1.0, 0.5], [1.0])
        optimizer.step()
    model.p[0].requires_grad_(False)
    before = optimizer.full_state(model.p[0])
    saved = optimizer.state_dict()
    model.push(optimizer, None, [1.0])
    optimizer.step()
    optimizer.load_state_dict(saved)
    model.p[0].requires_grad_(True)
    after = optimizer.full_state(model.p[0])
    assert all(torch.equal(torch.as_tensor(before[k]), torch.as_tensor(after[k])) for k in before)


@pytest.mark.parametrize("scale_keys", [{"initial_scale_power": 2, "loss_scale_window": 4}])
def test_case_39_d_loss_scale_window(scale_keys):
    config = {"fp16": {"enabled": True, **scale_keys}}
    model = One([1.0], dtype=torch.float16)
    optimizer = start(model, config)
    for _ in range(3):
        model.push(optimizer, [1.0])
        optimizer.step()
    saved = optimizer.state_dict()
    again = One([1.0], dtype=torch.float16)
    optimizer = start(again, config)
    again.load_state_dict(model.state_dict())
    optimizer.load_state_dict(saved)
    again.push(optimizer, [1.0])
    assert optimizer.step().next_loss_scale == 8


def case_44(rank, bucket, overlap):
    torch.manual_seed(0)
    model = One(torch.randn(300).tolist(), torch.randn(50).tolist(), torch.randn(7).tolist())
    config = {"zero_optimization": {"stage": 2, "reduce_bucket_size": bucket,
                                    "overlap_comm": overlap},
              "zerofp8": {"opt_level": "O1"}}
    optimizer = start(model, config, adam={"lr": 1e-2})
    generator = torch.Generator().manual_seed(rank)
    for _ in range(10):
        model.push(optimizer, *(torch.randn(p.shape, generator=generator).tolist()
                                for p in model.p))
        optimizer.step()
    return [p.detach().tolist() for p in model.p]


def test_case_44():
    first = run_ranks(2, case_44, 1, False)
    assert first[0] == first[1]
    for bucket, overlap in ((7, True), (4096, False), (10**9, True)):
        assert run_ranks(2, case_44, bucket, overlap) == first
