"""Reports of steps as curves: TensorBoard, ``logging``, or any function that takes numbers."""

import logging

from .errors import ArgumentError

_SCALARS = ("applied", "grad_norm", "clip_coefficient", "clipped_norm", "loss_scale",
            "skipped_steps", "micro_batches", "unused_parameters")


def summary_writer(target, prefix="zerofp8/", every=1):
    """A function that writes the numbers of a step's report.

    Parameters
    ----------
    target : SummaryWriter, logging.Logger or callable
        What has ``add_scalar(tag, value, step)``; a logger, for a line at level INFO; or a function
        that is called with a dict of numbers and the step.
    prefix : str
        In front of each tag.
    every : int
        Only each so many steps.

    Returns
    -------
    callable
        Takes a StepReport. Or give it to ``optimizer.register_step_post_hook``, where a trainer
        calls ``step``. Steps are counted with the skipped ones.

    Examples
    --------
    >>> write = zerofp8.summary_writer(SummaryWriter("runs"))
    >>> write(optimizer.step())
    """
    write = _writing_to(target)

    def written(report, *_):
        report = getattr(report, "last_report", report)  # of an optimizer, in a hook
        step = report.step + report.skipped_steps
        if step % every == 0:
            write({prefix + name: value for name, value in scalars(report).items()}, step)

    return written


def scalars(report):
    """The numbers of a report, and the bytes sent by dtype as ``wire/fp8_e4m3`` and so on."""
    values = {name: float(getattr(report, name)) for name in _SCALARS}
    values.update((f"wire/{name}", float(sent)) for name, sent in report.wire.items())
    return values


def _writing_to(target):
    if hasattr(target, "add_scalar"):
        def write(values, step):
            for tag, value in values.items():
                target.add_scalar(tag, value, step)
    elif isinstance(target, logging.Logger):
        def write(values, step):
            target.info("step %d: %s", step, ", ".join(f"{k} {v:.6g}" for k, v in values.items()))
    elif callable(target):
        write = target
    else:
        raise ArgumentError(
            f"summary_writer: a {type(target).__name__}; allowed: what has add_scalar (TensorBoard's "
            "SummaryWriter), a logging.Logger, or a function of a dict and a step")
    return write
