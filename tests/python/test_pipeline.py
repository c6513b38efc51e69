"""torch.distributed.pipelining x data parallelism, tied embedding included."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.pipelining import (PipelineStage, Schedule1F1B, ScheduleGPipe,
                                          ScheduleInterleaved1F1B)

import zerofp8

VOCABULARY, WIDTH, LENGTH, BLOCKS = 20, 16, 6, 4
BATCH, PARTS, STEPS, LR = 16, 8, 20, 2e-3  # PARTS micro-batches over all data ranks
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Head(nn.Module):
    """Logits by the embedding's weight."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return nn.functional.linear(x, self.weight)


def whole_model(dtype):
    torch.manual_seed(3)
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)]
    return nn.Sequential(embedding, *blocks, Head(embedding.weight)).to(dtype)


def cut(model, stage, stages):
    """The layers of one stage; the last one gets a copy of the tied weight."""
    layers = list(model)
    per_stage = BLOCKS // stages
    mine = layers[1 + stage * per_stage:1 + (stage + 1) * per_stage]
    if stage == 0:
        mine = [layers[0], *mine]
    if stage == stages - 1:
        head = layers[-1]
        if stages > 1:
            head = Head(nn.Parameter(head.weight.detach().clone()))
        mine = [*mine, head]
    part = nn.Sequential(*mine)
    if stages > 1 and stage == 0:
        zerofp8.tie(part[0].weight, "embedding")
    if stages > 1 and stage == stages - 1:
        zerofp8.tie(part[-1].weight, "embedding")
    return part


def global_batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    return x, (3 * x + 1) % VOCABULARY


def loss_function(logits, targets):
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def config_of(dtype, stage, accumulation, data=2):
    config = {"gradient_accumulation_steps": PARTS // data, "zero_optimization": {"stage": stage},
              "gradient_accumulation_dtype": accumulation,
              "zerofp8": {"gradient_communication_dtype": accumulation}}
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    return config


def make_groups(rank, stages, data):
    """Ranks are laid out as (stage, data rank); the two groups of this one."""
    grid = torch.arange(stages * data).reshape(stages, data).tolist()
    pipelines = [dist.new_group([row[d] for row in grid]) for d in range(data)]
    replicas = [dist.new_group(row) for row in grid]
    return pipelines[rank % data], replicas[rank // data]


class Trainer:
    """One rank's part of the job; `parts` are its stages (several when interleaved)."""

    def __init__(self, rank, stages, data, dtype, config, schedule):
        self.stage, self.data_rank, self.data, self.stages = rank // data, rank % data, data, stages
        self.micro = PARTS // data
        self.pipeline, replicas = make_groups(rank, stages, data)
        model = whole_model(DTYPES[dtype])
        virtual = 2 if schedule is ScheduleInterleaved1F1B else 1
        mine = [self.stage + v * stages for v in range(virtual)]
        self.parts = [cut(model, m, stages * virtual) for m in mine]
        module = self.parts[0] if virtual == 1 else nn.ModuleList(self.parts)
        template = torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=0.01)
        cut_model = {"pipeline_parallel_group": self.pipeline} if stages > 1 else {}
        module, self.optimizer = zerofp8.initialize(
            module, template, config, data_parallel_group=replicas, timeout=60,
            loss_is_divided=None if stages > 1 else False, **cut_model)
        if stages == 1:
            return
        steps = [PipelineStage(p, m, stages * virtual, torch.device("cpu"), group=self.pipeline)
                 for p, m in zip(self.parts, mine)]
        self.schedule = schedule(
            steps[0] if virtual == 1 else steps, self.micro,
            loss_fn=lambda out, y: self.optimizer.scale(loss_function(out, y)))
        self.last = self.stage == stages - 1

    def forward_backward(self, step):
        """Mean loss of this data rank, known on the last stage only (else 0)."""
        x, y = (t.chunk(self.data)[self.data_rank] for t in global_batch(step))
        if self.stages == 1:
            losses = []
            for mx, my in zip(x.chunk(self.micro), y.chunk(self.micro)):
                losses.append(loss_function(self.parts[0](mx), my))
                losses[-1].backward()
        else:
            losses = []
            inputs = [x] if self.stage == 0 else []
            targets = {"target": y, "losses": losses} if self.last else {}
            self.schedule.step(*inputs, **targets)
        return sum(loss.item() for loss in losses) / self.micro

    def loss_over_ranks(self, mine):
        total = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(total)
        return total.item() / self.data


def reference_gradient(dtype):
    """Of the first step, accumulated in float64, by name of the weight's value."""
    model = whole_model(DTYPES[dtype])
    total = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    x, y = global_batch(0)
    for mx, my in zip(x.chunk(BATCH), y.chunk(BATCH)):  # one sample each
        model.zero_grad()
        loss_function(model(mx), my).backward()
        total = [t + p.grad.double() for t, p in zip(total, model.parameters())]
    return model, [t / BATCH for t in total]


def run_pipeline(rank, stages, data, dtype, config, schedule, steps):
    trainer = Trainer(rank, stages, data, dtype, config, schedule)
    model, expected = reference_gradient(dtype)
    errors, losses, reports = [], [], []
    for step in range(steps):
        losses.append(trainer.loss_over_ranks(trainer.forward_backward(step)))
        if step == 0:
            for part in trainer.parts:
                for p in part.parameters():
                    found = trainer.optimizer.full_gradient(p)
                    # The parameter of the whole model that began with the same weights.
                    like = next(e for q, e in zip(model.parameters(), expected)
                                if q.shape == p.shape and torch.equal(q, p))
                    errors.append(float((found - like).norm() / like.norm()))
            full_norm = float(sum(e.square().sum() for e in expected).sqrt())
        reports.append(trainer.optimizer.step())
    tied = [p.detach().clone() for part in trainer.parts for p in part.parameters()
            if getattr(p, "zerofp8_tied", "")]
    micro = {r.micro_batches for r in reports}
    result = {"errors": errors, "losses": losses, "norm": reports[0].grad_norm,
              "expected norm": full_norm, "tied": tied, "micro": micro,
              "applied": all(r.applied for r in reports)}
    trainer.optimizer.close()
    return result


SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("stage, accumulation", [(1, "fp32"), (2, "fp32"), (1, "bf16"), (0, "fp32")])
def test_gradient_on_every_stage(name, stage, accumulation):
    config = config_of("fp32", stage, accumulation)
    bound = 2e-6 if accumulation == "fp32" else 8e-3
    results = run_ranks(4, run_pipeline, 2, 2, "fp32", config, SCHEDULES[name], 3)
    for result in results:
        assert result["applied"] and max(result["errors"]) <= bound
        assert result["norm"] == pytest.approx(result["expected norm"], rel=bound)
    tied = [t for r in results for t in r["tied"]]
    assert len(tied) == 4 and all(torch.equal(t, tied[0]) for t in tied)
    if name != "interleaved":
        assert results[0]["micro"] == {PARTS // 2}


@pytest.mark.parametrize("accumulation", ["fp8", "fp16"])
def test_narrow_accumulators_train(accumulation):
    config = config_of("bf16", 1, accumulation)
    results = run_ranks(4, run_pipeline, 2, 2, "bf16", config, Schedule1F1B, STEPS)
    losses = results[0]["losses"]
    assert losses[-1] < 0.9 * losses[0]


def test_fp16_needs_the_scale_on_the_last_stage_only():
    config = config_of("fp16", 1, "fp32")
    config["fp16"]["initial_scale_power"] = 10
    results = run_ranks(4, run_pipeline, 2, 2, "fp16", config, Schedule1F1B, 3)
    for result in results:
        assert result["applied"] and max(result["errors"]) <= 4e-3
        assert result["norm"] == pytest.approx(result["expected norm"], rel=2e-3)


@pytest.mark.parametrize("dtype, bound", [("fp32", 1e-5), ("bf16", 1e-3)])
def test_same_losses_for_every_layout(dtype, bound):
    runs = {}
    for stages, data in ((1, 4), (2, 2), (4, 1)):
        config = config_of(dtype, 1, "fp32", data)  # micro-batches of one size
        runs[stages] = run_ranks(4, run_pipeline, stages, data, dtype, config, Schedule1F1B, STEPS)
    for stages in (2, 4):
        found, expected = runs[stages][0]["losses"], runs[1][0]["losses"]
        assert found == pytest.approx(expected, rel=bound)
    assert runs[1][0]["losses"][-1] < 0.9 * runs[1][0]["losses"][0]


def case_11(rank):
    """Each micro-batch's gradient is 1 on both stages."""
    class Ones(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return x + self.w

    pipeline, replicas = make_groups(rank, 2, 1)
    part = Ones()
    template = torch.optim.AdamW(part.parameters(), lr=0.1)
    part, optimizer = zerofp8.initialize(
        part, template, {"gradient_accumulation_steps": 8}, data_parallel_group=replicas,
        pipeline_parallel_group=pipeline, timeout=60)
    schedule = Schedule1F1B(PipelineStage(part, rank, 2, torch.device("cpu"), group=pipeline), 8,
                            loss_fn=lambda out, y: out.sum())
    x = torch.zeros(8, 1)
    schedule.step(*([x] if rank == 0 else []), **({"target": x} if rank == 1 else {}))
    found = optimizer.full_gradient(part.w).item()
    return found, optimizer.step().grad_norm


def test_case_11_one_division_by_a():
    assert run_ranks(2, case_11) == [(1.0, pytest.approx(2**0.5))] * 2


def case_19(rank):
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = zerofp8.tie(nn.Parameter(torch.zeros(800)), "embedding")

    pipeline, replicas = make_groups(rank, 2, 1)
    part = Holder()
    part, optimizer = zerofp8.initialize(
        part, torch.optim.AdamW(part.parameters()), {}, data_parallel_group=replicas,
        pipeline_parallel_group=pipeline, timeout=60)
    (part.w * 0.5).sum().backward()  # the two stages' parts add up to ones
    return optimizer.step().grad_norm


def test_case_19_tied_weight_counts_once():
    assert run_ranks(2, case_19) == [pytest.approx(28.284271, rel=1e-6)] * 2
