"""Runs of test_cuda.py and job_cuda.py, on either device."""

import torch
from reference import seeded_model

import zerofp8


def make(device, level, backend="auto", offload=False, stage=1, capturable=False,
         transposed=True):
    model = seeded_model(torch.bfloat16, width=200).to(device)
    if transposed:
        model[2].weight.data = model[2].weight.data.t().contiguous().t()
    config = {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2,
              "gradient_clipping": 0.5,
              "zero_optimization": {"stage": stage, "offload_optimizer": {
                  "device": "cpu" if offload else "none"}},
              "zerofp8": {"opt_level": level, "fp32_moments_below": 0, "comm_backend": backend}}
    return zerofp8.initialize(model, torch.optim.AdamW(model.parameters(), lr=3e-3), config,
                              loss_is_divided=False, timeout=60, capturable=capturable)


def gradients(model, step, rank, micro):
    """Made up on the CPU, through autograd: the models' own would differ between devices."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    loss = 0
    for p in model.parameters():
        made = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
        if step == 2 and rank == 0:
            made = made * float("inf")
        loss = loss + (p * made).sum()
    loss.backward()


class Captured:
    """Steps of which the first runs as it is and the others are replays of a graph."""

    def __init__(self, model, optimizer, rank=0):
        self.model, self.optimizer, self.rank = model, optimizer, rank
        self.made = [[torch.zeros_like(p) for p in model.parameters()] for _ in range(2)]
        self.graph = None

    def step(self, number):
        for micro, made in enumerate(self.made):
            generator = torch.Generator().manual_seed(1000 * number + 10 * self.rank + micro)
            for to in made:
                values = torch.randn(to.shape, generator=generator).to(to.dtype)
                to.copy_(values * float("inf") if number == 2 and self.rank == 0 else values)
        if self.graph is None:
            beside = torch.cuda.Stream()
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                self._work()
            torch.cuda.current_stream().wait_stream(beside)
            report = self.optimizer.last_report
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._work()
            return report
        self.optimizer.before_replay()
        self.graph.replay()
        return self.optimizer.last_report

    def _work(self):
        for made in self.made:
            loss = 0
            for p, values in zip(self.model.parameters(), made):
                loss = loss + (p * values).sum()
            loss.backward()
        self.optimizer.step()


def run(model, optimizer, numbers, rank=0):
    found = []
    for step in numbers:
        for micro in range(2):
            gradients(model, step, rank, micro)
        report = optimizer.step()
        found.append((report.applied, str(report.grad_norm)))
    return found, [p.detach().cpu().float() for p in model.parameters()]
