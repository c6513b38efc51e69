"""zerofp8 inside DeepSpeed: one line before ``deepspeed.initialize``.

>>> import zerofp8.deepspeed
>>> zerofp8.deepspeed.install()
>>> engine, *_ = deepspeed.initialize(model=model, config="ds_config.json", ...)

Both of DeepSpeed's engines, the plain one and the pipeline's, then train with zerofp8: it takes the
gradients, reduces them, updates the weights and keeps the state. The same ds_config.json serves.
"""

from .interface import TESTED_VERSIONS
from .patches import install, installed, uninstall

__all__ = ["TESTED_VERSIONS", "initialize", "install", "installed", "uninstall"]


def initialize(*arguments, **keywords):
    """MS-AMP's spelling: ``install()``, then ``deepspeed.initialize`` with the same arguments."""
    import deepspeed
    install()
    return deepspeed.initialize(*arguments, **keywords)
