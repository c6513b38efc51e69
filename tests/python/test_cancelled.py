"""Gradients that are removed, zeroed or replaced between backward and step, as torch means it."""

import copy

import pytest
import torch
from ranks import run_ranks
from torch import nn

import zerofp8

LAST = [2, 3]  # the parameters that the edits are about


def remove(model, p):
    p.grad = None


def delete(model, p):
    del p.grad


def zero(model, p):
    p.grad.zero_()


def zero_data(model, p):
    p.grad.data.zero_()


def zero_detached(model, p):
    p.grad.detach_()
    p.grad.zero_()


def fill(model, p):
    p.grad.fill_(0)


def multiply(model, p):
    p.grad.mul_(0)


def copy_zeros(model, p):
    p.grad.copy_(torch.zeros_like(p))


def foreach_zero(model, p):
    torch._foreach_zero_([p.grad])


def replace_by_zeros(model, p):
    p.grad = torch.zeros_like(p)


def replace(model, p):
    p.grad = torch.full_like(p, 0.25)


def by_submodule(model, p):
    model[2].zero_grad()


EDITS = (remove, delete, zero, zero_data, zero_detached, fill, multiply, copy_zeros, foreach_zero,
         replace_by_zeros, replace, by_submodule)


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)


def loss_of(model, seed):
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))
    return model(x.to(model[0].weight.dtype)).float().pow(2).mean()


def train(optimizer, model, edit, rank, size, when):
    """Two micro-batches a step; `when`: the edit is after the first one, or after the last."""
    parameters = list(model.parameters())
    for step in range(4):
        for k in range(2):
            if isinstance(optimizer, zerofp8.Optimizer):
                loss_of(model, 100 * step + 10 * k + rank).backward()
            else:  # torch alone: the mean over all ranks
                (sum(loss_of(model, 100 * step + 10 * k + r) for r in range(size)) / size).backward()
            if k == when and step != 1:
                for i in LAST:
                    edit(model, parameters[i])
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().float() for p in parameters]


def compare(rank, size, stage, level):
    """All edits at one stage and level: O0 beside torch's AdamW, others beside a run without them."""
    worst = {}
    start = [p.detach() for p in net().parameters()]
    for edit in EDITS:
        for when in (0, 1):
            if edit is replace and when == 0:
                continue  # what follows is added to it: autograd's business
            dtype = torch.float32 if level == "O0" else torch.bfloat16
            reference = net()
            # A large eps: updates are as large as gradients, not their signs.
            options = {"lr": 0.5, "weight_decay": 0.1, "eps": 1.0}
            right = train(torch.optim.AdamW(reference.parameters(), **options), reference, edit,
                          rank, size, when)
            model = net(dtype)
            model, optimizer = zerofp8.initialize(
                model, torch.optim.AdamW(model.parameters(), **options),
                {"zero_optimization": {"stage": stage}, "bf16": {"enabled": level != "O0"},
                 "zerofp8": {"fp32_moments_below": 0}}, opt_level=level, timeout=30)
            found = train(optimizer, model, edit, rank, size, when)
            moved = max((a - b).abs().max().item() for a, b in zip(right, start))
            worst[edit.__name__, when] = max(
                (a - b).abs().max().item() for a, b in zip(right, found)) / moved
            optimizer.close()
    return worst


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_as_torch(size, level):
    for stage in (0, 1, 2):
        allowed = 1e-5 if level == "O0" else 0.15  # of how far weights move; FP8 and bf16
        for found in run_ranks(size, compare, size, stage, level, timeout=240):
            assert max(found.values()) < allowed, (stage, found)


def gan(kind, clear):
    def build():
        torch.manual_seed(3)
        return (nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)),
                nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))

    def optimizer_of(model):
        template = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.5, 0.999))
        return template if kind == "torch" else zerofp8.initialize(model, template, {})[1]

    generator, critic = build()
    of_generator, of_critic = optimizer_of(generator), optimizer_of(critic)
    bce = nn.functional.binary_cross_entropy_with_logits
    random = torch.Generator().manual_seed(7)
    for _ in range(10):
        real = torch.randn(6, 4, generator=random) + 1
        fake = generator(torch.randn(6, 3, generator=random))
        (critic if clear == "module" else of_critic).zero_grad()
        bce(critic(real), torch.ones(6, 1)).backward()
        bce(critic(fake.detach()), torch.zeros(6, 1)).backward()
        of_critic.step()
        (generator if clear == "module" else of_generator).zero_grad()
        bce(critic(fake), torch.ones(6, 1)).backward()
        of_generator.step()
    return [p.detach() for m in (generator, critic) for p in m.parameters()]


@pytest.mark.parametrize("clear", ["module", "optimizer"])
def test_another_optimizers_model(clear):
    """The generator's step leaves gradients in the critic, which are thrown away by either call."""
    for a, b in zip(gan("torch", clear), gan("zerofp8", clear)):
        assert (a - b).abs().max() < 1e-6


def on_one_rank_only(rank, stage, edit):
    model = net()
    model, optimizer = zerofp8.initialize(
        model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0),
        {"zero_optimization": {"stage": stage}}, timeout=30)
    twin = copy.deepcopy(model)
    loss_of(model, rank).backward()
    if rank == 1:
        edit(model, model[2].bias)
    if stage == 2:
        with pytest.raises(zerofp8.ArgumentError) as error:
            optimizer.step()
        return str(error.value)
    gradient = optimizer.full_gradient(model[2].bias)
    loss_of(twin, 0).backward()
    assert torch.allclose(gradient, twin[2].bias.grad / 2, atol=1e-7)
    return optimizer.step().applied


def test_removed_on_one_rank():
    """Its part is gone; where sums are made after each micro-batch, it is an error on both."""
    for edit in (remove, zero):
        assert run_ranks(2, on_one_rank_only, 1, edit) == [True, True]
    texts = run_ranks(2, on_one_rank_only, 2, remove)
    assert texts[0] == texts[1] and '"2.bias" was discarded' in texts[0]


def test_elements_are_not_there():
    model = net()
    model, optimizer = zerofp8.initialize(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), {})
    loss_of(model, 0).backward()
    for call in (lambda g: torch.nan_to_num(g, out=g), lambda g: g.clamp_(-1, 1), lambda g: g + 1,
                 lambda g: g.fill_(1), lambda g: g.mul_(torch.ones_like(g)), lambda g: g.isnan()):
        with pytest.raises(zerofp8.TakenGradientError, match="full_gradient"):
            call(model[0].weight.grad)
    assert optimizer.step().applied
