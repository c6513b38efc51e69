"""DistributedDataParallel around models: the same bits as without, or an error that says how."""

import copy

import ddp_cases
import pytest
import torch
import torch.distributed as dist
from ddp_cases import LR, Norms, run, started
from ranks import run_ranks
from reference import loss_of, seeded_model
from torch.nn.parallel import DistributedDataParallel

import zerofp8

CELLS = [(0, "O0", 1, torch.float32), (1, "O2", 2, torch.bfloat16), (2, "O2", 2, torch.float32)]


def all_orders(rank):
    """Names of what differs from the unwrapped run."""
    wrong = []
    for stage, level, micro, dtype in CELLS:
        local = stage < 2  # no_sync() of zerofp8's own is refused with a sharded accumulator
        right = run(rank, "never", "plain", stage, level, micro, dtype)
        for order in ("after", "before", "before, inner"):
            for kind in ddp_cases.WRAPPERS:
                found = run(rank, order, kind, stage, level, micro, dtype, no_sync=local)
                if not all(torch.equal(a, b) for a, b in zip(found, right)):
                    wrong.append((stage, level, order, kind))
    return wrong


def test_wrapped_models_have_the_bits_of_bare_ones():
    assert run_ranks(2, all_orders) == [[], []]


def buffers(rank):
    """Running means, which DDP sends from rank 0 before each forward pass: the wrapper's still."""
    model, optimizer = started(Norms(torch.float32), 1, "O0", 1)
    model = DistributedDataParallel(model)
    for step in range(3):
        loss_of(model, step, rank, 0).backward()
        optimizer.step()
    with torch.no_grad():
        loss_of(model, 0, rank, 0)
    means = model.module.body[1].running_mean
    theirs = [torch.empty_like(means) for _ in range(2)]
    model._sync_buffers()
    dist.all_gather(theirs, means)
    return torch.equal(*theirs)


def memory(rank):
    """Elements in DDP's buckets before the first forward pass, and what holds for a copy."""
    model, optimizer = started(Norms(torch.float32), 1, "O0", 1)
    twin = copy.deepcopy(model)
    wrapped = DistributedDataParallel(model)
    buckets = sum(b.buffer().numel() for b in wrapped.reducer._get_zeros_like_grad_buckets())
    # A copy is not zerofp8's: all of it is reduced.
    free = DistributedDataParallel(twin, find_unused_parameters=True)
    assert not free.parameters_to_ignore
    loss_of(free, 0, rank, 0).backward()
    grad = twin.body[0].weight.grad
    theirs = [torch.empty_like(grad) for _ in range(2)]
    dist.all_gather(theirs, grad)
    assert torch.equal(*theirs) and grad.any()
    # Nor is the model, when the optimizer is closed.
    loss_of(wrapped, 0, rank, 0).backward()
    optimizer.close()
    with torch.no_grad():
        wrapped(torch.ones(2, 12))
    try:
        wrapped(torch.ones(2, 12))
    except zerofp8.UnsupportedError as error:
        assert "anew" in str(error)
    else:
        raise AssertionError("no error")
    again = DistributedDataParallel(wrapped.module)
    return buckets, len(again.parameters_to_ignore)


def test_buffers_memory_copies_and_close():
    assert run_ranks(2, buffers) == [True, True]
    smallest = min(p.numel() for p in Norms(torch.float32).parameters())
    assert run_ranks(2, memory) == [(smallest, 0)] * 2


def compiled(rank):
    """Weights of the bare compiled module, and with the wrapper outside of it and inside."""
    results = []
    for wrapped in (lambda m: m, DistributedDataParallel,
                    lambda m: torch.compile(DistributedDataParallel(m._orig_mod),
                                            backend="aot_eager")):
        torch._dynamo.reset()
        model = torch.compile(seeded_model(width=80), backend="aot_eager")
        model, optimizer = started(model, 1, "O2", 1)
        results.append(ddp_cases.train(wrapped(model), optimizer, rank, 1))
    return [all(torch.equal(a, b) for a, b in zip(r, results[0])) for r in results]


def test_compiled_models():
    assert run_ranks(2, compiled) == [[True] * 3] * 2


def two_owners(rank):
    """A wrapper around two models, one of them trained by torch: its gradients are averaged."""
    model = torch.nn.ModuleDict({"ours": seeded_model(), "theirs": seeded_model(seed=1)})
    model.forward = lambda x: model["ours"](x) + model["theirs"](x)
    zerofp8.initialize(model["ours"], torch.optim.AdamW(model["ours"].parameters(), lr=LR), {})
    wrapped = DistributedDataParallel(model)
    for step in range(2):
        model["theirs"].zero_grad()
        loss_of(wrapped, step, rank, 0).backward()
    grads = torch.cat([p.grad.flatten() for p in model["theirs"].parameters()])
    averaged = [torch.empty_like(grads) for _ in range(2)]
    dist.all_gather(averaged, grads)
    assert torch.equal(*averaged)
    bare = seeded_model(seed=1)
    twin = seeded_model()
    alone = lambda x: twin(x) + bare(x)
    alone.parameters = bare.parameters
    loss = loss_of(alone, 1, rank, 0)
    mine = torch.autograd.grad(loss, list(bare.parameters()))
    mine = torch.cat([g.flatten() for g in mine])
    dist.all_reduce(mine)
    return float((grads - mine / 2).norm() / mine.norm())


def test_what_another_optimizer_has_is_reduced_by_the_wrapper():
    for off in run_ranks(2, two_owners):
        assert off < 1e-6


def refused(rank):
    """Messages of what cannot be taken over."""
    def message(act):
        try:
            act()
        except zerofp8.Error as error:
            return str(error)
        return "no error"

    def hooked():
        model, _ = started(seeded_model(), 1, "O0", 1)
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, lambda state, bucket: None)
        loss_of(wrapped, 0, rank, 0)

    def hooked_later():
        model, _ = started(seeded_model(), 1, "O0", 1)
        wrapped = DistributedDataParallel(model)
        loss_of(wrapped, 0, rank, 0)
        wrapped.register_comm_hook(None, lambda state, bucket: None)

    def joined(first):
        model, _ = started(seeded_model(), 1, "O0", 1)
        wrapped = DistributedDataParallel(model)
        if first:
            loss_of(wrapped, 0, rank, 0)
        with wrapped.join():
            loss_of(wrapped, 0, rank, 0)

    def parallel():
        started(torch.nn.DataParallel(seeded_model()), 1, "O0", 1)

    return [message(hooked), message(hooked_later), message(lambda: joined(True)),
            message(parallel)]


def test_wrappers_that_are_refused():
    for hooked, later, joined, parallel in run_ranks(2, refused):
        assert "communication hook" in hooked and "communication_data_type" in hooked
        assert "communication hook" in later
        assert "Join" in joined and "drop_last" in joined
        assert "DataParallel" in parallel and "torchrun" in parallel
