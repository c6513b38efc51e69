"""What the ranks of test_deepspeed_tensor.py do: models cut over tensor ranks, in both engines."""

import hashlib

import torch
import torch.distributed as dist
from deepspeed_cells import join, quiet
from deepspeed_gpt import plain_step
from tensor_parallel import (BLOCKS, Block, Embed, Head, Ranks, Reference, initial_weights, loss_of,
                             micro_batch, norm_of, slice_of)
from torch import nn

import zerofp8.deepspeed

PARTS, LR, STEPS = 4, 3e-3, 4
ADAM = {"type": "AdamW", "params": {"lr": LR, "betas": [0.9, 0.999], "eps": 1e-8,
                                    "weight_decay": 0.0}}
BASE = {"optimizer": ADAM, "zero_optimization": {"stage": 1}, "gradient_clipping": 0.0}
# The case that started it all is the second: pipeline, ZeRO-1, bf16, FP32 accumulation.
CONFIGS = {
    "fp32": {**BASE, "gradient_clipping": 0.5},
    "bf16 fp32": {**BASE, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "bf16 O3": {**BASE, "bf16": {"enabled": True},
                "zerofp8": {"opt_level": "O3", "fp32_moments_below": 0, "master_weights": "none"}},
}


class Whole(nn.Sequential):
    """For the plain engine: the loss of a micro-batch."""

    def __init__(self, group):
        weights = initial_weights()
        embed = Embed(weights, group)
        super().__init__(embed, *(Block(weights, i, group) for i in range(BLOCKS)),
                         Head(weights, group, embed))

    def forward(self, tokens, targets):
        return loss_of(super().forward(tokens), targets)


def pipeline(ranks):
    """The same layers as a PipelineModule, the embedding tied over the stages."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    weights, group = initial_weights(), ranks.tensor_group
    tied = {"tied_weight_attr": "emb.weight"}
    layers = [TiedLayerSpec("emb", Embed, weights, group, **tied),
              *(LayerSpec(Block, weights, i, group) for i in range(BLOCKS)),
              TiedLayerSpec("emb", Embed, weights, group,
                            forward_fn=lambda m, x: m.emb.logits(x), **tied)]
    topology = PipeModelDataParallelTopology(ranks.stages, ranks.tensor, ranks.data)
    return PipelineModule(layers=layers, topology=topology, loss_fn=loss_of,
                          partition_method="uniform")


class Mpu:
    """Who talks to whom, as Megatron's ``mpu`` says it."""

    def __init__(self, ranks, tensor_name):
        for kind, group in (("data_parallel", ranks.data_group), (tensor_name, ranks.tensor_group),
                            ("model_parallel", ranks.tensor_group)):
            setattr(self, f"get_{kind}_group", lambda group=group: group)
            setattr(self, f"get_{kind}_rank", lambda group=group: dist.get_rank(group))
            setattr(self, f"get_{kind}_world_size", lambda group=group: dist.get_world_size(group))


class Trainer:
    """An engine of one layout, and its share of the micro-batches."""

    def __init__(self, ranks, config, tensor_name="tensor_model_parallel"):
        import deepspeed

        self.ranks, self.accumulation = ranks, PARTS // ranks.data
        cut = ranks.stages > 1
        with quiet():
            model = pipeline(ranks) if cut else Whole(ranks.tensor_group)
            self.engine = deepspeed.initialize(
                model=model, model_parameters=list(model.parameters()),
                config={"train_micro_batch_size_per_gpu": 2,
                        "gradient_accumulation_steps": self.accumulation, **config},
                **({} if cut else {"mpu": Mpu(ranks, tensor_name)}))[0]
        self.inner = self.engine.optimizer.optimizer
        self.named = {name_of(n, cut): p for n, p in self.engine.module.named_parameters()}

    def step(self, step):
        """The mean loss of all data."""
        mine = [micro_batch(step, self.ranks.data_rank * self.accumulation + i)
                for i in range(self.accumulation)]
        if self.ranks.stages > 1:
            return float(self.engine.train_batch(iter(mine)))
        total = plain_step(self.engine, mine) / PARTS
        dist.all_reduce(total, group=self.ranks.data_group)
        return float(total)

    def watch_first_gradient(self, expected):
        """Let the first step note how far its gradients are from the reference's."""
        step, errors = self.engine.optimizer.step, {}

        def watched(*args, **kwargs):
            for name, p in self.named.items() if not errors else ():
                like = slice_of(expected[name], getattr(p, "partition_dim", None),
                                self.ranks.tensor_group)
                found = self.inner.full_gradient(p).double()
                errors[name] = float((found - like).norm() / like.norm())
            return step(*args, **kwargs)

        self.engine.optimizer.step = watched
        return errors

    def digests(self):
        return {n: hashlib.sha256(p.detach().float().numpy().tobytes()).hexdigest()
                for n, p in self.named.items()}


def name_of(name, cut):
    """The name in `initial_weights`: both engines count the layers, the first is the embedding."""
    if "emb.weight" in name:
        return "emb.weight"
    layer, rest = name.split(".", 1)
    return f"{int(layer) - 1}.{rest}"


def one_config(ranks, config, tensor_name):
    trainer, reference = Trainer(ranks, config, tensor_name), Reference(PARTS, LR)
    losses, expected = [], []
    for step in range(STEPS):
        loss, gradient = reference.gradient(step)
        expected.append(loss)
        if step == 0:
            errors = trainer.watch_first_gradient(gradient)
        losses.append(trainer.step(step))
        if step == 0:
            norm = float(trainer.engine.get_global_grad_norm()) / norm_of(gradient)
        reference.update(gradient, config["gradient_clipping"])
    found = {"errors": errors, "norm": norm, "losses": losses, "expected": expected,
             "effective": tuple(getattr(trainer.inner.settings, k) for k in (
                 "weight", "accumulation", "stage", "data_ranks")),
             "digests": trainer.digests(), "place": (ranks.stage, ranks.tensor_rank),
             "replicated": [n for n, p in trainer.named.items()
                            if not getattr(p, "tensor_model_parallel", False)]}
    trainer.engine.destroy()
    return found


def resume(ranks, folder):
    """Two steps, saved; two more, against two of a new engine that has loaded."""
    found = []
    for part in range(2):
        trainer = Trainer(ranks, CONFIGS["bf16 O3"])
        if part == 0:
            for step in range(2):
                trainer.step(step)
            with quiet():
                trainer.engine.save_checkpoint(folder, tag="two")
        else:
            trainer.step(7)
            with quiet():
                trainer.engine.load_checkpoint(folder, tag="two")
        found.append(([trainer.step(step) for step in range(2, 4)], trainer.digests()))
        trainer.engine.destroy()
    return found[0] == found[1]


def walk(rank, layout, folder):
    join(rank, layout[0] * layout[1] * layout[2])
    zerofp8.deepspeed.install(timeout=30)
    ranks = Ranks(rank, *layout)
    names = {"fp32": "slice_parallel", "bf16 fp32": "tensor_model_parallel", "bf16 O3": "unused"}
    found = {name: one_config(ranks, config, names[name]) for name, config in CONFIGS.items()}
    return {**found, "resumed": resume(ranks, folder)}


def walk_one(rank, layout, name):
    join(rank, layout[0] * layout[1] * layout[2])
    zerofp8.deepspeed.install(timeout=60)
    return {name: one_config(Ranks(rank, *layout), CONFIGS[name], "")}
