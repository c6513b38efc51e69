"""Errors of zerofp8: each says what was given, what is allowed and what to change.

Errors that concern all ranks carry the same text on every rank.
"""


# What a signal's handler raised while the extension waited for other ranks; set and taken there.
interrupted = None


class Error(RuntimeError):
    """Base of all exceptions of this package."""


class ConfigError(Error, ValueError):
    """A config file or an argument cannot be used.

    Parameters
    ----------
    pointer : str
        JSON pointer of the key (``/zero_optimization/stage``), or the name of the argument.
    given, allowed, fix : str
        What was found, what may stand there, and what to do.
    others : list of str
        Texts of the further mistakes of a file; each is a line of the message.
    """

    def __init__(self, pointer, given="", allowed="", fix="", others=()):
        text = pointer or "config"
        if given:
            text += f": given {given}"
        if allowed:
            text += f"; allowed: {allowed}"
        if fix:
            text += f"; {fix}"
        super().__init__("\n".join([text, *others]))
        self.pointer, self.given, self.allowed, self.fix = pointer, given, allowed, fix
        self.others = list(others)

    def __reduce__(self):
        return type(self), (self.pointer, self.given, self.allowed, self.fix, self.others)


class UnsupportedError(ConfigError):
    """The config or argument is sound, but this version does not run it."""


class ArgumentError(Error, ValueError):
    """A call broke the contract of a function: wrong shape, unknown name, wrong order of calls."""


class CommError(Error):
    """A collective failed or timed out.

    Attributes
    ----------
    absent_ranks : list of int
        Ranks of the group that did not take part, as far as is known.
    """

    def __init__(self, message, absent_ranks=()):
        super().__init__(message)
        self.absent_ranks = list(absent_ranks)

    def __reduce__(self):
        return type(self), (str(self), self.absent_ranks)


class CheckpointError(Error):
    """A checkpoint is incomplete, damaged or belongs to another run. Nothing was overwritten."""

    def __init__(self, message, file=""):
        super().__init__(message)
        self.file = file

    def __reduce__(self):
        return type(self), (str(self), self.file)


class NumericError(Error):
    """Training cannot go on: the loss scale is at its floor and gradients are not finite."""


class TakenGradientError(Error):
    """A trainer computed with gradients that zerofp8 has taken (e.g. ``clip_grad_norm_``)."""
