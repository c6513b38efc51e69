"""Offload with a stand-in for the stream and CPU tensors: the CPU's bits, what waits for what,
bounds. test_cuda.py is what needs a GPU."""

import tempfile

import pytest
import torch
from late_stream import LoggedCuda, LoggedOffload, use
from ranks import run_ranks
from reference import loss_of, seeded_model

import zerofp8
from zerofp8 import devices, placement

CONFIGS = {
    "fp32": {},
    "bf16 O0": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
    "bf16 O2 local": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1},
                      "zerofp8": {"opt_level": "O2", "fp32_moments_below": 0}},
    "bf16 O3 sharded": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2},
                        "zerofp8": {"opt_level": "O3", "fp32_moments_below": 0}},
}


@pytest.fixture(autouse=True)
def own_choice(monkeypatch):
    monkeypatch.setattr(devices, "choose", devices.choose)  # put back after each test


def make(config, seed=0, micro=2):
    dtype = torch.bfloat16 if "bf16" in config else torch.float32
    model = seeded_model(dtype, width=40, seed=seed)
    if seed == 0:  # one that is not contiguous
        model[2].weight.data = model[2].weight.data.t().contiguous().t()
    config = {**config, "gradient_accumulation_steps": micro, "gradient_clipping": 0.5}
    return zerofp8.initialize(model, torch.optim.AdamW(model.parameters(), lr=3e-3), config,
                              loss_is_divided=False, timeout=60)


def bits(model):
    return [p.detach().contiguous().view(torch.uint8).clone() for p in model.parameters()]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


def steps(model, optimizer, numbers, rank=0):
    """Norms and flags of some steps; the gradients of step 2 are not finite."""
    found = []
    for step in numbers:
        for micro in range(2):
            loss = loss_of(model, step, rank, micro)
            (loss * float("inf") if step == 2 and rank == 0 else loss).backward()
        report = optimizer.step()
        found.append((report.applied, report.micro_batches, str(report.grad_norm), report.step))
    return found


# -- the CPU's bits ------------------------------------------------------------------------------

def everything(rank, config, folder):
    """What a run leaves: steps, weights written from outside, state_dict, save and load."""
    model, optimizer = make(config)
    reports = steps(model, optimizer, range(4), rank)
    with torch.no_grad():
        model[0].weight.clamp_(-0.2, 0.2)
        model[2].weight.mul_(1.01)
    reports += steps(model, optimizer, range(4, 6), rank)
    loss_of(model, 6, rank, 0).backward()
    optimizer.zero_grad()
    loss_of(model, 6, rank, 0).backward()
    loss_of(model, 6, rank, 1).backward()
    whole = [optimizer.full_gradient(p) for p in model.parameters()]
    optimizer.step()
    saved = optimizer.state_dict()
    optimizer.save(folder)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    reports += steps(model, optimizer, range(7, 9), rank)
    left = bits(model)
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    reports += steps(model, optimizer, range(7, 9), rank)
    assert same(left, bits(model))
    optimizer.load(folder)
    reports += steps(model, optimizer, range(7, 9), rank)
    assert same(left, bits(model))
    pieces = [v for s in saved["state"].values() for v in s.values()]
    masters = [optimizer.full_state(p, "master") for p in model.parameters()]
    return reports, left, whole, pieces, masters


def against_the_cpu(rank, config, lag):
    with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b:
        expected = everything(rank, config, a)
        use(lambda settings: LoggedOffload(settings.accumulation_sharded, lag))
        found = everything(rank, config, b)
    assert expected[0] == found[0] and not all(r[0] for r in found[0])
    return all(same(e, f) for e, f in zip(expected[1:], found[1:]))


@pytest.mark.parametrize("lag", [0, 2, 1000])
@pytest.mark.parametrize("name", CONFIGS)
def test_offload_has_the_bits_of_the_cpu(name, lag):
    assert against_the_cpu(0, CONFIGS[name], lag)


def test_parameters_on_cuda_have_the_bits_of_the_cpu():
    """The calls around it; kernels are test_cuda.py's."""
    config = CONFIGS["bf16 O2 local"]
    with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b:
        expected = everything(0, config, a)
        use(lambda settings: LoggedCuda())
        found = everything(0, config, b)
    assert expected[0] == found[0]
    assert all(same(e, f) for e, f in zip(expected[1:], found[1:]))


def ranks_with_offload(rank, name):
    model, optimizer = make(CONFIGS[name])
    expected = steps(model, optimizer, range(6), rank), bits(model)
    use(lambda settings: LoggedOffload(settings.accumulation_sharded, 2))
    model, optimizer = make(CONFIGS[name])
    found = steps(model, optimizer, range(6), rank)
    return expected[0] == found and same(expected[1], bits(model))


@pytest.mark.parametrize("name", ["bf16 O2 local", "bf16 O3 sharded"])
def test_offload_has_the_bits_of_the_cpu_on_ranks(name):
    assert run_ranks(2, ranks_with_offload, name) == [True, True]


@pytest.mark.parametrize("state_first", [True, False])
def test_state_and_weights_of_a_fresh_model(state_first):
    """Mirrors follow weights that were loaded with their state."""
    config = CONFIGS["bf16 O2 local"]
    use(lambda settings: LoggedOffload(settings.accumulation_sharded))
    model, optimizer = make(config)
    steps(model, optimizer, range(3))
    weights, state = {k: v.clone() for k, v in model.state_dict().items()}, optimizer.state_dict()
    steps(model, optimizer, range(3, 5))
    for make_again in (lambda: make(config, seed=5), lambda: make_on_the_cpu(config)):
        fresh, ours = make_again()
        if state_first:
            ours.load_state_dict(state)
        fresh.load_state_dict(weights)
        if not state_first:
            ours.load_state_dict(state)
        steps(fresh, ours, range(3, 5))
        assert same(bits(model), bits(fresh))


def make_on_the_cpu(config):
    devices.choose = lambda model, parameters, settings: placement.Host()
    return make(config)  # with its parameter that is not contiguous


def fused(model, optimizer):
    """Layers that add into main_grad themselves."""
    for step in range(3):
        for p in model.parameters():
            p.main_grad.fill_(0.25 * (step + 1))
            p.grad_added_to_main_grad = True
        optimizer.step()
        assert not any(p.main_grad.any() for p in model.parameters())


def main_grads(choose):
    devices.choose = choose
    model = seeded_model()
    for p in model.parameters():
        p.main_grad = torch.zeros_like(p)
    model, optimizer = zerofp8.initialize(model, torch.optim.AdamW(model.parameters()), {})
    fused(model, optimizer)
    return bits(model)


def test_main_grad_is_zeroed_behind_its_copy():
    found = main_grads(lambda m, p, settings: LoggedOffload(settings.accumulation_sharded, 1000))
    assert same(found, main_grads(lambda m, p, settings: placement.Host()))


# -- what waits for what -------------------------------------------------------------------------

def offloaded(config=None, lag=1000, micro=1, **options):
    made = []

    def place(settings):
        made.append(LoggedOffload(settings.accumulation_sharded, lag, **options))
        return made[-1]

    use(place)
    model, optimizer = make(config or {}, micro=micro)
    made[0].log.clear()
    return model, optimizer, made[0]


def test_copies_are_ordered_and_kept():
    model, optimizer, place = offloaded()
    loss_of(model, 0, 0, 0).backward()
    assert place.log == ["follow", "copy", "keep"] * 6  # nothing is given yet, and nothing waits
    place.log.clear()
    optimizer.step()
    given = [f"add_gradient {i}" for i in (5, 4, 3, 2, 1, 0)]  # of the hooks
    calls = [c for c in place.log if c.startswith(("add_gradient", "end_micro", "step"))]
    assert sorted(calls[:6]) == sorted(given) and calls[6:] == ["end_micro_batch", "step"]
    assert place.log.index("wait") < place.log.index(calls[0])
    at = place.log.index("step")
    assert place.log[at:] == ["step", "follow", *["copy"] * 6, "lead"]


def test_gradients_are_given_in_the_order_of_the_hooks():
    order = {}
    for lag in (0, 1, 4, 1000):
        model, optimizer, place = offloaded(lag=lag, micro=2)
        for micro in range(2):
            loss_of(model, 0, 0, micro).backward()
        optimizer.step()
        order[lag] = [c for c in place.log if c.startswith(("add_gradient", "end_micro", "step"))]
    assert order[0] == order[1] == order[4] == order[1000]
    assert order[0].count("end_micro_batch") == 2 and order[0][6] == "end_micro_batch"


def test_copies_overlap_backward():
    model, optimizer, place = offloaded(lag=2)
    loss_of(model, 0, 0, 0).backward()
    assert [c for c in place.log if c == "wait"] != []  # of copies that were over already
    first = next(i for i, c in enumerate(place.log) if c.startswith("add_gradient"))
    assert place.log[:first].count("copy") == 3 and "copy" in place.log[first:]


@pytest.mark.parametrize("bound, most", [(1, 2), (40 * 40 * 4 + 500, 3)])
def test_host_memory_is_bounded(bound, most):
    model, optimizer, place = offloaded(bytes_on_the_way=bound)
    for step in range(2):
        loss_of(model, step, 0, 0).backward()
        optimizer.step()
    largest = sorted((p.numel() * 4 for p in model.parameters()), reverse=True)
    assert place.most[0] <= max(most, 2)
    assert place.most[1] <= max(bound, sum(largest[:2]))


def test_a_sharded_micro_batch_ends_with_all_of_its_gradients():
    model, optimizer, place = offloaded(CONFIGS["bf16 O3 sharded"])
    loss_of(model, 0, 0, 0).backward()
    calls = [c for c in place.log if c.startswith(("add_gradient", "end_micro"))]
    assert len(calls) == 7 and calls[-1] == "end_micro_batch"


@pytest.mark.parametrize("call", ["full_gradient", "zero_grad", "grad_norms"])
def test_all_is_given_before(call):
    model, optimizer, place = offloaded()
    loss_of(model, 0, 0, 0).backward()
    name = {"full_gradient": "reduce_gradients", "zero_grad": "discard_gradients",
            "grad_norms": "reduce_gradients"}[call]
    arguments = [model[0].weight] if call == "full_gradient" else []
    getattr(optimizer, call)(*arguments)
    before = place.log[:place.log.index(name)]
    assert sum(c.startswith("add_gradient") for c in before) == 6


def test_mirrors_are_not_written_while_they_are_copied():
    model, optimizer, place = offloaded()
    loss_of(model, 0, 0, 0).backward()
    optimizer.step()
    place.log.clear()
    optimizer.step()  # without a gradient: nothing else to wait for
    assert place.log[:2] == ["wait", "step"]
    with torch.no_grad():
        model[0].weight.zero_()
    place.log.clear()
    optimizer.full_state(model[0].weight)  # the mirror becomes what the weight is
    assert place.log[:2] == ["wait", "weight_changed"]
    with tempfile.TemporaryDirectory() as folder:
        optimizer.save(folder)
        optimizer.step()
        place.log.clear()
        optimizer.load(folder)
    assert place.log[place.log.index("load") - 1] == "wait"


def test_close_waits_for_copies():
    model, optimizer, place = offloaded()
    loss_of(model, 0, 0, 0).backward()
    place.log.clear()
    optimizer.close()
    assert place.log == ["synchronize", "close"]
    assert not place._queue
    optimizer.close()
