"""Steps that are decided on the device, so that CUDA graphs can have them in."""

from .errors import ArgumentError, ConfigError


def is_wanted(argument, template):
    """Whether ``initialize`` was asked for it, in its own argument or by torch's option."""
    if argument is not None:
        return bool(argument)
    return any(g.get("capturable", False) for g in template.param_groups)


def check(settings, placement, integration, parameters, param_groups):
    """Refuse it where the host has a say in each step.

    Parameters
    ----------
    settings : zerofp8._C.Settings
    placement : Host, Cuda or Offload
    integration : Integration
    parameters : list of NamedParameter
    param_groups : list of dict
        The template's.
    """
    if any(group.get("maximize", False) for group in param_groups):
        raise ConfigError(
            "capturable", "True, with maximize", "one of the two",
            "negate the loss: the sign is turned between the reduction and the update, by the host")
    for named in parameters:
        if hasattr(named.parameter, "main_grad"):
            raise ConfigError(
                "capturable", f"True, and parameter \"{named.name}\" has a main_grad",
                "gradients in p.grad", "turn gradient accumulation fusion off, or leave capturable "
                "out: whether there is something in the buffer is looked at by the host")
    if integration.ends_micro_batches:
        raise ConfigError(
            "capturable", f"True, under {integration.name}", "a plain loop or torch's pipelines",
            "leave capturable out: the trainer reads each step's report on the host")
    if placement.is_offload:
        raise ConfigError(
            "capturable", "True, and the optimizer's state is offloaded to the CPU",
            "state on the CUDA device, or on the CPU with the model",
            "set /zero_optimization/offload_optimizer/device to \"none\", or leave capturable out")
    if settings.loss_scaling:
        raise ConfigError(
            "capturable", "True, with /fp16/enabled", "bf16 or fp32 models",
            "set /bf16/enabled in place of /fp16/enabled, or leave capturable out: whether fp16 "
            "weights stay in range, and the next loss scale, are decided on the host")


class PendingReport:
    """What ``step`` returns with ``capturable=True``: the report of the step that ran last.

    Nothing is waited for until one of the attributes of `StepReport` is asked for.
    """

    def __init__(self, optimizer):
        self._optimizer = optimizer

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        report = self._optimizer.last_report
        if report is None:
            raise ArgumentError("there is no report: no step has run since the state was loaded")
        return getattr(report, name)

    def __repr__(self):
        return "PendingReport(the step that ran last; its attributes wait for the device)"
