"""Input that cannot be used: an error that says what to change, on all ranks, and no hang."""

import pickle

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

import zerofp8


def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 4)


def adam(model, **options):
    return torch.optim.AdamW(model.parameters(), **options)


def twice(model):
    optimizer = adam(model)
    optimizer.param_groups[0]["params"].append(model.weight)
    return optimizer


class OwnAdam(torch.optim.Adam):
    pass


A2 = {"gradient_accumulation_steps": 2}
# What is wrong, arguments, what the message must have.
CASES = {
    "not Adam": (lambda m: torch.optim.SGD(m.parameters(), lr=1), {}, ["SGD", "AdamW"]),
    "a subclass": (lambda m: OwnAdam(m.parameters()), {}, ["OwnAdam", "AdamW"]),
    "amsgrad": (lambda m: adam(m, amsgrad=True), {}, ["amsgrad", "False"]),
    "maximize": (lambda m: adam(m, maximize=True, capturable=True), {},
                 ["maximize", "negate the loss"]),
    "differentiable": (lambda m: adam(m, differentiable=True), {}, ["differentiable"]),
    "registered twice": (twice, {}, ["weight", "each parameter once"]),
    "foreign parameter": (lambda m: adam(nn.Linear(3, 3)), {}, ["named_parameters", "(3, 3)"]),
    "no config": (adam, {"config": 7}, ["int", "a path"]),
    "config file": (adam, {"config": "/nowhere.json"}, ["/nowhere.json"]),
    "typo": (adam, {"config": {"gradient_acumulation_dtype": "fp32"}},
             ["/gradient_acumulation_dtype", "gradient_accumulation_dtype"]),
    "fp7": (adam, {"config": {"gradient_accumulation_dtype": "fp7"}}, ["fp7", "fp32"]),
    "both flags": (adam, {"config": {"bf16": {"enabled": True}, "fp16": {"enabled": True}}},
                   ["/bf16/enabled", "/fp16/enabled"]),
    "level": (adam, {"opt_level": "O9"}, ["O9", "O3"]),
    "two levels": (adam, {"opt_level": "O2", "config": {"zerofp8": {"opt_level": "O1"}}},
                   ["O1", "O2", "opt_level"]),
    "two lrs": (lambda m: adam(m, lr=0.1), {"config": {"optimizer": {"params": {"lr": 0.2}}}},
                ["/optimizer/params/lr", "0.2", "0.1"]),
    "two algorithms": (adam, {"config": {"optimizer": {"type": "Adam"}}}, ["Adam", "AdamW"]),
    "A without division": (adam, {"config": A2}, ["loss_is_divided", "True or False"]),
    "batch triple": (adam, {"config": {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2,
                                       **A2}}, ["/train_batch_size", "7"]),
}


def attempt(rank, name):
    make, arguments, _ = CASES[name]
    model = linear()
    zerofp8.initialize(model, make(model), timeout=60, **arguments)


@pytest.mark.parametrize("name", CASES)
def test_on_one_rank(name):
    with pytest.raises(zerofp8.ConfigError) as error:
        attempt(0, name)
    assert all(part in str(error.value) for part in CASES[name][2]), str(error.value)
    again = pickle.loads(pickle.dumps(error.value))
    assert str(again) == str(error.value) and again.pointer == error.value.pointer


def attempt_all(rank):
    texts = []
    for name in CASES:
        try:
            attempt(rank, name)
            texts.append("no error")
        except zerofp8.ConfigError as error:
            texts.append(str(error))
    return texts


def test_the_same_on_all_ranks():
    first, second = run_ranks(2, attempt_all)
    assert first == second and "no error" not in first


def one_rank_is_wrong(rank):
    model = linear()
    make = (lambda m: torch.optim.SGD(m.parameters(), lr=1)) if rank == 1 else adam
    zerofp8.initialize(model, make(model), {}, timeout=60)


def test_an_error_of_one_rank_is_told_to_all():
    errors = run_ranks(3, one_rank_is_wrong, errors=True)
    assert len({str(e) for e in errors}) == 1
    assert all(isinstance(e, zerofp8.ConfigError) for e in errors) and "rank 1" in str(errors[0])


def different_groups(rank):
    pair = dist.new_group([0, 1])
    model = linear()
    group = pair if rank == 0 else None
    zerofp8.initialize(model, adam(model), {}, data_parallel_group=group, timeout=60)


def test_group_mismatch():
    for error in run_ranks(3, different_groups, errors=True):
        assert isinstance(error, zerofp8.ConfigError)
        assert "data_parallel_group" in str(error) and "[0, 1]" in str(error)
        assert "[0, 1, 2]" in str(error)


def different_configs(rank):
    model = linear()
    level = "O1" if rank == 0 else "O2"
    zerofp8.initialize(model, adam(model), {}, opt_level=level, timeout=60)


def different_models(rank):
    model = nn.Linear(4, 4 + rank)
    zerofp8.initialize(model, adam(model), {}, timeout=60)


def test_ranks_that_differ():
    for error in run_ranks(2, different_configs, errors=True):
        assert isinstance(error, zerofp8.CommError) and "exp_avg" in str(error)
    for error in run_ranks(2, different_models, errors=True):
        assert isinstance(error, zerofp8.CommError) and "(4, 4)" in str(error)
        assert "(5, 4)" in str(error)


def test_wrapped_models():
    class FullyShardedDataParallel(nn.Module):  # as torch's, which needs a group
        def __init__(self, module):
            super().__init__()
            self.module = module

    model = FullyShardedDataParallel(linear())
    with pytest.raises(zerofp8.ConfigError, match="the bare module.*no fsdp_plugin"):
        zerofp8.initialize(model, adam(model), {})


def test_refused_later():
    model = linear()
    model, optimizer = zerofp8.initialize(model, adam(model), {})
    with pytest.raises(zerofp8.UnsupportedError, match="add_param_group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(zerofp8.UnsupportedError, match="state_dict"):
        pickle.dumps(optimizer)
    with pytest.raises(zerofp8.ArgumentError, match="param_groups"):
        optimizer.full_state(nn.Parameter(torch.ones(1)))
    with pytest.raises(zerofp8.ArgumentError, match="exp_avg_sq"):
        optimizer.full_state(model.weight, "momentum")
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(zerofp8.ConfigError, match="amsgrad"):
        optimizer.step()


def test_dtype_that_is_not_the_configs():
    model = linear().half()
    with pytest.raises(zerofp8.Error, match="fp16"):
        zerofp8.initialize(model, adam(model), {"bf16": {"enabled": True}})
    model = linear().double()
    with pytest.raises(zerofp8.ConfigError, match="float64"):
        zerofp8.initialize(model, adam(model), {})


def test_storage_replaced_after_initialize():
    model = linear()
    model, optimizer = zerofp8.initialize(model, adam(model), {})
    model.weight.data = torch.ones(4, 4).t()  # not as it was
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(zerofp8.ArgumentError, match="initialize again"):
        optimizer.step()


def test_no_sync_with_a_sharded_accumulator():
    model = linear()
    model, optimizer = zerofp8.initialize(model, adam(model), {"zero_optimization": {"stage": 2}})
    with pytest.raises(zerofp8.ConfigError, match="sharded"):
        with optimizer.no_sync():
            pass


def test_sparse_gradients():
    model = nn.Embedding(4, 4, sparse=True)
    model, optimizer = zerofp8.initialize(model, adam(model), {})
    with pytest.raises(zerofp8.ArgumentError, match="sparse=False"):
        model(torch.tensor([1])).sum().backward()
