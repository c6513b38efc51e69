"""``zerofp8.initialize``."""

import logging
import sys

import torch

from . import (_C, capturable, configs, ddp, devices, groups, integrations, reduce_groups,
               torch_state)
from .errors import CommError, ConfigError, Error
from .gradients import GradientTaker
from .main_grad import MainGrads
from .optimizer import Optimizer
from .parameters import (DTYPES, adam_options, check_model, check_partial, check_template, collect,
                         name_slices, rest_of)
from .shard_wire import Listener
from .templates import from_client
from .weights import check_replicated, replicated_digests

logger = logging.getLogger("zerofp8")


def initialize(model, optimizer, config=None, *, opt_level=None, data_parallel_group=None,
               pipeline_parallel_group=None, tensor_parallel_group=None, loss_is_divided=None,
               timeout=600.0, capturable=None, use_te=False):
    """Put a model's training into the hands of the engine. Collective over all given groups.

    Parameters
    ----------
    model : torch.nn.Module
        On the CPU or one CUDA device, in FP32, BF16 or FP16 (FP32 parameters may stand beside
        16-bit ones); one pipeline stage or tensor slice where the model is cut. Not wrapped in
        FSDP; DDP's reduction is taken out. Weights of data rank 0 (of a reduce group's first rank)
        are sent to the other ones; without reduce groups its frozen parameters and buffers, too.
    optimizer : torch.optim.Adam or torch.optim.AdamW
        A template: its parameter groups are taken over, it never steps. Apex's and DeepSpeed's
        FusedAdam and DeepSpeedCPUAdam may be given, too. A group may have
        ``"reduce_group"``, a ProcessGroup or list of global ranks within the data-parallel ones:
        its gradients are averaged, and its state sharded, over these ranks. ``"reduce_divisor"``
        is what their sum is divided by in place of the group's size.
    config : str, os.PathLike, dict or None
        DeepSpeed-style JSON. None: defaults, with the model's dtype. A level here ("O1") is taken
        for `opt_level`, as in MS-AMP.
    opt_level : {"O0", "O1", "O2", "O3"}, optional
        Preset of all dtypes; has to agree with the config if that has one.
    data_parallel_group : torch.distributed.ProcessGroup, optional
        Ranks that hold the same part of the model. Default: all ranks.
    pipeline_parallel_group, tensor_parallel_group : torch.distributed.ProcessGroup, optional
        Ranks that hold the other parts. The norm is taken over both. Parameters that are cut over
        tensor ranks have the attribute ``tensor_model_parallel = True``, as Megatron sets it; the
        others are replicated: their weights, which is checked, and gradients have to be the same
        on all tensor ranks, unless ``sequence_parallel = True`` says that these are to be added.
    loss_is_divided : bool, optional
        Whether the loop divides its loss by the micro-batches per step, A. Required in a plain loop
        with A > 1.
    timeout : float
        Seconds after which a collective is a CommError that names the absent ranks.
    capturable : bool, optional
        Decide each step on the device: ``step`` waits for nothing there and may be captured into a
        CUDA graph, with the backward passes before it (docs/python.md, "CUDA graphs"). The bits are
        the same. Not with fp16 or offloaded state. Default: as the template has it
        (``AdamW(..., capturable=True)``).
    use_te : bool
        MS-AMP's; only False.

    Returns
    -------
    model : torch.nn.Module
        The same object.
    optimizer : zerofp8.Optimizer

    Raises
    ------
    ConfigError
        With what was given, what is allowed and what to change; the same on all ranks, before
        anything is allocated.
    CommError
        A rank did not call ``initialize``, or ranks differ in what they passed.

    Examples
    --------
    >>> model = torch.nn.Linear(8, 8)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> model, optimizer = zerofp8.initialize(model, optimizer, {}, opt_level="O1")
    >>> model(torch.ones(2, 8)).sum().backward()
    >>> optimizer.step().applied
    True
    """
    configs.refuse_transformer_engine(use_te)
    return start(model, optimizer, config, (data_parallel_group, pipeline_parallel_group,
                                            tensor_parallel_group),
                 opt_level=opt_level, loss_is_divided=loss_is_divided, timeout=timeout,
                 is_capturable=capturable)


def start(model, optimizer, config, process_groups, *, opt_level=None, loss_is_divided=None,
          timeout=600.0, integration=None, is_capturable=None):
    """``initialize`` for a trainer of the table of integrations; None: found from the groups."""
    layout, prepared, error = None, None, None
    try:
        layout = groups.Layout.of(*process_groups)
        prepared = _Prepared(model, from_client(optimizer), config, opt_level, layout, loss_is_divided,
                             integration, is_capturable)
    except Error as e:  # told to all ranks first
        error = e
    if layout is None:  # it is the groups that are wrong
        layout = groups.Layout.of(None, None, None)
    records = groups.exchange(layout, {
        "tied": {} if prepared is None else prepared.tied,
        "reduce": [] if prepared is None else prepared.reduce,
        "partial": [] if prepared is None else prepared.partial,
        "backend": None if prepared is None else prepared.backend,
        "placement": None if prepared is None else prepared.placement.kind,
        "gpu": None if prepared is None else prepared.gpu,
        "shards": None if prepared is None else prepared.address,
        "error": None if error is None else groups.as_record(error)}, timeout)
    groups.raise_first_error(records)
    devices.check_same(records)
    groups.check_same_backend(records)
    devices.check_own_gpus(records)
    reduce_groups.check_same(records)
    check_partial(records)
    return model, prepared.finish(records, timeout)


class _Prepared:
    """What one rank can check by itself; nothing is sent, and only mirrors are allocated."""

    def __init__(self, model, template, config, opt_level, layout, loss_is_divided, integration,
                 is_capturable):
        config, opt_level = configs.level_of(config, opt_level)
        check_model(model)
        check_template(template)
        self.given, model = model, ddp.inner(model)
        self.model, self.template, self.layout = model, template, layout
        self.parameters = collect(model, template)
        name_slices(self.parameters, layout)
        self.partial = [n.key for n in self.parameters if n.partial]
        self.reduce = reduce_groups.read(template.param_groups, layout)
        self.decoupled = isinstance(template, torch.optim.AdamW)
        self.options = [adam_options(g, i, self.decoupled)
                        for i, g in enumerate(template.param_groups)]
        self.config = configs.load(config, self.parameters)
        configs.check_against_template(self.config, template, self.options)
        sizes = len(layout.data), len(layout.pipeline), len(layout.tensor)
        self.settings = configs.resolve(self.config, sizes, opt_level, self.options,
                                        self.parameters)
        self.placement = devices.choose(model, self.parameters, self.settings)
        self.backend = groups.choose_backend(self.config, self.placement)
        self.gpu = devices.identity(self.placement.index) if self.backend == "nccl" else None
        self.integration = integration or integrations.choose(len(layout.pipeline))
        self.capturable = capturable.is_wanted(is_capturable, template)
        if self.capturable:
            capturable.check(self.settings, self.placement, self.integration, self.parameters,
                             template.param_groups)
        self.loss_is_divided = integrations.resolve_division(
            self.integration, self.settings.accumulation_steps, loss_is_divided)
        self.tied = self._find_tied()
        self.placement.make_mirrors(self.parameters)
        self.main_grads = MainGrads(self.parameters, self.placement)
        # Of a template that has stepped already.
        self.state = torch_state.of_template(
            template, {id(n.parameter): i for i, n in enumerate(self.parameters)})
        torch_state.check(self.parameters, self.state)
        self.made = []  # process groups; the optimizer gives them back
        # Stage 0 has all state on each rank.
        is_cut = len(layout.data) > 1 and self.settings.stage > 0
        self.listener = Listener() if is_cut else None
        self.address = self.listener.address if is_cut else None

    def _find_tied(self):
        tied = {}
        for named in self.parameters:
            if not named.tied:
                continue
            if named.tied in tied:
                raise ConfigError(f"tie(..., \"{named.tied}\")",
                                  f"parameters \"{tied[named.tied]}\" and \"{named.name}\" of one "
                                  "stage", "one parameter per stage",
                                  "use the same Parameter object for both on this stage")
            tied[named.tied] = named.name
        return tied

    def finish(self, records, timeout):
        """Make communicators and the engine, hook the parameters."""
        layout = self.layout
        for taker in ddp.takers_of(self.parameters):
            taker.replace()
        data = self._communicator(layout.data, timeout)
        model_ranks = groups.model_ranks(records, layout.rank)
        # A step that is decided on the device has payloads for it, too.
        model = (self._communicator(model_ranks, timeout, control_only=not self.capturable)
                 if len(model_ranks) > 1 else None)
        tied, first_holder = self._tied_groups(records, timeout)
        reduce = self._reduce_groups(timeout)
        self._agree_on_weights(records, data, tied, reduce, timeout)
        engine = self.placement.attach(_C.Engine(
            self.settings, [self._describe(n, first_holder) for n in self.parameters], self.options,
            data, model, self._summed_groups(tied, timeout), reduce, self.loss_is_divided,
            configs.threads(), device=self.placement.engine_device(),
            capturable=self.capturable, log=_log))
        taker = GradientTaker(engine, self.parameters, self.main_grads, self.model,
                              self.integration, self.settings.accumulation_sharded)
        ddp.silence_all(self.given, taker)
        if not self.integration.ends_micro_batches:
            ddp.mark(self.model, taker)
        if layout.rank == min(layout.data):
            logger.info("zerofp8: %s", configs.description(self.options))
            configs.log_choices(self.settings)
        reduce_groups.keep_as_ranks(self.template.param_groups, self.reduce)
        optimizer = Optimizer(self.template, engine, self.parameters, taker, self.settings,
                         self.decoupled, has_loss=layout.rank == layout.pipeline[-1], made=self.made,
                         capturable=self.capturable, shards=self._shards(records, timeout))
        if self.state:
            torch_state.write(optimizer, self.state)
        return optimizer

    def _shards(self, records, timeout):
        """Who holds a part of which parameter's state, and where to ask for it."""
        owners = [self.layout.data if self.reduce[n.group] is None else self.reduce[n.group][0]
                  for n in self.parameters]
        addresses = {r: records[r]["shards"] for r in self.layout.data if self.listener is not None}
        return owners, self.layout.rank, addresses, self.listener, timeout

    def _communicator(self, ranks, timeout, control_only=False):
        backend = "torch" if control_only and self.backend == "nccl" else self.backend
        return groups.communicator(ranks, timeout, backend, self.made, self.placement.index)

    def _summed_groups(self, tied, timeout):
        """Communicators of the copies whose gradients are added up, by the engine's name."""
        summed = {n.tied_key: tied[n.tied] for n in self.parameters if n.tied}
        if self.partial:
            tensor = self._communicator(self.layout.tensor, timeout)
            summed.update((n.tied_key, tensor) for n in self.parameters if n.partial)
        return summed

    def _agree_on_weights(self, records, data, tied, reduce, timeout):
        """The same parameters and weights wherever there have to be; errors are told to all ranks.

        Other data ranks and slices would wait for ranks that have found a difference.
        """
        error, digests = None, {}
        try:
            rest = {} if reduce else rest_of(self.model, self.parameters)
            data.check_same("parameters", "".join(
                [f"{self._name_on_data_ranks(n)} {tuple(n.parameter.shape)} {n.parameter.dtype}"
                 f"{self._steps_of(i)}\n" for i, n in enumerate(self.parameters)]
                + [f"{n} {tuple(t.shape)} {t.dtype} (not trained)\n" for n, t in rest.items()]))
            self._send_weights(data, tied, reduce)
            self._send_rest(data, rest)
            digests = replicated_digests(self.parameters, self.layout)
        except CommError as e:
            if e.absent_ranks:
                raise
            error = e
        if all(len(r["layout"]["pipeline"]) == len(r["layout"]["tensor"]) == 1
               for r in records.values()):
            if error is not None:  # there are only the data ranks, and all of them have it
                raise error
            return
        records = groups.exchange(self.layout, {
            "replicated": digests, "error": None if error is None else groups.as_record(error)},
            timeout, again=records)
        groups.raise_first_error(records)
        check_replicated(records)

    def _name_on_data_ranks(self, named):
        # Experts may have other names on other data ranks.
        return named.name if self.reduce[named.group] is None else "(of a reduce group)"

    def _steps_of(self, index):
        return f" after {int(self.state[index]['step'])} steps" if index in self.state else ""

    def _reduce_groups(self, timeout):
        """Communicator and divisor by the engine's name of a group; one for the same ranks."""
        ranks = sorted({tuple(entry[0]) for entry in self.reduce if entry is not None})
        # Sorted, so that all ranks make them in one order.
        comms = {r: self._communicator(list(r), timeout) for r in ranks}
        return {reduce_groups.name_of(i): (comms[tuple(entry[0])], entry[1])
                for i, entry in enumerate(self.reduce) if entry is not None}

    def _tied_groups(self, records, timeout):
        """Communicators of the holders of each tied name in this rank's pipeline, in stage order."""
        tied, first_holder = {}, {}
        names = sorted({n for r in self.layout.pipeline for n in records[r]["tied"]})
        for name in names:
            holders = [r for r in self.layout.pipeline if name in records[r]["tied"]]
            if self.layout.rank in holders:
                tied[name] = self._communicator(holders, timeout)
                first_holder[name] = holders[0] == self.layout.rank
        return tied, first_holder

    @torch.no_grad()
    def _send_weights(self, data, tied, reduce):
        for named in self.parameters:
            if named.weight.numel() == 0:
                continue
            owners = reduce.get(reduce_groups.name_of(named.group), (data,))[0]
            for comm in (owners, tied.get(named.tied)):
                if comm is not None and comm.size > 1:
                    self.placement.broadcast(comm, named.weight)
            if named.mirror is not None:
                named.parameter.copy_(named.mirror)

    @torch.no_grad()
    def _send_rest(self, data, rest):
        """Frozen parameters and buffers, which the optimizer does not have."""
        if data.size == 1:
            return
        for tensor in rest.values():
            self.placement.broadcast(data, tensor)

    def _describe(self, named, first_holder):
        p = named.parameter
        own = self.reduce[named.group] is not None
        return _C.Parameter(named.key, list(p.shape), DTYPES[p.dtype], named.weight.data_ptr(),
                            named.group, reduce_groups.name_of(named.group) if own else "",
                            named.tied_key, first_holder.get(named.tied, True) and self._counts(named))

    def _counts(self, named):
        # The norm takes the first tensor rank's copy of what is replicated over them.
        return named.is_cut or self.layout.tensor[0] == self.layout.rank


def _log(line):
    """A line of the engine's: through logging if the program has set that up, else to stderr."""
    if logger.hasHandlers():
        logger.warning(line)
    else:
        print(line, file=sys.stderr, flush=True)
