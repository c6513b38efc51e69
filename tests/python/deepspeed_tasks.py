"""What the ranks of test_deepspeed.py do; each returns values that the tests look at."""

import functools
import hashlib

import torch
import torch.distributed as dist
from packaging import version
from deepspeed_cells import join, quiet
from deepspeed_gpt import BETAS, GPT, LR, Reference, Trainer, adamw_section, micro_batch, pipeline

import zerofp8
import zerofp8.deepspeed.interface

BASE = {"optimizer": adamw_section(), "gradient_clipping": 0.0, "zero_optimization": {"stage": 1}}
MAIN = {**BASE, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}


def start(stages, config, **arguments):
    with quiet():
        return Trainer(stages, config, dist.get_world_size(), **arguments)


def digest(parameters):
    hasher = hashlib.sha256()
    for name, p in sorted(parameters.items()):
        hasher.update(name.encode() + p.detach().float().numpy().tobytes())
    return hasher.hexdigest()


def checkpoints(stages, folder):
    """Three steps, saved; three more, against three of a new engine that has loaded."""
    config = {**MAIN, "zerofp8": {"opt_level": "O2"}, "scheduler": {
        "type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": LR,
                                       "warmup_num_steps": 6, "warmup_type": "linear"}}}
    first, found = start(stages, config), {}
    for i in range(3):
        first.step(i)
    with quiet():
        first.engine.save_checkpoint(folder, tag="three")
    saved = digest(first.parameters())
    found["losses"] = [first.step(i) for i in range(3, 6)]
    expected = digest(first.parameters())
    second = start(stages, config)
    second.step(7)
    with quiet():
        second.engine.load_checkpoint(folder)
    found["resumed losses"] = [second.step(i) for i in range(3, 6)]
    found["resumed weights equal"] = digest(second.parameters()) == expected
    found["lr"], found["lr after resume"] = first.engine.get_lr(), second.engine.get_lr()
    found["steps after resume"] = second.engine.global_steps
    with quiet():
        second.engine.load_checkpoint(folder, tag="three", load_optimizer_states=False)
    found["weights only"] = digest(second.parameters()) == saved
    second.step(0)
    first.close()
    second.close()
    return found


def schedule(stages):
    trainer, rates = start(stages, {**BASE, "scheduler": {
        "type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 4e-3,
                                       "warmup_num_steps": 4, "warmup_type": "linear"}}}), []
    for i in range(4):
        trainer.step(i)
        rates.append(trainer.optimizer.param_groups[0]["lr"])
    found = {"lr": rates, "engine lr": trainer.engine.get_lr()[0]}
    trainer.close()
    return found


def clipping(stages):
    """Without the key: DeepSpeed's default holds, once."""
    config = {k: v for k, v in BASE.items() if k != "gradient_clipping"}
    trainer = start(stages, config)
    default = trainer.engine.gradient_clipping()
    reference = Reference("fp32", stages == 1, clip=default)
    losses, expected = [], []
    for i in range(4):
        losses.append(trainer.step(i))
        loss, parts = reference.gradients(i, trainer.accumulation)
        reference.update(reference.mean(parts))
        expected.append(loss)
    found = {"clip": trainer.engine.optimizer.optimizer.settings.gradient_clipping,
             "clip default": default,
             "clip deviation": max(abs(a - b) for a, b in zip(losses, expected)) / expected[0]}
    trainer.close()
    return found


def overflow(stages):
    """One bad value on one rank, in the first of two steps."""
    config = {**BASE, "fp16": {"enabled": True, "initial_scale_power": 17, "hysteresis": 1}}
    trainer, skips, scales = start(stages, config), [], []
    optimizer = trainer.engine.optimizer
    for i in range(2):
        scales.append(optimizer.cur_scale)
        if i == 0:
            bad = dist.get_rank() == 0
            p = next(iter(trainer.parameters().values()))
            handle = p.register_hook(lambda g: g + float("inf") if bad else g)
        trainer.step(i)
        handle.remove()
        skips.append(optimizer.overflow)
    found = {"skips": skips, "scales": scales, "engine skips": trainer.engine.skipped_steps}
    trainer.close()
    return found


def client(stages):
    """The user's own AdamW and scheduler; the scheduler is bound to the user's optimizer."""
    from torch.optim.lr_scheduler import StepLR

    model = GPT() if stages == 1 else None
    if model is None:
        with quiet():
            model = pipeline(stages)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = StepLR(adam, 1, gamma=0.5)
    config = {k: v for k, v in MAIN.items() if k != "optimizer"}
    trainer = start(stages, config, model=model, optimizer=adam, lr_scheduler=scheduler)
    losses, rates = [], []
    for _ in range(2):
        losses.append(trainer.step(0))
        rates.append(trainer.engine.get_lr()[0])
    losses.append(trainer.step(0))
    trainer.close()
    return {"client lr": rates, "client losses fall": losses[0] > losses[1] > losses[2]}


class Recomputing(GPT):
    """Each block is computed again in the backward pass, re-entrantly."""

    def forward(self, tokens, targets=None):
        from torch.utils.checkpoint import checkpoint

        for name, block in self.named_children():
            if name.isdigit() and not hasattr(block, "inner"):
                block.inner = block.forward
                block.forward = functools.partial(checkpoint, block.inner, use_reentrant=True)
        return super().forward(tokens, targets)


def recomputation(stages):
    losses = {}
    if stages > 1 and version.parse(zerofp8.deepspeed.interface.version()) < version.parse("0.19.8"):
        return {"plain losses": None, "checkpointed losses": None}
    for kind in ("plain", "checkpointed"):
        model, config = None, {**MAIN, "zero_optimization": {"stage": 2}}
        if kind == "checkpointed" and stages == 1:
            model = Recomputing()
        elif kind == "checkpointed":
            with quiet():
                model = pipeline(stages, checkpointable_layers=["Block"])
            config["pipeline"] = {"activation_checkpoint_interval": 1}
        trainer = start(stages, config, model=model)
        losses[f"{kind} losses"] = [trainer.step(i) for i in range(3)]
        trainer.close()
    return losses


def whole_tensors(stages):
    """``safe_get_*`` after a step's backward passes, and what comes of setting."""
    from deepspeed.utils import (safe_get_full_fp32_param, safe_get_full_grad,
                                 safe_get_full_optimizer_state, safe_set_full_fp32_param,
                                 safe_set_full_grad, safe_set_full_optimizer_state)

    trainer = start(stages, {**MAIN, "zerofp8": {"opt_level": "O1"}})
    inner, errors = trainer.stepper.step, []

    def step(*args, **kwargs):
        gradients = {n: safe_get_full_grad(p) for n, p in trainer.parameters().items()}
        inner(*args, **kwargs)
        _, parts = Reference("bf16", stages == 1).gradients(0, trainer.accumulation)
        mean = Reference.mean(parts)
        errors.extend(float((g - mean[n]).norm() / mean[n].norm()) for n, g in gradients.items())
        for name, p in trainer.parameters().items():
            master = safe_get_full_fp32_param(p)
            assert torch.allclose(master, p.detach().float(), rtol=2**-8)  # half away from zero
            first = safe_get_full_optimizer_state(p, "exp_avg")
            # The first step's moment is (1 - beta1) g.
            errors.append(float((first / (1 - BETAS[0]) - gradients[name]).norm()
                                / gradients[name].norm()))

    trainer.stepper.step = step
    trainer.step(0)
    p = next(iter(trainer.parameters().values()))
    values = torch.linspace(0.5, 2.0, p.numel()).reshape(p.shape)
    safe_set_full_fp32_param(p, values)
    safe_set_full_optimizer_state(p, values, "exp_avg")
    same = (torch.equal(safe_get_full_fp32_param(p), values)
            and torch.equal(safe_get_full_optimizer_state(p, "exp_avg"), values)
            and torch.allclose(p.detach().float(), values, rtol=2**-8))
    try:
        safe_set_full_grad(p, values)
        text = "no error"
    except zerofp8.UnsupportedError as error:
        text = str(error)
    trainer.close()
    return {"whole errors": errors, "set": text, "set alike": same,
            "detached": not hasattr(p, "_hp_mapping")}


def layouts():
    """Losses of the same data for stages x data ranks.

    DeepSpeed starts no plain engine any more once a process has had a pipeline: that one is first.
    """
    found = {}
    for stages in (1, 2, 4):
        for name, section in (("fp32", {}), ("bf16", {"bf16": {"enabled": True}})):
            trainer = start(stages, {**BASE, **section, "gradient_accumulation_dtype": "fp32"})
            found[name, stages] = [trainer.step(i) for i in range(20)]
            trainer.close()
    return found


def user_backward():
    """loss.backward() without the engine's, as recent versions of DeepSpeed allow."""
    found = {"first norms": {}}
    for kind in ("engine", "torch", "undivided"):
        trainer = start(1, MAIN)
        losses = []
        for step in range(2):
            for i in range(trainer.accumulation):
                part = trainer.data_rank * trainer.accumulation + i
                loss = trainer.engine(*micro_batch(step, part))
                if kind == "undivided":  # as Hugging Face's Trainer calls it
                    trainer.engine.backward(loss, scale_wrt_gas=False)
                else:
                    trainer.engine.backward(loss) if kind == "engine" else loss.backward()
                trainer.engine.step()
            losses.append(loss.item())
            found["first norms"].setdefault(kind, float(trainer.engine.get_global_grad_norm()))
        found[f"{kind} style losses"] = losses
        found["micro batches"] = trainer.engine.optimizer.last_report.micro_batches
        trainer.close()
    return found


def small_engine(config):
    import deepspeed

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    with quiet():
        return deepspeed.initialize(model=model, config={
            "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, **config})[0]


def coalesced():
    """Several backward passes, one step: in coalesce_grad_reduction() and as one loss."""
    found = {}
    for stage in (0, 1, 2):
        for kind in ("coalesced", "one loss"):
            engine = small_engine({"zero_optimization": {"stage": stage}, "gradient_clipping": 0.0,
                                   "optimizer": {"type": "Adam", "params": {"lr": 1e-2}}})
            xs = torch.randn(3, 1, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
            losses = [lambda x=x: engine(x.bfloat16()).float().pow(2).mean() for x in xs]
            if kind == "coalesced":
                with engine.coalesce_grad_reduction():
                    for loss in losses:
                        engine.backward(loss())
            else:
                engine.backward(sum(loss() for loss in losses))
            engine.step()
            found[stage, kind] = float(engine.get_global_grad_norm())
            engine.destroy()
    return found


def without_optimizer(folder):
    """Reference and reward models: an engine that evaluates and saves, and trains nothing."""
    found = []
    for stage in (0, 1, 2):
        engine = small_engine({"zero_optimization": {"stage": stage}})
        x = torch.ones(1, 8, dtype=torch.bfloat16)
        with torch.no_grad(), quiet():
            before = engine(x)
            engine.save_checkpoint(f"{folder}/none{stage}", tag="t")
            engine.module[0].weight.zero_()
            engine.load_checkpoint(f"{folder}/none{stage}", tag="t")
            found.append(engine.optimizer is None and torch.equal(before, engine(x)))
    return found


def config_errors():
    """Texts by name; every rank must come back from each."""
    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    def experts(parameters):
        return torch.optim.AdamW([{"params": parameters, "reduce_group": list(range(4))}])

    bad = {
        "unknown key": ({"gradient_acumulation_dtype": "fp32"}, {}),
        "both dtypes": ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, {}),
        "stage 3": ({"zero_optimization": {"stage": 3}}, {}),
        "sharded": ({"gradient_accumulation_dtype": {"dtype": "fp8", "sharded": True},
                     "zero_optimization": {"stage": 0}}, {}),
        "optimizer": ({"optimizer": {"type": "Lamb", "params": {}}}, {}),
        "client": ({"optimizer": None}, {"optimizer": sgd}),
        "experts": ({"optimizer": None}, {"optimizer": experts}),
        "offload": ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, {}),
        "batch": ({"train_batch_size": 7}, {}),
        "sequence": ({"sequence_parallel_size": 2}, {}),
    }
    texts = {}
    for name, (change, arguments) in bad.items():
        config = {k: v for k, v in {**BASE, **change}.items() if v is not None}
        try:
            start(1, config, **arguments)
            texts[name] = "no error"
        except zerofp8.Error as error:
            texts[name] = str(error)
    return texts


def interface_error():
    """What `install` says about a DeepSpeed that lacks a method."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    method = DeepSpeedEngine._save_zero_checkpoint
    del DeepSpeedEngine._save_zero_checkpoint
    try:
        zerofp8.deepspeed.install()
        return "no error"
    except zerofp8.UnsupportedError as error:
        return str(error)
    finally:
        DeepSpeedEngine._save_zero_checkpoint = method


def old_pipeline():
    """What a pipeline says under a version whose pipelines scale gradients wrongly."""
    from zerofp8.deepspeed import interface

    version, interface.version = interface.version, lambda: "0.18.9"
    try:
        interface.check_pipeline(2, 1)  # one micro-batch: nothing to divide by
        interface.check_pipeline(2, 4)
        return "no error"
    except zerofp8.UnsupportedError as error:
        return str(error)
    finally:
        interface.version = version


def _common(stages, folder):
    zerofp8.deepspeed.install(timeout=30)
    found = {**checkpoints(stages, folder)}
    learning_rates = found.pop("lr"), found.pop("lr after resume")
    found.update(schedule(stages))
    found["lr after resume"] = found["lr"] if learning_rates[0] == learning_rates[1] else None
    for task in (clipping, overflow, client, recomputation, whole_tensors):
        found.update(task(stages))
    return found


def pipelines(rank, size, folder):
    join(rank, size)
    found = _common(2, folder)
    trainer = start(2, MAIN)
    for i in range(2):
        trainer.step(i)
    found["tied"] = digest({"emb": trainer.parameters()["emb.weight"]})
    trainer.close()
    return found


def plain(rank, size, folder):
    join(rank, size)
    import deepspeed.runtime.engine as engine

    before = engine.BF16_Optimizer, engine.DeepSpeedEngine._do_optimizer_sanity_check
    interface = interface_error()
    found = {**_common(1, folder), **user_backward(), "errors": config_errors()}
    found["coalesced"], found["without optimizer"] = coalesced(), without_optimizer(folder)
    found["layouts"] = layouts()  # last, see there
    zerofp8.deepspeed.uninstall()
    after = engine.BF16_Optimizer, engine.DeepSpeedEngine._do_optimizer_sanity_check
    return {**found, "restored": before == after, "interface": interface,
            "old pipeline": old_pipeline()}
