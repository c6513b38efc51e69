"""``param_groups[i]["reduce_group"]``: experts, and what is refused."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tensor_parallel import Ranks
from torch import nn

import zerofp8

LR, STEPS = 1e-2, 3


class Layers(nn.Module):
    """A dense weight and one expert's; data ranks {0, 2} hold one expert, {1, 3} the other."""

    def __init__(self, rank, seed=0):
        super().__init__()
        self.expert = rank % 2
        generator = torch.Generator().manual_seed(seed)
        experts = torch.randn(2, 30, 10, generator=generator)
        self.dense = nn.Parameter(torch.randn(20, 10, generator=generator))
        self.add_module(f"expert{self.expert}",
                        nn.ParameterDict({"w": nn.Parameter(experts[self.expert].clone())}))

    @property
    def own(self):
        return getattr(self, f"expert{self.expert}").w


def gradients_of(step, rank):
    """What each rank's backward pass gives."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return (torch.randn(20, 10, generator=generator), torch.randn(30, 10, generator=generator))


def pairs():
    return [dist.new_group([0, 2]), dist.new_group([1, 3])]


def start(rank, config, group, divisor=None, model=None, **arguments):
    model = Layers(rank) if model is None else model
    experts = {"params": [model.own], "reduce_group": group}
    if divisor is not None:
        experts["reduce_divisor"] = divisor
    template = torch.optim.AdamW([{"params": [model.dense]}, experts], lr=LR, weight_decay=0)
    return model, *zerofp8.initialize(model, template, config, timeout=60, **arguments)[1:]


def push(model, step, rank):
    dense, own = gradients_of(step, rank)
    ((model.dense * dense).sum() + (model.own * own).sum()).backward()


def adam(weight, gradients):
    """Torch's, in float64, over a list of gradients."""
    p = nn.Parameter(weight.double())
    optimizer = torch.optim.AdamW([p], lr=LR, weight_decay=0)
    for g in gradients:
        p.grad = g
        optimizer.step()
    return p.detach()


def experts_train(rank, config, divisor, as_list):
    members = [rank % 2, rank % 2 + 2]
    seed = 0 if rank < 2 else 7  # the first member's weights are sent to the other one
    group = members if as_list else pairs()[rank % 2]
    model, optimizer = start(rank, config, group, divisor, Layers(rank, seed))
    begin, gradients, norms = copy.deepcopy(model.state_dict()), [], []
    for step in range(STEPS):
        push(model, step, rank)
        gradients.append((optimizer.full_gradient(model.dense), optimizer.full_gradient(model.own)))
        norms.append(optimizer.step().grad_norm)
    return begin, gradients, norms, model.state_dict()


def all_stages(rank, divisor, as_list):
    return [experts_train(rank, {"zero_optimization": {"stage": stage}}, divisor, as_list)
            for stage in range(3)]


@pytest.mark.parametrize("divisor, as_list", [(None, False), (4.0, True)])
def test_experts_are_averaged_over_their_own_ranks(divisor, as_list):
    for results in zip(*run_ranks(4, all_stages, divisor, as_list)):
        check_experts(results, divisor)


def check_experts(results, divisor):
    given = [[gradients_of(s, r) for r in range(4)] for s in range(STEPS)]
    dense = [sum(g[0].double() for g in step) / 4 for step in given]
    experts = [[(g[e][1].double() + g[e + 2][1].double()) / (divisor or 2) for g in given]
               for e in range(2)]
    norms = [float(torch.cat([d.flatten(), a.flatten(), b.flatten()]).norm())
             for d, a, b in zip(dense, *experts)]
    fresh = [Layers(r) for r in range(2)]
    for rank, (begin, gradients, found_norms, weights) in enumerate(results):
        name = f"expert{rank % 2}.w"
        assert torch.equal(begin["dense"], fresh[0].dense)
        assert torch.equal(begin[name], fresh[rank % 2].own)
        for step, (d, e) in enumerate(gradients):
            torch.testing.assert_close(d.double(), dense[step], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(e.double(), experts[rank % 2][step], rtol=1e-5, atol=1e-6)
        assert found_norms == pytest.approx(norms, rel=1e-6)
        for key, expected in (("dense", dense), (name, experts[rank % 2])):
            torch.testing.assert_close(weights[key].double(), adam(begin[key], expected),
                                       rtol=1e-5, atol=1e-6)


class _Exchange(torch.autograd.Function):
    """Rows to the ranks of a group in equal parts, and their gradients back."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return _Exchange.apply(grad, ctx.group), None


def routed(rank):
    """Tokens go to both experts by all-to-all: the mean over all data is a division by all ranks."""
    experts_of = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    pairs()
    model, optimizer = start(rank, {}, [rank % 2, rank % 2 + 2], 4)
    x = torch.randn(4, 8, 20, generator=torch.Generator().manual_seed(3))  # of each data rank
    hidden = _Exchange.apply(x[rank] @ model.dense, experts_of)
    _Exchange.apply(hidden @ model.own.t(), experts_of).square().mean().backward()
    found = optimizer.full_gradient(model.dense), optimizer.full_gradient(model.own)

    whole = Layers(0).dense, Layers(0).own, Layers(1).own
    hidden = x @ whole[0]
    out = torch.cat([hidden[:, :4] @ whole[1].t(), hidden[:, 4:] @ whole[2].t()], 1)
    out.square().mean().backward()
    expected = whole[0].grad, whole[1 + rank % 2].grad
    norm = float(torch.cat([w.grad.flatten() for w in whole]).norm())
    return found, expected, optimizer.step().grad_norm, norm


def test_routed_experts_have_the_gradient_of_the_whole_model():
    for found, expected, norm, expected_norm in run_ranks(4, routed):
        for f, e in zip(found, expected):
            torch.testing.assert_close(f, e, rtol=1e-5, atol=1e-6)
        assert norm == pytest.approx(expected_norm, rel=1e-5)


def copied_and_saved(rank):
    model, optimizer = start(rank, {}, pairs()[rank % 2])
    copied = copy.deepcopy(optimizer.param_groups)[1]["reduce_group"]
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    optimizer.load_state_dict(saved)
    keys = {k for g in saved["param_groups"] for k in g}
    # The same dicts serve a second time.
    template = torch.optim.AdamW(copy.deepcopy(optimizer.param_groups), lr=LR)
    for group, p in zip(template.param_groups, (model.dense, model.own)):
        group["params"] = [p]
    optimizer.close()
    model, optimizer = zerofp8.initialize(model, template, {}, timeout=60)
    push(model, 0, rank)
    return copied, keys & {"reduce_group", "reduce_divisor"}, optimizer.full_gradient(model.own)


def test_groups_can_be_copied_and_saved():
    results = run_ranks(4, copied_and_saved)
    for rank, (copied, keys, gradient) in enumerate(results):
        members = [rank % 2, rank % 2 + 2]
        assert copied == members and not keys
        expected = sum(gradients_of(0, r)[1] for r in members) / 2
        torch.testing.assert_close(gradient, expected)


def experts_of_tensor_ranks(rank):
    """Two data ranks with an expert each, cut over two tensor ranks; the router is replicated."""
    ranks = Ranks(rank, 1, 2, 2)
    model = Layers(2 * rank)  # one expert's name and weights on all
    model.own.tensor_model_parallel = True
    optimizer = start(rank, {}, [rank], model=model, **ranks.arguments())[1]
    ((model.dense * (1 + ranks.data_rank)).sum() + (model.own * (2 + rank)).sum()).backward()
    return optimizer.full_gradient(model.own)[0, 0].item(), optimizer.step().grad_norm


def test_experts_cut_over_tensor_ranks_count_once_each():
    norm = (200 * 1.5**2 + 300 * sum((2 + r)**2 for r in range(4)))**0.5
    assert run_ranks(4, experts_of_tensor_ranks) == [(2 + r, pytest.approx(norm, rel=1e-6))
                                                     for r in range(4)]


def uneven(rank, stage):
    """Two kinds of experts over other ranks each, three ranks and one among them."""
    model = nn.ParameterDict({"dense": torch.ones(20, 10), "a": torch.ones(30, 10),
                              "b": torch.ones(7), "c": torch.ones(300)})
    members = [0, 1, 2] if rank < 3 else [3]
    template = torch.optim.AdamW([
        {"params": [model.dense]}, {"params": [model.a, model.b], "reduce_group": members},
        {"params": [model.c], "reduce_group": [rank % 2, rank % 2 + 2]}])
    config = {"zero_optimization": {"stage": stage, "reduce_bucket_size": 128}}
    optimizer = zerofp8.initialize(model, template, config, timeout=30)[1]
    found = []
    for names in ("dense a b c", "dense c", "a b"):  # what has a gradient on rank 0
        used = names.split() if rank == 0 else list(model)
        sum((model[n] * (rank + 1)).sum() for n in used).backward()
        found.append(([optimizer.full_gradient(model[n]).mean().item() for n in ("dense", "a", "c")],
                      optimizer.step().grad_norm))
    return found


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_groups_of_different_sizes(stage):
    results = run_ranks(4, uneven, stage)
    sizes = {"dense": 200, "a": 307, "c": 300}
    for step, used in enumerate(("dense a c", "dense c", "a")):
        given = {n: [r + 1 if r or n in used.split() else 0 for r in range(4)] for n in sizes}
        dense, c = sum(given["dense"]) / 4, [sum(given["c"][i::2]) / 2 for i in range(2)]
        a = [sum(given["a"][:3]) / 3, 4]
        norm = (200 * dense**2 + 307 * (a[0]**2 + a[1]**2) + 300 * (c[0]**2 + c[1]**2))**0.5
        for rank, found in enumerate(results):
            gradient, found_norm = found[step]
            assert gradient == pytest.approx([dense, a[rank // 3], c[rank % 2]], rel=1e-6)
            assert found_norm == pytest.approx(norm, rel=1e-6)


def saved_and_loaded(rank, folder):
    config = {"zerofp8": {"opt_level": "O2", "fp32_moments_below": 0}}

    def train(model, optimizer, steps):
        for step in steps:
            push(model, step, rank)
            optimizer.step()
        return copy.deepcopy(model.state_dict())

    group = pairs()[rank % 2]
    model, optimizer = start(rank, config, group)
    train(model, optimizer, range(2))
    optimizer.save(folder)
    unbroken = train(model, optimizer, range(2, 4))
    model, optimizer = start(rank, config, group, model=Layers(rank, 9))
    optimizer.load(folder)
    resumed = train(model, optimizer, range(2, 4))
    return all(torch.equal(v, resumed[k]) for k, v in unbroken.items())


def test_experts_resume_bit_for_bit(tmp_path):
    assert run_ranks(4, saved_and_loaded, str(tmp_path)) == [True] * 4


def refused(rank):
    """Texts by name; every rank must come back from each."""
    pair = pairs()[rank % 2]
    mine = [rank % 2, rank % 2 + 2]
    marked = Layers(rank)
    marked.own.allreduce = False
    cases = {
        "no group": {"group": "experts"},
        "without this rank": {"group": [4]},
        "larger": {"group": [0, 1, 2, 3], "data_parallel_group": pair},
        "divisor": {"group": mine, "divisor": -1},
        "divisor alone": {"group": None, "divisor": 2},
        "marked": {"group": None, "model": marked},
        "members differ": {"group": [0, 1, 2, 3] if rank == 3 else mine},
        "kinds differ": {"group": None if rank == 3 else mine},
        "divisors differ": {"group": mine, "divisor": 4 if rank == 3 else None},
    }
    texts = {}
    for name, arguments in cases.items():
        try:
            start(rank, {}, **arguments)
            texts[name] = "no error"
        except zerofp8.ConfigError as error:
            texts[name] = str(error)
    return texts


def test_mismatches_are_config_errors_on_all_ranks():
    results = run_ranks(4, refused, timeout=60)
    parts = {"no group": "ProcessGroup", "without this rank": "has this rank",
             "larger": "data_parallel_group", "divisor": "above 0", "divisor alone": "reduce_group",
             "marked": "allreduce",
             "members differ": "[0, 1, 2, 3]", "kinds differ": "none",
             "divisors differ": "by its size"}
    for name, part in parts.items():
        texts = {r[name] for r in results}
        if name != "larger":  # the two data-parallel groups do not know each other
            assert len(texts) == 1, texts
        assert all(part in t and "param_groups" in t for t in texts), texts
