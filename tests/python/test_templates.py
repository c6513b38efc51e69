"""Apex's and DeepSpeed's Adams as templates, by stand-ins of their names and attributes."""

import pytest
import torch
from reference import loss_of, seeded_model

import zerofp8


class FusedAdam(torch.optim.Optimizer):
    """As Apex's: kinds of decay by an attribute."""

    def __init__(self, parameters, adam_w_mode=1, bias_correction=True, **options):
        super().__init__(parameters, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8,
                                      "weight_decay": 0.0, "bias_correction": bias_correction,
                                      **options})
        self.adam_w_mode = adam_w_mode


class DeepSpeedCPUAdam(FusedAdam):
    pass


def trained(make):
    model = seeded_model(width=80)
    template = make(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(template, 2, 0.5)
    model, optimizer = zerofp8.initialize(model, template, {}, opt_level="O2")
    for step in range(4):
        loss_of(model, step, 0, 0).backward()
        optimizer.step()
        schedule.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("kind", [FusedAdam, DeepSpeedCPUAdam])
@pytest.mark.parametrize("torchs, mode", [(torch.optim.AdamW, 1), (torch.optim.Adam, 0)])
def test_bits_are_those_of_torchs_template(kind, torchs, mode):
    ours = trained(lambda p: kind(p, adam_w_mode=mode, weight_decay=0.1))
    theirs = trained(lambda p: torchs(p, weight_decay=0.1))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs))


def test_what_is_refused():
    model = seeded_model()
    with pytest.raises(zerofp8.ConfigError, match="bias_correction"):
        zerofp8.initialize(model, FusedAdam(model.parameters(), bias_correction=False), {})
    stepped = FusedAdam(model.parameters())
    stepped.state[model[0].weight] = {"step": 1}
    with pytest.raises(zerofp8.ConfigError, match="stepped already"):
        zerofp8.initialize(model, stepped, {})
