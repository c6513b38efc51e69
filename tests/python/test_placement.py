"""Parameters on CUDA devices, with stand-ins for streams and CPU tensors: what waits for what, the
choice of a placement, errors. test_offload.py has offload, test_cuda.py what needs a GPU."""

import tempfile
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from late_stream import CPU, LateStream, LoggedCuda, LoggedOffload, use
from ranks import run_ranks
from torch import nn

import zerofp8
from zerofp8 import devices, groups, placement, streams


@pytest.fixture(autouse=True)
def own_choice(monkeypatch):
    monkeypatch.setattr(devices, "choose", devices.choose)  # put back after each test


# -- what waits for what -------------------------------------------------------------------------


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
    assert log == ["follow", "synchronize", "close"]


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
    model = nn.Linear(4, 3)
    zerofp8.initialize(model, torch.optim.AdamW(model.parameters()), {}, timeout=60)


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


def nccl_communicators(rank, gpus, pipeline):
    """Devices of the communicators over NCCL, with process groups in their place."""
    made = []

    def over_nccl(name, timeout, make_group, device):
        made.append(device)
        return groups._C.process_group_communicator(name, timeout, make_group)

    groups._C.built_with_nccl = lambda: True
    groups._C.nccl_communicator = over_nccl
    devices.identity = lambda index: gpus[rank]
    use(lambda settings: LoggedCuda(index=rank))
    model = nn.Linear(4, 3)
    cut = {}
    if pipeline:
        alone = [dist.new_group([r]) for r in (0, 1)]
        cut = {"data_parallel_group": alone[rank], "pipeline_parallel_group": dist.group.WORLD}
        zerofp8.tie(model.weight, "weight")
    model, optimizer = zerofp8.initialize(model, torch.optim.AdamW(model.parameters()), {},
                                          timeout=60, **cut)
    (model(torch.ones(2, 4)) * (rank + 1)).sum().backward()
    assert optimizer.step().applied
    return made, model.weight.detach().tolist()


@pytest.mark.parametrize("pipeline", [False, True])
def test_payloads_go_over_nccl(pipeline):
    """A pipeline's ranks exchange control data, and tied gradients."""
    first, second = run_ranks(2, nccl_communicators, ["a", "b"], pipeline)
    assert (first[0], second[0]) == ([0], [1]) and first[1] == second[1]


def test_two_ranks_on_one_device():
    errors = run_ranks(2, nccl_communicators, ["a", "a"], False, errors=True)
    assert len({str(e) for e in errors}) == 1 and isinstance(errors[0], zerofp8.ConfigError)
    assert "ranks 0 and 1 on one CUDA device (a)" in str(errors[0]) and '"torch"' in str(errors[0])


def test_no_memory_for_a_contiguous_copy():
    def clone(memory_format):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")

    p = SimpleNamespace(is_contiguous=lambda: False, detach=lambda: SimpleNamespace(clone=clone))
    with pytest.raises(zerofp8.Error, match='"w" is not contiguous.*2 GiB.*before initialize'):
        placement.Cuda(CPU, LateStream()).make_mirrors([SimpleNamespace(name="w", parameter=p)])


def test_offload_of_a_model_on_the_cpu_is_accepted():
    model = nn.Linear(4, 3).bfloat16()
    config = {"bf16": {"enabled": True},
              "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    model, optimizer = zerofp8.initialize(model, torch.optim.AdamW(model.parameters()), config)
    assert optimizer.settings.offload_optimizer == "cpu"
    assert "local, on the CPU" in str(optimizer.plan)
    assert type(optimizer._engine.placement) is placement.Host
