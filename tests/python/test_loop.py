"""Plain loops: hooks, schedulers, closures, clipping, GradScaler, unusual parameters."""

import gc
import weakref

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerofp8
from zerofp8.taken import TakenGradient


def start(model, config=None, lr=0.1, template=torch.optim.AdamW, **options):
    keywords = {k: options.pop(k) for k in ("loss_is_divided", "opt_level") if k in options}
    optimizer = template(model.parameters(), lr=lr, **{"weight_decay": 0, **options})
    return zerofp8.initialize(model, optimizer, config or {}, timeout=60, **keywords)


def torch_twin(model, lr=0.1, template=torch.optim.AdamW, **options):
    import copy
    twin = copy.deepcopy(model)
    return twin, template(twin.parameters(), lr=lr, **{"weight_decay": 0, **options})


def same_weights(a, b, tolerance=1e-6):
    for p, q in zip(a.parameters(), b.parameters()):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def train(model, optimizer, steps=5, before_step=lambda i: None):
    generator = torch.Generator().manual_seed(1)
    losses = []
    for i in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 6, generator=generator)).square().mean()
        loss.backward()
        before_step(i)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("template", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("weight_decay", [0, 0.1])
def test_steps_are_torchs(template, weight_decay):
    model = small()
    twin, theirs = torch_twin(model, template=template, weight_decay=weight_decay)
    model, ours = start(model, template=template, weight_decay=weight_decay)
    assert train(model, ours) == pytest.approx(train(twin, theirs), rel=1e-5)
    same_weights(model, twin, 1e-5)
    assert isinstance(ours, torch.optim.Optimizer)


def held_bytes(model):
    held = [p.grad.untyped_storage() for p in model.parameters() if p.grad is not None]
    return sum({s.data_ptr(): s.nbytes() for s in held}.values())


def test_gradients_are_freed_at_once():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).bfloat16()
    live, peak, watched = [], [], []

    def watch(p):  # called before the gradient is accumulated
        def see(grad):
            watched.append(weakref.ref(grad))
            live.append(sum(g().numel() * g().element_size() for g in watched if g() is not None))
            peak.append(held_bytes(model))
        p.register_hook(see)

    for p in model.parameters():
        watch(p)
    model, optimizer = start(model, {"bf16": {"enabled": True}}, opt_level="O2")
    for _ in range(3):
        model(torch.randn(4, 64).bfloat16()).float().square().mean().backward()
        assert all(isinstance(p.grad, TakenGradient) for p in model.parameters())
        assert held_bytes(model) <= 2
        optimizer.step()
        assert all(p.grad is None for p in model.parameters())
    assert max(peak) <= 2                   # bytes in p.grad while backward ran
    assert max(live) <= 2 * 64 * 64 * 2     # the one being given, and autograd's next


def test_changes_of_groups_are_pushed():
    model = small()
    twin, theirs = torch_twin(model)
    model, ours = start(model)
    for values in ({"weight_decay": 0.3}, {"eps": 1e-3}, {"betas": (0.5, 0.7)}, {"lr": 0.01}):
        for o in (theirs, ours):
            o.param_groups[0].update(values)
        assert train(model, ours, 2) == pytest.approx(train(twin, theirs, 2), rel=1e-5)
    same_weights(model, twin, 1e-5)


def test_every_kind_of_scheduler_follows_torch():
    for make in (lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
                 lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=8),
                 lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 6),
                 lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda k: 1 / (k + 1))):
        model = small()
        twin, theirs = torch_twin(model)
        model, ours = start(model)
        a, b = make(theirs), make(ours)
        for _ in range(6):
            train(twin, theirs, 1)
            train(model, ours, 1)
            a.step()
            b.step()
        same_weights(model, twin, 1e-5)


def test_scheduler_made_before_initialize_still_works():
    model = small()
    template = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(template, 1, 0.5)
    model, optimizer = zerofp8.initialize(model, template, {})
    train(model, optimizer, 1)
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_groups_and_tensor_lr():
    model = small()
    groups = lambda m: [{"params": m[0].parameters(), "lr": 0.05},  # noqa: E731
                        {"params": m[2].parameters(), "weight_decay": 0.2, "betas": (0.8, 0.9)}]
    import copy
    twin = copy.deepcopy(model)
    theirs = torch.optim.AdamW(groups(twin), lr=torch.tensor(0.1))
    ours = torch.optim.AdamW(groups(model), lr=torch.tensor(0.1))
    model, ours = zerofp8.initialize(model, ours, {})
    train(twin, theirs)
    train(model, ours)
    same_weights(model, twin, 1e-5)


def test_closure_returns_its_value():
    model, optimizer = start(small())

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 6)).sum()
        loss.backward()
        return loss

    assert isinstance(optimizer.step(closure), torch.Tensor)
    assert optimizer.last_report.applied and optimizer.last_report.step == 1


def test_zero_grad_throws_accumulated_gradients_away():
    model = small()
    twin, theirs = torch_twin(model)
    model, ours = start(model)
    (model(torch.ones(2, 6)) * 100).sum().backward()
    assert train(model, ours) == pytest.approx(train(twin, theirs), rel=1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("sharded", [True, False])
def test_activation_checkpointing(reentrant, sharded):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x):
            x = checkpoint(lambda t: self.a(t).tanh(), self.c.weight.new_zeros(1) + x,
                           use_reentrant=False)
            x = checkpoint(lambda t: self.b(t).tanh(), x, use_reentrant=reentrant)
            x = checkpoint(lambda t: self.b(t).tanh(), x, use_reentrant=reentrant)
            return self.c(x)

    torch.manual_seed(0)
    model = Net()
    twin, theirs = torch_twin(model)
    model, ours = start(model, {"zero_optimization": {"stage": 1},
                                "gradient_accumulation_dtype": {"dtype": "fp32",
                                                                "sharded": sharded}})
    assert train(model, ours) == pytest.approx(train(twin, theirs), rel=1e-5)
    assert ours.last_report.micro_batches == 1


def test_compiled_module():
    model = small()
    twin, theirs = torch_twin(model)
    compiled = torch.compile(model, backend="aot_eager")
    compiled, ours = start(compiled)
    assert train(compiled, ours) == pytest.approx(train(twin, theirs), rel=1e-5)
    assert [n.name for n in ours._parameters] == [n for n, _ in twin.named_parameters()]


def test_unusual_parameters():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.transposed = nn.Parameter(torch.randn(3, 6).t())
            self.strided = nn.Parameter(torch.randn(12)[::2])
            self.empty = nn.Parameter(torch.zeros(0, 8))
            self.scalar = nn.Parameter(torch.tensor(2.0))
            self.unused = nn.Parameter(torch.ones(3))
            self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
            self.tied = nn.Linear(3, 3)
            self.again = self.tied

        def forward(self, x):
            y = (x * self.strided) @ self.transposed * self.scalar + self.frozen
            return self.again(self.tied(y)) + self.empty.sum()

    model = Net()
    assert not model.transposed.is_contiguous()
    twin, theirs = torch_twin(model, weight_decay=0.1)
    twin.transposed.data = model.transposed.data.clone(memory_format=torch.preserve_format)
    model, ours = start(model, weight_decay=0.1)
    assert train(model, ours) == pytest.approx(train(twin, theirs), rel=1e-5)
    same_weights(model, twin, 1e-5)
    assert not model.transposed.is_contiguous() and model.empty.shape == (0, 8)
    assert ours.last_report.unused_parameters == 2
    assert ours.full_gradient is not None


def test_fp32_parameters_beside_bf16():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10).bfloat16(), nn.Linear(10, 3))
    model[1].register_forward_pre_hook(lambda m, x: (x[0].float(),))
    model, optimizer = start(model, {"bf16": {"enabled": True}}, lr=0.01)
    for _ in range(20):
        loss = model(torch.ones(2, 6).bfloat16()).square().mean()
        loss.backward()
        optimizer.step()
    assert loss < 0.1 and model[0].weight.dtype == torch.bfloat16


def test_parameter_unfrozen_later():
    model = small()
    model[0].requires_grad_(False)
    model, optimizer = start(model)
    before = model[0].weight.clone()
    train(model, optimizer, 2)
    assert torch.equal(before, model[0].weight)
    model[0].requires_grad_(True)
    train(model, optimizer, 2)
    assert not torch.equal(before, model[0].weight)


def test_leftover_gradients_are_taken():
    model = small()
    twin, theirs = torch_twin(model)
    model, ours = start(model)
    for m, o in ((twin, theirs), (model, ours)):
        for p in m.parameters():
            p.grad = torch.full_like(p, 0.5)
        o.step()
    same_weights(model, twin)


def test_weights_written_from_outside_are_noticed():
    model, optimizer = start(small().bfloat16(), {"bf16": {"enabled": True}}, lr=0.0)
    for _ in range(2):
        model(torch.ones(2, 6).bfloat16()).float().sum().backward()
        optimizer.step()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(2.0)
    model(torch.ones(2, 6).bfloat16()).float().sum().backward()
    optimizer.step()
    for p in model.parameters():
        assert torch.equal(p, torch.full_like(p, 2.0))
        assert torch.equal(optimizer.full_state(p, "master"), torch.full(p.shape, 2.0))


def scaler_loop(rank, ours):
    model = small()
    template = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = template
    if ours:
        model, optimizer = zerofp8.initialize(model, template, {}, timeout=60)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    scales, norms = [], []
    for i in range(8):
        x = torch.ones(2, 6) * (i + 1)
        loss = model(x).square().mean()
        if i == 3 and rank == 1:
            loss = loss * float("inf")
        if not ours and i == 3:
            loss = loss * float("inf")
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if ours:
            norms.append(optimizer.last_report.applied)
    return scales, [p.detach().clone() for p in model.parameters()], norms


def test_grad_scaler_loop_unmodified():
    expected_scales, expected, _ = scaler_loop(0, ours=False)
    for scales, weights, applied in run_ranks(2, scaler_loop, True):
        assert scales == expected_scales
        assert applied == [True] * 3 + [False] + [True] * 4
        for found, p in zip(weights, expected):
            torch.testing.assert_close(found, p, rtol=1e-5, atol=1e-6)


def test_grad_scaler_unscale_gives_the_norm():
    model, optimizer = start(small(), {"gradient_clipping": 0.5})
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    twin, _ = torch_twin(model)
    loss = model(torch.ones(2, 6)).square().mean()
    twin(torch.ones(2, 6)).square().mean().backward()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    true_norm = nn.utils.clip_grad_norm_(twin.parameters(), 1e9)
    assert optimizer.grad_norm == pytest.approx(true_norm.item(), rel=1e-5)
    asked = nn.utils.clip_grad_norm_(model.parameters(), 1e9)  # for the log; the config clips
    assert asked.item() == pytest.approx(true_norm.item(), rel=1e-5)
    assert scaler.step(optimizer).clip_coefficient == pytest.approx(0.5 / true_norm.item(), rel=1e-4)
    scaler.update()


def test_ms_amp_spelling():
    model = small().bfloat16()
    template = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = zerofp8.initialize(model, template, opt_level="O2")
    scaler = torch.amp.GradScaler("cpu")
    loss = model(torch.ones(2, 6).bfloat16()).float().square().mean()
    scaler.scale(loss).backward()
    optimizer.all_reduce_grads(model)
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.last_report.applied and optimizer.settings.opt_level == "O2"


def test_fp16_needs_its_scale():
    model, optimizer = start(small().half(), {"fp16": {"enabled": True}})
    model(torch.ones(2, 6).half()).float().sum().backward()
    with pytest.raises(zerofp8.ArgumentError, match="backward"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.backward(model(torch.ones(2, 6).half()).float().sum())
    assert optimizer.step().loss_scale == 65536


def test_memory_comes_back():
    model, optimizer = start(small())
    train(model, optimizer, 2)
    reference = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert reference() is None
    model(torch.ones(2, 6)).sum().backward()  # hooks of the dead optimizer do nothing
    assert all(p.grad is not None for p in model.parameters())
