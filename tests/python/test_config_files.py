"""Configs as public projects write them: what DeepSpeed takes passes, or is refused by name."""

import copy
import json

import pytest
from config_files import FILES, REFUSED_BY_DEEPSPEED
from zerofp8 import ConfigError, _C

# What transformers' and accelerate's hooks fill in, by the last part of the key.
FILLED = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8, "gradient_clipping": 1.0,
          "gradient_accumulation_steps": 1, "lr": 5e-5, "betas": [0.9, 0.999], "eps": 1e-8,
          "weight_decay": 0.0, "warmup_min_lr": 0, "warmup_max_lr": 5e-5, "warmup_num_steps": 10}


def filled(config):
    """The config as a trainer in bf16 hands it on."""
    config = _filled(config)
    if "train_batch_size" in config and config.get("train_micro_batch_size_per_gpu") == 8:
        config["train_batch_size"] = 8 * config.get("gradient_accumulation_steps", 1)
    return config


def _filled(value, name="", parent=""):
    if isinstance(value, dict):
        return {k: _filled(v, k, name) for k, v in value.items()}
    if value != "auto":
        return value
    return FILLED.get(name, parent == "bf16" if name == "enabled" else "auto")


def check(config, ranks=1):
    return _C.resolve(_C.Config.parse(json.dumps(config)), ranks, assume_auto=True)


def refused(config, ranks=1):
    """The keys that zerofp8 refuses."""
    try:
        check(config, ranks)
    except ConfigError as error:
        return {error.pointer, *(text.split(":")[0] for text in error.others)}
    return set()


@pytest.mark.parametrize("name", FILES)
def test_file(name):
    config, refusals = FILES[name]
    ranks = {"a pipeline of a large language model": 4,
             "instruction tuning, quantized stage 3": 8}.get(name, 1)
    assert refused(config, ranks) == set(refusals)
    assert refused(filled(config), ranks) == set(refusals)


@pytest.mark.parametrize("name", sorted(FILES.keys() - REFUSED_BY_DEEPSPEED))
def test_deepspeed_takes_the_file(name):
    """So that the set is no easier than what DeepSpeed accepts."""
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.config import DeepSpeedConfig

    config = DeepSpeedConfig(copy.deepcopy(filled(FILES[name][0])))
    if refused(filled(FILES[name][0])):
        return
    settings = check(filled(FILES[name][0]))
    assert settings.stage == config.zero_optimization_stage
    if "gradient_clipping" in FILES[name][0]:  # DeepSpeed's default clips, zerofp8's does not
        assert settings.gradient_clipping == config.gradient_clipping
    assert settings.accumulation_steps == config.gradient_accumulation_steps
    offload = config.zero_config.offload_optimizer
    assert settings.offload_optimizer == (offload.device if offload else "none")
    weight = "bf16" if config.bfloat16_config.enabled else "fp32"
    assert settings.weight == ("fp16" if config.float16_config.enabled else weight)
