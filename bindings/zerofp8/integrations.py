"""Who divides the gradients by the micro-batches: one table for all trainers.

The step's gradient is the mean over data ranks and micro-batches. The engine divides by the data
ranks always, and by A micro-batches unless the trainer has divided its loss.
"""

from dataclasses import dataclass

from .errors import ConfigError


@dataclass(frozen=True)
class Integration:
    """How one kind of trainer hands over its gradients.

    Attributes
    ----------
    name : str
        As printed in the plan and in errors.
    loss_is_divided : bool or None
        Whether the trainer divides its loss by A. None: the user has to say where A > 1.
    trainer_scales_grads : bool
        The trainer divides ``p.grad`` in place after its backward passes; zerofp8 has taken the
        gradients by then, so that this has no effect and the engine divides.
    takes_leftovers : bool
        Whether gradients that no hook has seen are taken at ``step()``.
    ends_micro_batches : bool
        The trainer says when a micro-batch ends: one may take several backward passes.
    """

    name: str
    loss_is_divided: bool | None
    trainer_scales_grads: bool
    takes_leftovers: bool
    ends_micro_batches: bool = False


# Each row is held by a test in tests/python.
INTEGRATIONS = {
    "loop": Integration("plain loop", None, False, True),
    # Schedules divide p.grad by their micro-batches at the end (scale_grads=True), which finds nothing. Zero-bubble
    # schedules compute weight gradients outside of backward: those were divided, so that they are refused.
    "pipelining": Integration("torch.distributed.pipelining", False, True, False),
    # engine.backward and the pipeline's last stage divide the loss by gradient_accumulation_steps.
    "deepspeed": Integration("DeepSpeed", True, False, True, ends_micro_batches=True),
}


def choose(pipeline_stages):
    """The integration for a model that is cut into so many stages."""
    return INTEGRATIONS["pipelining" if pipeline_stages > 1 else "loop"]


def clips_itself(settings):
    """Who clips: the config's clipping wins over a trainer's calls of ``clip_grad_norm_``.

    It is over the whole model, pipeline stages and tensor slices included, and every rank has it.
    """
    return settings.gradient_clipping > 0


def resolve_division(integration, accumulation_steps, given):
    """Whether the loss is divided by A already.

    Raises
    ------
    ConfigError
        A > 1 in a plain loop and the argument ``loss_is_divided`` is missing.
    """
    if given is not None:
        return bool(given)
    if integration.loss_is_divided is not None:
        return integration.loss_is_divided
    if accumulation_steps > 1:
        raise ConfigError(
            "loss_is_divided", f"nothing, with {accumulation_steps} micro-batches per step",
            "True or False",
            "pass True if your loop divides the loss by the micro-batches (loss / A), else False")
    return False
