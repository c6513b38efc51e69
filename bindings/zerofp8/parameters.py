"""The model and the optimizer template: what is accepted, under which names, with which options."""

from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import _C, ddp, overlaps
from .errors import ConfigError, UnsupportedError

_DEVICES = ("cpu", "cuda")
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

# Options of torch's Adam and AdamW that would change the update: (key, what it may be, why not).
_REFUSED_OPTIONS = (
    ("amsgrad", "the running maximum of amsgrad is not kept"),
    ("differentiable", "steps are not recorded by autograd"),
)


# Set by Megatron's layers, and what DeepSpeed's is_model_parallel_parameter looks for beside it.
_MARKS_OF_SLICES = ("tensor_model_parallel", "model_parallel")


@dataclass
class NamedParameter:
    """A parameter as the engine knows it.

    Attributes
    ----------
    name : str
        Its name in ``model.named_parameters()``, without torch.compile's prefix.
    parameter : torch.nn.Parameter
    group : int
        Index of its parameter group.
    mirror : torch.Tensor or None
        Contiguous copy that the engine updates in the place of a parameter that is not contiguous,
        or not where the engine is; a placement makes it.
    slice : str
        Which slice this is where tensor ranks hold one each ("tensor0-of-2."), else "".
    key : str
        The name that no other part of the model has: pipeline stages may use a name each for
        parameters of their own ("0.weight"), and tensor ranks hold different slices under one.
        Checkpoints and the random stream go by it; see `name_slices`.
    partial : bool
        Whether each tensor rank has the gradient of a part of the sequence (Megatron's mark
        ``sequence_parallel``): these are added up.
    """

    name: str
    parameter: torch.nn.Parameter
    group: int
    mirror: torch.Tensor | None = None
    slice: str = ""
    key: str = ""
    partial: bool = False

    @property
    def weight(self):
        """The contiguous tensor that the engine updates."""
        return self.parameter if self.mirror is None else self.mirror

    @property
    def tied(self):
        """Name under which copies on several pipeline stages are tied; "" if not."""
        megatrons = "shared_embedding" if getattr(self.parameter, "shared_embedding", False) else ""
        return getattr(self.parameter, "zerofp8_tied", megatrons)

    @property
    def tied_key(self):
        """The engine's name for copies whose gradients are added up; "" if there are none.

        Tied slices have random streams of their own, as other slices have.
        """
        if self.partial:
            return f"sequence parallel {self.key}"
        return self.slice + self.tied if self.tied else ""

    @property
    def is_cut(self):
        """Whether tensor ranks hold different slices of it, by Megatron's mark or DeepSpeed's."""
        return any(getattr(self.parameter, mark, False) for mark in _MARKS_OF_SLICES)


def tie(parameter, name):
    """Mark a parameter whose copies are on several pipeline stages, e.g. a shared embedding.

    Call it on each holder before ``initialize``, with the same name, once for each of them (not
    needed where Megatron's mark, ``shared_embedding = True``, is set). Copies
    begin with the weights of the first stage that has one, their gradients are added up, the norm
    counts them once, and they stay equal bit for bit.

    Parameters
    ----------
    parameter : torch.nn.Parameter
        The same shape and dtype on every holder.
    name : str

    Returns
    -------
    torch.nn.Parameter
        The same parameter.
    """
    parameter.zerofp8_tied = name
    return parameter


def check_model(model):
    """Refuse wrappers that reduce or shard gradients themselves, but for DDP (see ddp.py)."""
    if not isinstance(model, torch.nn.Module):
        raise ConfigError("model", type(model).__name__, "a torch.nn.Module", "pass the module")
    ddp.check_wrappers(model)
    for name, p in model.named_parameters():
        if type(p).__name__ == "DTensor" or type(p.data).__name__ == "DTensor":
            raise ConfigError("model", f"parameter \"{name}\" is a DTensor (fully_shard or tensor "
                              "parallel)", "plain parameters", "do not shard it: zerofp8 does")


def check_template(optimizer):
    """Refuse everything whose update the engine does not compute."""
    allowed = (torch.optim.Adam, torch.optim.AdamW)
    if type(optimizer) not in allowed:
        raise ConfigError("optimizer", type(optimizer).__name__,
                          "torch.optim.Adam or torch.optim.AdamW itself",
                          "build one of these with your parameter groups; it is a template and "
                          "does not step any more")


def adam_options(group, index, decoupled):
    """A parameter group as numbers for the engine.

    Parameters
    ----------
    group : dict
        With ``lr`` (a float, or a tensor that is read at each step), ``betas``, ``eps`` and
        ``weight_decay``.
    """
    for key, why in _REFUSED_OPTIONS:
        if group.get(key, False):
            raise ConfigError(f"param_groups[{index}][\"{key}\"]", str(group[key]), "False", why)
    options = _C.AdamOptions()
    options.decoupled = bool(group.get("decoupled_weight_decay", decoupled))
    options.lr = float(group["lr"])
    options.beta1, options.beta2 = (float(b) for b in group["betas"])
    options.eps = float(group["eps"])
    options.weight_decay = float(group["weight_decay"])
    return options


def as_tuple(options):
    return (options.decoupled, options.lr, options.beta1, options.beta2, options.eps,
            options.weight_decay)


def collect(model, optimizer):
    """All parameters of the optimizer, under their names in the model.

    Returns
    -------
    list of NamedParameter
        In the order of ``model.named_parameters()``, the same on all ranks.
    """
    names = {id(p): n.replace("_orig_mod.", "") for n, p in model.named_parameters()}
    group_of, where = {}, {}
    for index, group in enumerate(optimizer.param_groups):
        for position, p in enumerate(group["params"]):
            name = names.get(id(p))
            place = f"param_groups[{index}][\"params\"][{position}]"
            if name is None:
                raise ConfigError(place, f"a parameter of shape {tuple(p.shape)} that "
                                  "model.named_parameters() does not have",
                                  "parameters of the model",
                                  "pass the module that owns it, e.g. a ModuleList of all")
            if id(p) in group_of:
                raise ConfigError(place, f"parameter \"{name}\", which {where[id(p)]} is, too",
                                  "each parameter once", "remove one of the two")
            _check_parameter(name, p)
            group_of[id(p)], where[id(p)] = index, place
    found = [NamedParameter(names[id(p)], p, group_of[id(p)])
             for p in model.parameters() if id(p) in group_of]
    overlaps.check(found)
    return found


def rest_of(model, parameters):
    """What of a model the optimizer does not have: frozen parameters and buffers, by name.

    Sparse, quantised and meta tensors, and subclasses whose values are in other tensors, are left
    out, and experts (``allreduce = False``), which
    differ between data ranks.
    """
    taken = {id(n.parameter) for n in parameters}
    rest = {n: p for n, p in model.named_parameters()
            if id(p) not in taken and getattr(p, "allreduce", True)}
    rest.update(model.named_buffers())
    return {n.replace("_orig_mod.", ""): t for n, t in rest.items()
            if not _is_wrapper(t)
            and t.layout is torch.strided and t.device.type in _DEVICES and t.numel() > 0
            and not t.is_quantized and (t.is_contiguous() or 0 not in t.stride())}


def name_slices(parameters, layout):
    """Set `slice`, `partial`, and `key`: the name with the stage and the slice in front.

    Replicated parameters have one key on all tensor ranks, so that they are rounded with the same
    random bits and stay equal. A slice's key says of how many, so that a checkpoint for another
    number of tensor ranks is refused even where the shapes fit.
    """
    stage, tensor = layout.pipeline.index(layout.rank), layout.tensor.index(layout.rank)
    of_stage = f"stage{stage}." if len(layout.pipeline) > 1 else ""
    of_tensor = f"tensor{tensor}-of-{len(layout.tensor)}." if len(layout.tensor) > 1 else ""
    for named in parameters:
        named.slice = of_tensor if named.is_cut else ""
        named.key = of_stage + named.slice + named.name
        marked = getattr(named.parameter, "sequence_parallel", False)
        named.partial = bool(of_tensor and marked and not named.is_cut)
        if named.partial and named.tied:
            raise UnsupportedError(
                f"parameter \"{named.name}\"", "sequence_parallel = True and tied", "one of the two",
                "all-reduce its gradient over the tensor ranks in backward and remove the mark")


def check_partial(records):
    """Tensor ranks have to mean the same parameters by ``sequence_parallel``.

    Raises
    ------
    ConfigError
        The same on all ranks.
    """
    for rank, record in records.items():
        first = record["layout"]["tensor"][0]
        difference = sorted({*record["partial"]} ^ {*records[first]["partial"]})
        if difference:
            raise ConfigError(
                f"parameter \"{difference[0]}\"", "the mark sequence_parallel on one of ranks "
                f"{first} and {rank} only", "the same marks on all tensor ranks",
                "set or remove it on all of them")


def _is_wrapper(tensor):
    """Whether its values are in other tensors (torchao's weights): it has no memory of its own."""
    return is_traceable_wrapper_subclass(tensor) or is_traceable_wrapper_subclass(tensor.data)


def _check_parameter(name, p):
    given = None
    if _is_wrapper(p):
        given, allowed = f"a {type(p.data).__name__}, whose values are in other tensors", "plain ones"
        fix = "leave it out of the optimizer's groups if it is frozen, or train it unquantised"
    elif p.dtype not in DTYPES:
        given, allowed = str(p.dtype), ", ".join(str(d) for d in DTYPES)
        fix = "convert the model"
    elif p.device.type not in _DEVICES:
        given, allowed = f"on {p.device}", " or ".join(_DEVICES)
        fix = "move the model to one of these"
    elif p.layout is not torch.strided:
        given, allowed, fix = str(p.layout), "dense parameters", "make it dense"
    if given:
        raise ConfigError(f"parameter \"{name}\"", given, allowed, fix)
