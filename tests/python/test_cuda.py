"""Training on a CUDA device, and offloaded from it, has the CPU's bits. Needs a GPU."""

import pytest
import torch
from cuda_runs import Captured, gradients, make, run
from launchers import lines, torchrun

import zerofp8
from zerofp8 import _C

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(),
                                reason="torch sees no CUDA device")
needs_kernels = pytest.mark.skipif(bool(_C.why_no_cuda(0)), reason=_C.why_no_cuda(0) or "-")
needs_nccl = pytest.mark.skipif(not _C.built_with_nccl(), reason="built without NCCL")
LEVELS = ["O0", "O1", "O2", "O3"]


def same(a, b):
    return a[0] == b[0] and all(torch.equal(x, y) for x, y in zip(a[1], b[1]))


def whole(optimizer, model):
    states = [optimizer.full_state(p) for p in model.parameters()]
    return [s[k].cpu() for s in states for k in ("master", "exp_avg", "exp_avg_sq")]


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("offload", [pytest.param(False, marks=needs_kernels), True])
def test_the_bits_of_the_cpu(level, stage, offload, tmp_path):
    expected_model, expected = make("cpu", level, stage=stage)
    model, optimizer = make("cuda", level, offload=offload, stage=stage)
    assert same(run(expected_model, expected, range(5)), run(model, optimizer, range(5)))
    for a, b in zip(whole(expected, expected_model), whole(optimizer, model)):
        assert torch.equal(a, b)
    assert optimizer.full_state(model[0].weight, "master").device.type == "cuda"
    with torch.no_grad():
        for m in (model, expected_model):
            m[0].weight.clamp_(-0.1, 0.1)
    optimizer.save(tmp_path)
    saved = optimizer.state_dict()
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    wanted = run(expected_model, expected, range(5, 8))
    assert same(wanted, run(model, optimizer, range(5, 8)))
    optimizer.load(tmp_path)
    assert same(wanted, run(model, optimizer, range(5, 8)))
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    assert same(wanted, run(model, optimizer, range(5, 8)))


@pytest.mark.parametrize("offload", [pytest.param(False, marks=needs_kernels), True])
def test_gradients_survive_a_busy_allocator(offload):
    """Memory of gradients is handed out again at once, while the side stream is behind."""
    expected_model, expected = make("cpu", "O2")
    wanted = run(expected_model, expected, range(4))
    model, optimizer = make("cuda", "O2", offload=offload)
    busy = torch.randn(4096, 4096, device="cuda")
    side = optimizer._engine.placement._side
    found = []
    for step in range(4):
        for micro in range(2):
            with torch.cuda.stream(side.stream):  # what is queued there comes late
                for _ in range(5):
                    busy @ busy
            gradients(model, step, 0, micro)
            rubbish = [torch.full_like(p, float("nan")) for p in model.parameters() for _ in "12"]
        report = optimizer.step()
        found.append((report.applied, str(report.grad_norm)))
    del rubbish
    assert same(wanted, (found, [p.detach().cpu().float() for p in model.parameters()]))


@needs_kernels
@pytest.mark.parametrize("level", LEVELS)
def test_a_captured_step_has_the_bits_of_the_cpu(level):
    expected_model, expected = make("cpu", level, transposed=False)
    model, optimizer = make("cuda", level, capturable=True, transposed=False)
    graph, found = Captured(model, optimizer), []
    for step in range(5):
        for o in (expected, optimizer):
            o.param_groups[0]["lr"] = 3e-3 / (1 + step)
        wanted = run(expected_model, expected, [step])[0]
        report = graph.step(step)
        found.append((report.applied, str(report.grad_norm)))
        assert found[-1:] == wanted
    assert optimizer.applied_steps == 4 and optimizer.skipped_steps == 1
    assert all(torch.equal(p.cpu(), q)
               for p, q in zip(model.parameters(), expected_model.parameters()))
    for a, b in zip(whole(expected, expected_model), whole(optimizer, model)):
        assert torch.equal(a, b)


@needs_kernels
def test_a_capture_without_capturable_is_an_error():
    model, optimizer = make("cuda", "O2", transposed=False)
    for micro in range(2):
        gradients(model, 0, 0, micro)
    optimizer.step()
    with pytest.raises(zerofp8.Error, match="captured into a graph; make the optimizer capturable"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            optimizer.step()


@needs_kernels
def test_grad_scaler():
    model, optimizer = make("cuda", "O0")
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    x = torch.randn(4, 12, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        for _ in range(2):
            scaler.scale(model(x).float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.last_report.applied


@needs_kernels
def test_side_stream_of_the_models():
    """The model itself on a stream that is not the default one."""
    expected_model, expected = make("cpu", "O3")
    model, optimizer = make("cuda", "O3")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = run(model, optimizer, range(4))
    assert same(run(expected_model, expected, range(4)), found)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_mixed_devices():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3, device="cuda:0"),
                                torch.nn.Linear(3, 3, device="cuda:1"))
    with pytest.raises(zerofp8.ConfigError, match="on cuda:0.*on cuda:1"):
        zerofp8.initialize(model, torch.optim.AdamW(model.parameters()), {})


@needs_kernels
@needs_nccl
def test_nccl_on_one_rank():
    model, optimizer = make("cuda", "O2", backend="nccl")
    assert run(model, optimizer, range(2))[0][0][0] and optimizer.plan.connected_by == "self"


over_nccl = [needs_kernels, needs_nccl,
             pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")]


@pytest.mark.parametrize("backend, how", [
    pytest.param("torch", "plain", marks=needs_kernels), ("torch", "offload"),
    pytest.param("nccl", "plain", marks=over_nccl),
    pytest.param("nccl", "captured", marks=over_nccl)])
def test_two_ranks(backend, how):
    wanted = lines(torchrun(2, "job_cuda.py", "cpu", "torch", "plain"))
    found = lines(torchrun(2, "job_cuda.py", "cuda", backend, how))
    for w, f in zip(wanted, found):
        assert w["found"] == f["found"] and w["weights"] == f["weights"]
    assert found[0]["connected by"] == ("nccl" if backend == "nccl" else "torch gloo")
