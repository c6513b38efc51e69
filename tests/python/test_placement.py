"""Parameters on CUDA devices and offload, with stand-ins for streams and CPU tensors: what waits
for what, the CPU's bits, bounds, errors. test_cuda.py is what needs a GPU."""

import tempfile
from types import SimpleNamespace

import pytest
import torch
from late_stream import CPU, LateStream, LoggedCuda, LoggedOffload, use
from ranks import run_ranks
from reference import loss_of, seeded_model
from torch import nn

import zerofp8
from zerofp8 import devices, groups, placement, streams

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


# -- offload: the CPU's bits ---------------------------------------------------------------------

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


# -- offload: what waits for what ----------------------------------------------------------------

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


# -- CUDA ----------------------------------------------------------------------------------------

def on_cuda(main_grad=False):
    made = []
    use(lambda settings: made.append(LoggedCuda()) or made[-1])
    model = nn.Linear(4, 3)
    if main_grad:
        model.weight.main_grad = torch.zeros_like(model.weight)
    model, optimizer = zerofp8.initialize(model, torch.optim.AdamW(model.parameters()), {})
    assert made[0].log == ["follow"]  # the engine's start
    made[0].log.clear()
    return model, optimizer, made[0].log


def test_the_side_stream_waits_and_gradients_are_kept():
    model, optimizer, log = on_cuda()
    model(torch.ones(2, 4)).sum().backward()
    assert log[:3] in (["follow", "add_gradient 1", "keep"], ["follow", "add_gradient 0", "keep"])
    assert log[3:] == ["follow", {"1": "add_gradient 0", "0": "add_gradient 1"}[log[1][-1]],
                       "keep", "end_micro_batch"]
    log.clear()
    optimizer.step()
    assert log == ["set_group", "follow", "step", "lead"]


def test_the_model_waits_before_main_grad_is_zeroed():
    model, optimizer, log = on_cuda(main_grad=True)
    seen = []
    lead = LateStream.lead
    try:
        LateStream.lead = lambda self: (seen.append(bool(model.weight.main_grad.any())),
                                        lead(self))
        model.weight.main_grad.fill_(1)
        model.weight.grad_added_to_main_grad = True
        optimizer.all_reduce_grads()
    finally:
        LateStream.lead = lead
    assert log == ["follow", "add_gradient 0", "keep", "lead"] and seen == [True]
    assert not model.weight.main_grad.any()


def test_weights_that_the_engine_reads_or_writes():
    model, optimizer, log = on_cuda()
    with torch.no_grad():
        model.weight.zero_()
    state = optimizer.full_state(model.weight)
    assert log[:3] == ["follow", "weight_changed", "lead"] and state["master"].device == CPU
    for call, name in ((optimizer.weights_changed, "weights_changed"),):
        log.clear()
        call()
        assert log == ["follow", name, "lead"]
    with tempfile.TemporaryDirectory() as folder:
        for call in ("save", "load"):
            log.clear()
            getattr(optimizer, call)(folder)
            at = log.index(call)
            assert log[at - 1:at + 2] == ["follow", call, "lead"]
    log.clear()
    optimizer.close()
    assert log == ["synchronize", "close"]


def test_the_model_waits_also_where_a_call_fails():
    log = []

    class Failing:
        def add_gradient(self):
            pass

        end_micro_batch = add_gradient

        def step(self):
            raise zerofp8.NumericError("at its floor")

    place = placement.Cuda(CPU, LateStream(log=log), lambda index, handle: None)
    with pytest.raises(zerofp8.NumericError):
        place.attach(Failing()).step()
    assert log == ["follow", "lead"]


class Call:
    """A stand-in for a part of torch.cuda that writes its calls down."""

    def __init__(self, log, name):
        self._log, self._name = log, name

    def __getattr__(self, method):
        return lambda *a: self._log.append((self._name, method, *a))

    def __enter__(self):
        self._log.append((self._name, "entered"))

    def __exit__(self, *unused):
        self._log.append((self._name, "left"))


def test_side_stream_calls_torch(monkeypatch):
    log = []
    side, current, event = (Call(log, n) for n in ("side", "current", "event"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    stream = streams.SideStream(torch.device("cuda:1"))
    stream.follow()
    stream.lead()
    tensor = Call(log, "tensor")
    stream.keep(tensor)
    assert log == [("side", "wait_stream", current), ("current", "wait_stream", side),
                   ("tensor", "record_stream", side)]
    log.clear()
    to = torch.zeros(2)
    stream.copy(to, torch.ones(2))
    assert to.tolist() == [1, 1] and log == [("side", "entered"), ("side", "left")]
    log.clear()
    assert stream.mark() is event and log == [("event", "record", side)]
    stream.synchronize()
    assert log[-1] == ("side", "synchronize")


def test_host_memory_is_locked_where_cuda_is(monkeypatch):
    asked = []

    def empty(shape, dtype, pin_memory):
        asked.append(pin_memory)
        if len(asked) == 3:
            raise RuntimeError("CUDA error: out of memory\nmore")
        return torch.zeros(shape, dtype=dtype)

    fake = SimpleNamespace(empty=empty, cuda=SimpleNamespace(is_available=lambda: len(asked) > 0))
    monkeypatch.setattr(streams, "torch", fake)
    for _ in range(2):
        assert streams.host_memory(torch.ones(2, 3)).shape == (2, 3)
    assert asked == [False, True]
    with pytest.raises(zerofp8.Error, match="24 bytes.*out of memory.*offload_optimizer"):
        streams.host_memory(torch.ones(2, 3))


@pytest.mark.parametrize("on_device", [True, False])
def test_broadcast_follows_the_device(monkeypatch, on_device):
    log = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("synchronize"))

    def broadcast(address, size, root):
        log.append(("broadcast", address, size, root))

    place = placement.Cuda(CPU, LateStream(), lambda index, handle: None)
    comm = SimpleNamespace(on_device=on_device, broadcast=broadcast)
    tensor = torch.ones(6)
    place.broadcast(comm, tensor)
    call = ("broadcast", tensor.data_ptr(), 24, 0)
    assert log == (["synchronize", call, "synchronize"] if on_device else [call])


# -- errors --------------------------------------------------------------------------------------

def test_mixed_devices_are_named():
    places = [("a", torch.device("cuda:0")), ("b", torch.device("cuda:0")),
              ("c", torch.device("cuda:1"))]
    with pytest.raises(zerofp8.ConfigError, match='"a" on cuda:0.*"c" on cuda:1.*one device'):
        devices.common_device(places)
    with pytest.raises(zerofp8.ConfigError, match='"a" on cpu.*"c" on cuda:1'):
        devices.common_device([("a", CPU), places[2]])
    assert devices.common_device(places[:2]) == torch.device("cuda:0")
    assert devices.common_device([]) == CPU


def test_a_device_that_the_build_does_not_run():
    with pytest.raises(zerofp8.ConfigError) as error:
        devices.check_cuda(torch.device("cuda:0"), "this build has no CUDA")
    for part in ("cuda:0", "this build has no CUDA", "ZEROFP8_WITH_CUDA=ON", "offload_optimizer"):
        assert part in str(error.value)
    devices.check_cuda(torch.device("cuda:0"), "")


def choice(device, offload):
    model = SimpleNamespace(named_parameters=list, named_buffers=list)
    named = SimpleNamespace(name="w", parameter=SimpleNamespace(device=torch.device(device)))
    settings = SimpleNamespace(offload_optimizer=offload, accumulation_sharded=True)
    return devices.choose(model, [named], settings)


def test_choice(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Call([], "side"))
    reason = "this build has no CUDA"
    monkeypatch.setattr(devices._C, "why_no_cuda", lambda index=0: reason)
    assert type(choice("cpu", "none")) is type(choice("cpu", "cpu")) is placement.Host
    assert choice("cuda:1", "cpu").kind == "the CPU (offloaded)"  # needs no kernels
    with pytest.raises(zerofp8.ConfigError, match=reason):
        choice("cuda:1", "none")
    reason = ""
    chosen = choice("cuda:1", "none")
    assert (type(chosen), chosen.index) == (placement.Cuda, 1)


def test_other_devices_are_refused_by_name():
    model = nn.Linear(3, 3, device="meta")
    with pytest.raises(zerofp8.ConfigError, match='"weight": given on meta; allowed: cpu or cuda'):
        zerofp8.initialize(model, torch.optim.AdamW(model.parameters()), {})


def test_gradient_on_another_device():
    model, optimizer, _ = on_cuda(main_grad=True)
    model.weight.main_grad = torch.zeros(3, 4, device="meta")
    model.weight.grad_added_to_main_grad = True
    with pytest.raises(zerofp8.ArgumentError, match='"weight" is on cpu, a gradient.*on meta'):
        optimizer.step()


def different_places(rank):
    if rank == 1:
        use(lambda settings: LoggedOffload(settings.accumulation_sharded))
    make({})


def test_ranks_in_different_places():
    errors = run_ranks(2, different_places, errors=True)
    assert len({str(e) for e in errors}) == 1 and isinstance(errors[0], zerofp8.ConfigError)
    assert "state on the CPU on rank 0, state on the CPU (offloaded) on rank 1" in str(errors[0])


def backend(written, index, built, monkeypatch):
    monkeypatch.setattr(groups._C, "built_with_nccl", lambda: built)
    config = zerofp8.Config.parse('{"zerofp8": {"comm_backend": "%s"}}' % written)
    kind = "the CPU (offloaded)" if index is None else "cuda"
    return groups.choose_backend(config, SimpleNamespace(index=index, kind=kind))


def test_choice_of_nccl(monkeypatch):
    assert backend("auto", 0, True, monkeypatch) == "nccl"
    assert backend("auto", 0, False, monkeypatch) == "torch"
    assert backend("auto", None, True, monkeypatch) == "torch"
    assert backend("torch", 0, True, monkeypatch) == "torch"
    assert backend("nccl", 0, True, monkeypatch) == "nccl"
    with pytest.raises(zerofp8.ConfigError, match=r'"nccl", and state is on the CPU \(offloaded'):
        backend("nccl", None, True, monkeypatch)
    with pytest.raises(zerofp8.UnsupportedError, match="without NCCL.*ZEROFP8_WITH_NCCL=ON"):
        backend("nccl", 0, False, monkeypatch)


def test_offload_of_a_model_on_the_cpu_is_accepted():
    config = {"bf16": {"enabled": True},
              "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    model, optimizer = make(config)
    assert optimizer.settings.offload_optimizer == "cpu"
    assert "local, on the CPU" in str(optimizer.plan)
    assert type(optimizer._engine.placement) is placement.Host
