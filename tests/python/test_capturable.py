"""``initialize(..., capturable=True)``: steps that are queued, with the bits of the others."""

import pytest
import torch
from cuda_runs import gradients, make, run
from late_stream import LoggedCuda, LoggedOffload, use
from ranks import run_ranks

import zerofp8
from zerofp8 import devices


@pytest.fixture(autouse=True)
def choose_again():
    chosen = devices.choose
    yield
    devices.choose = chosen


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_has_the_bits_of_an_ordinary_step(level, tmp_path):
    expected_model, expected = make("cpu", level)
    model, optimizer = make("cpu", level, capturable=True)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.7) for o in (expected, optimizer)]
    assert optimizer.last_report is None and optimizer.grad_norm != optimizer.grad_norm
    for step in range(5):  # step 2 is skipped
        wanted = run(expected_model, expected, [step])
        found = run(model, optimizer, [step])
        assert wanted[0] == found[0]
        assert all(torch.equal(a, b) for a, b in zip(wanted[1], found[1]))
        for scheduler in schedulers:
            scheduler.step()
    assert optimizer.applied_steps == 4 and optimizer.skipped_steps == 1
    assert optimizer.last_report.step == 4 and optimizer.grad_norm == expected.grad_norm
    for p, q in zip(model.parameters(), expected_model.parameters()):
        a, b = optimizer.full_state(p), expected.full_state(q)
        assert a["step"] == b["step"]
        assert all(torch.equal(a[k], b[k]) for k in ("master", "exp_avg", "exp_avg_sq"))
    optimizer.save(tmp_path)
    expected.load(tmp_path)  # of one kind by the other
    assert run(expected_model, expected, [5])[0] == run(model, optimizer, [5])[0]
    optimizer.load(tmp_path)
    assert optimizer.applied_steps == 4


def test_the_report_comes_when_it_is_asked_for():
    model, optimizer = make("cpu", "O2", capturable=True)
    for micro in range(2):
        gradients(model, 0, 0, micro)
    report = optimizer.step()
    assert "wait" in repr(report)
    assert report.applied and report.step == 1 and report.micro_batches == 2
    assert report.grad_norm == optimizer.last_report.grad_norm > 0
    with pytest.raises(AttributeError):
        report.nothing_of_the_kind
    with pytest.raises(AttributeError):
        report._private
    for micro in range(2):
        gradients(model, 2, 0, micro)  # infinite
    report = optimizer.step()
    assert not report.applied and "non-finite gradient in parameter" in report.skip_reason
    assert report.bad_parameter == "0.weight" and report.bad_rank == 0


def test_calls_are_ordered_with_the_model():
    """The engine follows the model's work, and the model what was queued of a step."""
    made = []
    use(lambda settings: made.append(LoggedCuda()) or made[-1])
    model, optimizer = make("cpu", "O1", capturable=True, transposed=False)
    log = made[0].log
    for micro in range(2):
        gradients(model, 0, 0, micro)
    log.clear()
    optimizer.step()
    assert log == ["set_group", "follow", "enqueue_step", "lead"]
    log.clear()
    optimizer.last_report
    assert log == ["follow", "fetch_report"]
    log.clear()
    optimizer.param_groups[0]["lr"] = 0.125
    optimizer.before_replay()
    assert log == ["set_group", "follow", "write_groups", "lead"]
    log.clear()
    with torch.no_grad():
        model[0].weight.zero_()
    optimizer.before_replay()
    assert log == ["follow", "weight_changed", "lead", "follow", "write_groups", "lead"]
    assert optimizer.applied_steps == 1


def test_what_the_host_decides_is_refused():
    model = torch.nn.Linear(3, 2).half()
    with pytest.raises(zerofp8.ConfigError, match="capturable.*fp16/enabled.*bf16 or fp32"):
        zerofp8.initialize(model, torch.optim.AdamW(model.parameters()),
                           {"fp16": {"enabled": True}}, capturable=True)
    use(lambda settings: LoggedOffload(settings.accumulation_sharded))
    with pytest.raises(zerofp8.ConfigError, match="capturable.*offloaded.*offload_optimizer"):
        make("cpu", "O1", capturable=True)


def test_main_grad_is_refused():
    model = torch.nn.Linear(3, 2)
    model.weight.main_grad = torch.zeros(2, 3)
    with pytest.raises(zerofp8.ConfigError, match="capturable.*main_grad.*fusion off"):
        zerofp8.initialize(model, torch.optim.AdamW(model.parameters()), {}, capturable=True)


def test_nothing_is_looked_at_on_a_device():
    """One-element stand-ins are looked into for mistakes on the CPU, and left alone on a device."""
    looked = []

    class Looked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(1))

        def forward(self, x):
            return x * self.scale

    for index in (None, 0):
        use(lambda settings, index=index: LoggedCuda(index))
        model, optimizer = Looked(), None
        model, optimizer = zerofp8.initialize(model, torch.optim.AdamW(model.parameters()), {},
                                              capturable=True)
        model(torch.ones(2)).sum().backward()
        model.scale.grad.as_subclass(torch.Tensor).fill_(1.0)  # a mistake
        try:
            optimizer.step()
            looked.append(False)
        except zerofp8.ArgumentError:
            looked.append(True)
    assert looked == [True, False]


def test_reports_of_steps_before_a_load_are_gone(tmp_path):
    model, optimizer = make("cpu", "O2", capturable=True)
    run(model, optimizer, [0])
    optimizer.save(tmp_path)
    assert optimizer.last_report.step == 1
    optimizer.load(tmp_path)
    assert optimizer.last_report is None and optimizer.applied_steps == 1


def test_the_template_may_ask_for_it():
    for asked, expected in ((None, True), (False, False)):
        model = torch.nn.Linear(3, 2)
        template = torch.optim.AdamW(model.parameters(), capturable=True)
        _, optimizer = zerofp8.initialize(model, template, {}, capturable=asked)
        model(torch.ones(2, 3)).sum().backward()
        assert (type(optimizer.step()).__name__ == "PendingReport") is expected


def test_only_for_capturable_optimizers():
    _, optimizer = make("cpu", "O1")
    with pytest.raises(zerofp8.ArgumentError, match="not capturable.*capturable=True"):
        optimizer.before_replay()
    model, optimizer = make("cpu", "O0", capturable=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(torch.ones(4, 12, dtype=torch.bfloat16)).sum()).backward()
    with pytest.raises(zerofp8.ArgumentError, match="capturable engine takes 1 only"):
        scaler.step(optimizer)


def _two_ranks(rank):
    model, optimizer = make("cpu", "O2", capturable=True, stage=2)
    expected_model, expected = make("cpu", "O2", stage=2)
    assert run(model, optimizer, range(4), rank)[0] == run(expected_model, expected, range(4),
                                                           rank)[0]
    for p, q in zip(model.parameters(), expected_model.parameters()):
        assert torch.equal(p, q)
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * (1 + rank)
    gradients(model, 5, rank, 0)
    optimizer.step()
    try:
        optimizer.last_report
    except zerofp8.ArgumentError as error:
        assert "ranks disagree on this step" in str(error)
    else:
        raise AssertionError("no error")
    for p, q in zip(model.parameters(), expected_model.parameters()):
        assert torch.equal(p, q)
    # Told once; then the step can be made again.
    assert not optimizer.last_report.applied
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    gradients(model, 5, rank, 0)
    assert optimizer.step().applied
    return "fine"


def test_two_ranks():
    assert run_ranks(2, _two_ranks) == ["fine"] * 2


def _ranks_differ(rank):
    try:
        make("cpu", "O1", capturable=rank == 0)
    except zerofp8.Error as error:
        return str(error)
    return "no error"


def test_ranks_that_differ_are_told():
    for text in run_ranks(2, _ranks_differ):
        assert "capturable" in text
