"""A model that has other parameters at the first step than it had at ``initialize``."""

import pytest
import torch
from ranks import run_ranks
from torch import nn

import zerofp8


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def new_head(model):
    model[2] = nn.Linear(6, 3)


def new_parameter(model):
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())


def shard(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))


def text_of(rank, replace):
    model = net()
    model, optimizer = zerofp8.initialize(
        model, torch.optim.AdamW(model.parameters(), lr=0.1), {}, timeout=20)
    replace(model)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(zerofp8.ArgumentError) as error:
        optimizer.step()
    return str(error.value)


@pytest.mark.parametrize("size, replace", [(1, new_head), (1, new_parameter), (2, new_head),
                                           (2, shard)])
def test_they_are_named(size, replace):
    texts = run_ranks(size, text_of, replace)
    assert len({*texts}) == 1 and '"2.weight"' in texts[0] and "initialize again" in texts[0]


def test_wrapping_is_no_replacement():
    model = net()
    model, optimizer = zerofp8.initialize(
        model, torch.optim.AdamW(model.parameters(), lr=0.1), {})
    outer = nn.ModuleDict({"wrapped": model})
    outer["wrapped"](torch.ones(2, 4)).sum().backward()
    assert optimizer.step().applied
