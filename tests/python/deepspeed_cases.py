"""Cases 5 to 8 and 11 inside DeepSpeed's pipeline engine, with gradients that are known exactly."""

import torch
import torch.distributed as dist
from deepspeed_cells import join, quiet
from torch import nn

import zerofp8
import zerofp8.deepspeed

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Shift(nn.Module):
    """x + w: the gradient of w is that of the output, on every stage."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x + self.w


def product(output, target):
    return (output.float() * target.float()).sum()


class Job:
    """2 stages x 2 data ranks; micro-batch i of this data rank has the gradient ``values[i]``."""

    def __init__(self, dtype, accumulation=None, stage=1, micro_batches=1, **keys):
        import deepspeed
        from deepspeed.pipe import LayerSpec, PipelineModule

        config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": micro_batches,
                  "gradient_clipping": 0.0, "zero_optimization": {"stage": stage},
                  "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, **keys}
        if dtype != "fp32":
            config[dtype] = {"enabled": True}
        if accumulation is not None:
            config["gradient_accumulation_dtype"] = accumulation
        with quiet():
            model = PipelineModule([LayerSpec(Shift), LayerSpec(Shift)], num_stages=2,
                                   loss_fn=product, partition_method="uniform")
            self.engine, *_ = deepspeed.initialize(
                model=model, model_parameters=list(model.parameters()), config=config)
        self.dtype = DTYPES[dtype]
        self.data_rank = self.engine.grid.get_data_parallel_rank()
        self.optimizer = self.engine.optimizer.optimizer
        self.parameter = next(self.engine.module.parameters())

    def step(self, values):
        """The reduced gradient before the update, and the report."""
        inner, found = self.engine.optimizer.step, []

        def step(*args, **kwargs):
            found.append(self.optimizer.full_gradient(self.parameter).item())
            return inner(*args, **kwargs)

        self.engine.optimizer.step = step
        data = [(torch.ones(1, 1, dtype=self.dtype), torch.full((1, 1), v)) for v in values]
        self.engine.train_batch(iter(data))
        self.engine.optimizer.step = inner
        return found[0], self.optimizer.last_report

    def close(self):
        self.engine.destroy()


def one(values, *arguments, **keys):
    """Of one step; `values` per data rank."""
    job = Job(*arguments, micro_batches=len(values[0]), **keys)
    gradient, report = job.step(values[job.data_rank])
    effective = job.optimizer.settings.accumulation
    job.close()
    return gradient, report.applied, report.grad_norm, effective


def case_6(accumulation):
    """Three micro-batches, twice, and cleared in between by DeepSpeed as often as it likes."""
    job, found = Job("bf16", accumulation, micro_batches=3), []
    for _ in range(2):
        found.append(job.step([1.0, 2.0, 4.0])[0])
        job.engine.optimizer.clear_lp_grads()
        job.engine.optimizer.clear_lp_grads()
    grads = [p.grad for p in job.engine.module.parameters()]
    job.close()
    return found, grads == [None]


def walk(rank, size):
    join(rank, size)
    zerofp8.deepspeed.install(timeout=30)
    found = {}
    for stage in (0, 1, 2):
        for accumulation in (None, "fp32", "bf16", "fp16", "fp8"):
            found[5, stage, accumulation] = one([[256.0, 1.0]] * 2, "bf16", accumulation, stage)
    for accumulation in ("fp32", "bf16", "fp16", "fp8"):
        found[6, accumulation] = case_6(accumulation)
        for stage in (0, 1, 2):
            found[7, stage, accumulation] = one([[1.0, 3.0], [5.0, 7.0]], "bf16", accumulation,
                                                stage)
    found[8, None] = one([[99840.0]] * 2, "bf16")
    found[8, "fp16"] = one([[99840.0]] * 2, "bf16", communication_data_type="fp16")
    for dtype in ("fp32", "bf16"):
        found[11, dtype] = one([[1.0] * 8] * 2, dtype)
    dist.barrier()
    return found
