"""torch.distributed.checkpoint: get and set, save and load, on other numbers of ranks."""

import copy
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from test_whole_state import CONFIGS, bits, make, same, train
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_optimizer_state_dict,
                                                     get_state_dict, set_model_state_dict,
                                                     set_optimizer_state_dict, set_state_dict)
from torch.distributed.checkpoint.stateful import Stateful

OPTIONS = {"plain": {}, "flat": {"flatten_optimizer_state_dict": True}, "full": {"full_state_dict": True},
           "offloaded": {"cpu_offload": True}}


class Training(Stateful):
    """As torchtitan and torch's tutorials wrap a model and its optimizer."""

    def __init__(self, model, optimizer, options):
        self.model, self.optimizer = model, optimizer
        self.options = StateDictOptions(**OPTIONS[options])

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self.options)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, saved):
        set_state_dict(self.model, self.optimizer, model_state_dict=saved["model"],
                       optim_state_dict=saved["optim"], options=self.options)


def save(rank, path):
    warnings.simplefilter("ignore")
    found = {}
    for name in ("O0 stage 1", "O2 stage 2"):
        for options in OPTIONS:
            model, optimizer = make(CONFIGS[name])
            train(model, optimizer, range(3))
            before = optimizer.applied_steps
            dcp.save({"app": Training(model, optimizer, options)},
                     checkpoint_id=f"{path}/{name}/{options}")
            assert optimizer.applied_steps == before == 3
            found[name, options] = train(model, optimizer, range(3, 6)), bits(model)
            optimizer.close()
    return found


def load(rank, path):
    warnings.simplefilter("ignore")
    found = {}
    for name in ("O0 stage 1", "O2 stage 2"):
        for options in OPTIONS:
            model, optimizer = make(CONFIGS[name], seed=9)
            dcp.load({"app": Training(model, optimizer, options)},
                     checkpoint_id=f"{path}/{name}/{options}")
            found[name, options] = train(model, optimizer, range(3, 6)), bits(model)
            optimizer.close()
    return found


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    path = tmp_path_factory.mktemp("dcp")
    return path, run_ranks(2, save, str(path))[0]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_dcp_resumes_on_any_number_of_ranks(unbroken, ranks):
    path, expected = unbroken
    for found in run_ranks(ranks, load, str(path)):
        for key, (losses, weights) in expected.items():
            assert found[key][0] == losses, key
            assert same(found[key][1], weights), key


def test_get_and_set_change_nothing():
    model, optimizer = make(CONFIGS["O2 stage 1"])
    model[0].bias.requires_grad_(False)  # torch leaves frozen parameters out of what it sets
    train(model, optimizer, range(3))
    saved = get_optimizer_state_dict(model, optimizer)
    again = get_optimizer_state_dict(model, optimizer)
    assert set(saved["state"]) == {n for n, _ in model.named_parameters()}
    for name, entry in saved["state"].items():
        assert all(torch.equal(v, again["state"][name][k]) for k, v in entry.items())
    whole = optimizer.full_state(model[0].weight)
    set_optimizer_state_dict(model, optimizer, saved)
    assert optimizer.applied_steps == 3
    for kind, values in optimizer.full_state(model[0].weight).items():
        assert kind == "step" or torch.equal(values, whole[kind])


def from_rank_0(rank):
    """The whole is gathered to rank 0 and sent from there."""
    warnings.simplefilter("ignore")
    gathered = StateDictOptions(full_state_dict=True, cpu_offload=True)
    sent = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    model, optimizer = make(CONFIGS["O2 stage 1"])
    train(model, optimizer, range(3))
    saved = copy.deepcopy(get_state_dict(model, optimizer, options=gathered))
    assert bool(saved[1]) == (rank == 0)
    unbroken = train(model, optimizer, range(3, 6)), bits(model)
    model, optimizer = make(CONFIGS["O2 stage 1"], seed=9)
    set_model_state_dict(model, saved[0], options=sent)
    set_optimizer_state_dict(model, optimizer, saved[1], options=sent)
    return unbroken[0] == train(model, optimizer, range(3, 6)) and same(unbroken[1], bits(model))


def test_dcp_sends_the_state_of_rank_0():
    assert run_ranks(2, from_rank_0) == [True, True]


def plain(rank, path):
    """dcp.save of the optimizer's own state_dict, without the getters."""
    model, optimizer = make(CONFIGS["O0 stage 1"])
    train(model, optimizer, range(2))
    before = [optimizer.full_state(p) for p in model.parameters()]
    dcp.save(optimizer.state_dict(), checkpoint_id=path)
    train(model, optimizer, range(2, 3))
    saved = optimizer.state_dict()
    dcp.load(saved, checkpoint_id=path)
    optimizer.load_state_dict(saved)
    after = [optimizer.full_state(p) for p in model.parameters()]
    return all(torch.equal(a[k], b[k]) for a, b in zip(before, after)
               for k in ("exp_avg", "exp_avg_sq"))


def test_dcp_of_the_state_dict_itself(tmp_path):
    assert run_ranks(2, plain, str(tmp_path)) == [True, True]
