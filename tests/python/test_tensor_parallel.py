"""Megatron-style tensor parallelism through the hook, with pipelines and data parallelism."""

import hashlib

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tensor_parallel import (BF16_ERRORS, FP32_ERRORS, Ranks, Reference, SequenceParallelModel,
                             fp8_error, initial_weights, loss_of, micro_batch, norm_of, slice_of,
                             stage_of)
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import zerofp8

PARTS, LR, STEPS = 8, 3e-3, 5  # micro-batches of a step over all data ranks
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Pipeline stages, data ranks, tensor ranks.
LAYOUTS = [(1, 2, 2), (2, 1, 2)]
# dtype, config.
BF16 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
CONFIGS = {
    "fp32": ("fp32", {}),
    "fp32 stage 2, clipped": ("fp32", {"zero_optimization": {"stage": 2},
                                       "gradient_clipping": 0.5}),
    "bf16 O0": ("bf16", BF16),
    "bf16 O2": ("bf16", {**BF16, "zerofp8": {"opt_level": "O2", "fp32_moments_below": 0}}),
    "bf16 O3, no masters": ("bf16", {**BF16, "zerofp8": {"opt_level": "O3", "fp32_moments_below": 0,
                                                         "master_weights": "none"}}),
}


class Trainer:
    """One rank's part of the job."""

    def __init__(self, ranks, dtype, config, seed=0, sequence_parallel=False):
        self.ranks = ranks
        self.group = ranks.tensor_group if ranks.tensor > 1 else None
        if sequence_parallel:
            self.module = SequenceParallelModel(initial_weights(seed), self.group).to(DTYPES[dtype])
            self.named = self.module.named()
        else:
            self.module, self.named = stage_of(ranks.stage, ranks.stages, self.group,
                                               DTYPES[dtype], seed)
        if ranks.stages > 1 and "emb.weight" in self.named:
            self.named["emb.weight"].shared_embedding = True  # as Megatron says "tied"
        self.micro = PARTS // ranks.data
        template = torch.optim.AdamW(self.module.parameters(), lr=LR, weight_decay=0)
        self.module, self.optimizer = zerofp8.initialize(
            self.module, template, {**config, "gradient_accumulation_steps": self.micro},
            timeout=60, loss_is_divided=False, **ranks.arguments())
        if ranks.stages > 1:
            stage = PipelineStage(self.module, ranks.stage, ranks.stages, torch.device("cpu"),
                                  group=ranks.pipeline_group)
            self.schedule = Schedule1F1B(stage, self.micro, loss_fn=loss_of)

    def forward_backward(self, step):
        """Sum of the micro-batches' losses where this rank has the last stage."""
        first = self.ranks.data_rank * self.micro
        batches = [micro_batch(step, first + i) for i in range(self.micro)]
        if self.ranks.stages == 1:
            losses = []
            for tokens, targets in batches:
                losses.append(loss_of(self.module(tokens), targets))
                losses[-1].backward()
        else:
            tokens, targets = (torch.cat(t) for t in zip(*batches))
            losses, last = [], self.ranks.stage == self.ranks.stages - 1
            self.schedule.step(*([tokens] if self.ranks.stage == 0 else []),
                               **({"target": targets, "losses": losses} if last else {}))
        return float(sum(loss.detach() for loss in losses))

    def mean_loss(self, mine):
        total = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(total)
        return total.item() / PARTS / self.ranks.tensor

    def step(self, step):
        loss = self.mean_loss(self.forward_backward(step))
        self.optimizer.step()
        return loss

    def gradient_error(self, expected):
        """Largest relative distance of a reduced gradient from the reference's slice."""
        errors = {}
        for name, p in self.named.items():
            whole = expected[name]
            dim = getattr(p, "partition_dim", None)
            like = slice_of(whole, dim, self.group)
            found = self.optimizer.full_gradient(p).double()
            errors[name] = float((found - like).norm() / like.norm())
        return max(errors.values())

    def digests(self):
        """Hashes of the weights by name."""
        return {n: hashlib.sha256(p.detach().float().numpy().tobytes()).hexdigest()
                for n, p in self.named.items()}

    def replicated(self):
        return {n: d for n, d in self.digests().items()
                if not getattr(self.named[n], "tensor_model_parallel", False)}


def one_config(ranks, name, **options):
    dtype, config = CONFIGS[name]
    trainer, reference = Trainer(ranks, dtype, config, **options), Reference(PARTS, LR)
    losses, expected = [], []
    for step in range(STEPS):
        loss, gradient = reference.gradient(step)
        expected.append(loss)
        losses.append(trainer.mean_loss(trainer.forward_backward(step)))
        if step == 0:
            error, norm = trainer.gradient_error(gradient), norm_of(gradient)
        report = trainer.optimizer.step()
        if step == 0:
            found_norm = report.grad_norm
        reference.update(gradient, config.get("gradient_clipping", 0))
    found = {"error": error, "norm": found_norm / norm, "losses": losses, "expected": expected,
             "applied": report.applied, "replicated": trainer.replicated(),
             "all": trainer.digests(), "place": (ranks.stage, ranks.tensor_rank),
             "data rank": ranks.data_rank, "micro": trainer.micro}
    trainer.optimizer.close()
    return found


def sequence_parallel(rank):
    ranks = Ranks(rank, 1, 2, 2)
    return {name: one_config(ranks, name, sequence_parallel=True) for name in CONFIGS}


@pytest.fixture(scope="module")
def sequence_results():
    return run_ranks(4, sequence_parallel)


def skipped(ranks):
    """An infinity in one slice, on the last rank only."""
    trainer = Trainer(ranks, "bf16", CONFIGS["bf16 O2"][1])
    before = trainer.digests()
    if dist.get_rank() == 3:
        trainer.named["1.up.weight"].register_hook(lambda g: g + float("inf"))
    trainer.forward_backward(0)
    report = trainer.optimizer.step()
    return report.applied, report.bad_parameter, report.bad_rank, trainer.digests() == before


def walk(rank, layout):
    ranks = Ranks(rank, *layout)
    return {"skipped": skipped(ranks), **{name: one_config(ranks, name) for name in CONFIGS}}


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda x: "{}x{}x{}".format(*x))
def results(request):
    return run_ranks(4, walk, request.param)


@pytest.mark.parametrize("name", CONFIGS)
def test_gradient_norm_and_training(results, name):
    check_training(results, name)


@pytest.mark.parametrize("name", CONFIGS)
def test_sequence_parallel_parameters(sequence_results, name):
    check_training(sequence_results, name)
    check_copies(sequence_results, name)


def check_training(results, name):
    bounds = BF16_ERRORS if CONFIGS[name][0] == "bf16" else FP32_ERRORS
    for r in (r[name] for r in results):
        fp8 = fp8_error(r["micro"]) if "zerofp8" in CONFIGS[name][1] else 0
        assert r["applied"] and r["error"] <= bounds["gradient"] + fp8
        assert r["norm"] == pytest.approx(1, rel=bounds["norm"])
        assert r["losses"] == pytest.approx(r["expected"], rel=bounds["loss"])
        assert r["losses"] == results[0][name]["losses"]


@pytest.mark.parametrize("name", CONFIGS)
def test_replicated_parameters_stay_bit_equal(results, name):
    check_copies(results, name)


def check_copies(results, name):
    """Over tensor ranks, with stochastic rounding, too; tied slices over stages."""
    found = {}
    for r in (r[name] for r in results):
        stage, tensor = r["place"]
        for parameter, digest in r["replicated"].items():
            assert found.setdefault((stage, parameter), digest) == digest
        tied = found.setdefault(("tied", tensor), r["all"].get("emb.weight"))
        assert r["all"].get("emb.weight") == tied


def test_a_bad_slice_is_a_skip_on_all_ranks(results):
    for applied, parameter, data_rank, unchanged in (r["skipped"] for r in results):
        assert not applied and unchanged
        assert "tensor1-of-2." in parameter and parameter.endswith("up.weight")
        assert data_rank == results[-1]["fp32"]["data rank"]


def norm_only(rank, layout):
    trainer = Trainer(Ranks(rank, *layout), "fp32", {})
    trainer.forward_backward(0)
    return trainer.optimizer.step().grad_norm


def test_case_19_same_norm_for_every_layout():
    expected = norm_of(Reference(PARTS, LR).gradient(0)[1])
    for layout in ((1, 4, 1), (2, 2, 1), (2, 2, 2), (1, 2, 4)):
        ranks = layout[0] * layout[1] * layout[2]
        norms = run_ranks(ranks, norm_only, layout)
        assert norms == [pytest.approx(expected, rel=1e-6)] * ranks, layout
