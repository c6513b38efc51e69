"""zerofp8: a ZeRO-style distributed optimizer with FP8 gradients, states and wire.

>>> model, optimizer = zerofp8.initialize(model, optimizer, config="ds_config.json")
>>> for batch in data:
...     loss(model(batch)).backward()
...     report = optimizer.step()
"""

import torch as _torch  # noqa: F401  (first: it loads the libraries that the extension needs)

from ._C import Config, Settings, StepReport
from .errors import (ArgumentError, CheckpointError, CommError, ConfigError, Error, NumericError,
                     TakenGradientError, UnsupportedError)
from .initialize import initialize
from .launch import LaunchInfo, init_distributed
from .optimizer import Optimizer
from .parameters import tie
from .plan import Plan
from .summary import summary_writer

__version__ = "0.1.0"
__all__ = [
    "ArgumentError", "CheckpointError", "CommError", "Config", "ConfigError", "Error", "LaunchInfo",
    "NumericError", "Optimizer", "Plan", "Settings", "StepReport", "TakenGradientError",
    "UnsupportedError", "init_distributed", "initialize", "summary_writer", "tie",
]
