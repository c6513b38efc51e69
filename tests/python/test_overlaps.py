"""Parameters that share memory are refused with both names; adjacent and interleaved ones train."""

import pytest
import torch
from torch import nn

import zerofp8

OVERLAPPING = {
    "one address": lambda b: (b[0:4], b[0:4]),
    "offset": lambda b: (b[0:4], b[3:6]),
    "inside": lambda b: (b[0:12], b[4:6]),
    "a column of the whole": lambda b: (b.view(3, 4), b.view(3, 4)[:, 1]),
    "columns that meet": lambda b: (b.view(3, 4)[:, 0:2], b.view(3, 4)[:, 1:3]),
    "behind a hole": lambda b: (b.view(3, 4)[:, 0], b[5:9]),
    "two dtypes": lambda b: (b[0:4], b[2:4].view(torch.bfloat16)),
    "over itself": lambda b: (b[0:4], b[4:].as_strided((3, 2), (1, 1))),
    "expanded": lambda b: (b[0:4], b[4:5].expand(3)),
}
APART = {
    "adjacent": lambda b: (b[0:4], b[4:12]),
    "adjacent, the other way round": lambda b: (b[4:12], b[0:4]),
    "columns": lambda b: (b.view(3, 4)[:, 0:2], b.view(3, 4)[:, 2:4]),
    "every other one": lambda b: (b[0::2], b[1::2]),
    "in the hole": lambda b: (b.view(3, 4)[:, 0], b[1:3]),
    "transposed": lambda b: (b[0:6].view(2, 3).t(), b[6:]),
    "strides that mix": lambda b: (b.as_strided((2, 2), (3, 2)), b[6:]),
}


def model_of(views):
    model = nn.Module()
    model.p, model.q = (nn.Parameter(v) for v in views(torch.ones(12)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)


@pytest.mark.parametrize("name", OVERLAPPING)
def test_overlapping_parameters_are_refused(name):
    model, template = model_of(OVERLAPPING[name])
    config = {"bf16": {"enabled": True}} if name == "two dtypes" else {}
    with pytest.raises(zerofp8.ConfigError) as error:
        zerofp8.initialize(model, template, config)
    assert '"q"' in str(error.value)
    assert name in ("over itself", "expanded") or '"p"' in str(error.value)


@pytest.mark.parametrize("name", APART)
def test_parameters_that_share_a_storage_but_no_element_train(name):
    model, template = model_of(APART[name])
    _, optimizer = zerofp8.initialize(model, template, {})
    optimizer.backward(model.p.sum() - model.q.sum())
    optimizer.step()
    assert torch.allclose(model.p, torch.full_like(model.p, 0.9))
    assert torch.allclose(model.q, torch.full_like(model.q, 1.1))
    optimizer.close()
