"""What an optimizer saves and loads: its part of `Optimizer` that is about checkpoints."""

import logging

import torch

from . import state, torch_state

logger = logging.getLogger("zerofp8")


class Checkpoints:
    """``save``/``load`` of folders, and torch's ``state_dict`` with its hooks."""

    _has_told_of_gradients = False

    def save(self, folder):
        """Write a checkpoint of state and weights that any number of ranks can load. Collective."""
        self._on_all_ranks(self._watch.replaced())
        self._watch.look()
        self._push_groups()  # a scheduler has set the next step's
        self._engine.save(str(folder))

    def load(self, folder):
        """Load what ``save`` wrote, on any number of data ranks: state, weights, counters and
        hyper-parameters. Collective.
        """
        self._on_all_ranks(self._watch.replaced())
        self._engine.load(str(folder))
        self._shards.has_loaded()
        self._watch.updated()
        state.pull_groups(self._engine, self.param_groups)
        self._pushed = [None] * len(self.param_groups)

    @torch._disable_dynamo
    def state_dict(self):
        """The whole state in torch's layout, on any rank: for ``torch.save``, on one rank or all.

        It loads on any number of data ranks, and with ``torch.load(weights_only=True)``. Where one
        rank calls it alone, the others' shards come from threads of theirs while they go on. On
        CUDA devices call ``consolidate_state_dict()`` on all ranks before. The model's weights are
        not part of it: save those with the model.

        Raises
        ------
        CommError
            A rank has ended, or has not come to this step in time.
        UnsupportedError
            On CUDA devices, without ``consolidate_state_dict()``.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        if self._taker.dirty and not self._has_told_of_gradients:
            self._has_told_of_gradients = True
            logger.warning(
                "state_dict between micro-batches: it is the state of the last step, without what "
                "was accumulated since; after a load begin the step anew (told once)")
        result = state.state_dict(self)
        for hook in self._optimizer_state_dict_post_hooks.values():
            changed = hook(self, result)
            result = result if changed is None else changed
        return result

    @torch._disable_dynamo
    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """Load what ``state_dict`` gave, on any number of data ranks, or a state of torch's Adam or
        AdamW. To be called on all ranks.

        The model's weights are not part of it: load those with ``model.load_state_dict``, before
        or after.
        """
        given = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, given)
            given = given if changed is None else changed
        state.load_state_dict(self, given)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def consolidate_state_dict(self, to=0):
        """Bring the whole state to data rank `to`, where ``state_dict()`` then asks nobody.

        Collective; holds until the next step.
        """
        self._watch.look()
        self._shards.consolidate(state.places_of(self), to)

    @torch.no_grad()
    def torch_state_dict(self):
        """The state as torch's AdamW has it, FP32 and whole, on every rank. Collective.

        To hand training back: ``torch.optim.AdamW(...).load_state_dict(it)``. The other way is
        ``load_state_dict``.
        """
        return torch_state.export(self, state.packed_groups(self), state.torchs_order(self))

    @torch.no_grad()
    def master_weights(self):
        """FP32 weights of all parameters by name, whole, on every rank. Collective."""
        return torch_state.masters(self)

    @torch.no_grad()
    def load_masters(self, weights):
        """Weights become these numbers, and masters keep their bits that the weights do not hold.

        Parameters
        ----------
        weights : dict of str to torch.Tensor
            An FP32 ``state_dict`` of the model, the same on all ranks, to be called on all of them.
            Names that the optimizer does not have are left out.
        """
        torch_state.load_masters(self, weights)

    @torch.no_grad()
    def set_full_state(self, parameter, kind, values):
        """The other way of ``full_state``: a whole tensor, given on every rank, rounded to nearest.

        Parameters
        ----------
        parameter : torch.nn.Parameter
        kind : {"master", "exp_avg", "exp_avg_sq"}
            ``"master"`` sets the weight, too. ``exp_avg_sq`` is v, also where its root is stored.
        values : torch.Tensor
            Of the parameter's shape.
        """
        torch_state.set_whole(self, self._index_of(parameter), kind, values)

    def _on_all_ranks(self, error):
        """Before a collective: a fault of one rank is an error on all, and nobody waits."""
        self._engine.raise_on_all_ranks(error)
