"""Every key that the installed DeepSpeed reads, at its default: accepted here, too."""

import enum
import json

import pytest
from zerofp8 import _C

deepspeed = pytest.importorskip("deepspeed")

from deepspeed.runtime import config as ds_config  # noqa: E402
from deepspeed.runtime.precision_config import (DeepSpeedBF16Config,  # noqa: E402
                                                DeepSpeedFP16Config)
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig  # noqa: E402
from deepspeed.runtime.zero.offload_config import (DeepSpeedZeroOffloadOptimizerConfig,  # noqa: E402
                                                   DeepSpeedZeroOffloadParamConfig)

MODELS = {"bf16": DeepSpeedBF16Config, "bfloat16": DeepSpeedBF16Config,
          "fp16": DeepSpeedFP16Config, "zero_optimization": DeepSpeedZeroConfig,
          "zero_optimization/offload_param": DeepSpeedZeroOffloadParamConfig,
          "zero_optimization/offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig}


def as_json(value):
    """What Python's json would write for a default."""
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    return json.loads(json.dumps(value, default=lambda v: v.value
                                 if isinstance(v, enum.Enum) else str(v)))


def check(config):
    """As ``zerofp8 check``."""
    return _C.resolve(_C.Config.parse(json.dumps(config)), assume_auto=True)


def nested(path, value):
    for name in reversed(path.split("/")):
        value = {name: value}
    return value


def fields():
    for block, model in MODELS.items():
        for name, field in model.model_fields.items():
            for spelling in {name, field.alias or name}:
                yield f"{block}/{spelling}", field.get_default(call_default_factory=True)


@pytest.mark.parametrize("path, default", list(fields()), ids=[path for path, _ in fields()])
def test_key_of_a_model(path, default):
    default = as_json(default)
    # Where the default is None, DeepSpeed's own validation of a written null may refuse it.
    check(nested(path, default))
    check(nested(path, "auto"))


class Asked(dict):
    """A config that notes which of its keys are asked for, with the default if there is one."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.defaults = {}

    def get(self, key, default=None):
        self.defaults[key] = default
        return super().get(key, default)

    def __contains__(self, key):
        self.defaults.setdefault(key, None)
        return super().__contains__(key)

    def keys(self):
        return self


def test_keys_at_the_top():
    asked = Asked({"train_batch_size": 1})
    ds_config.DeepSpeedConfig(asked)
    assert len(asked.defaults) > 40  # it does read its config this way
    sections = {"optimizer", "bf16", "bfloat16", "fp16", "zero_optimization", "data_types"}
    for key, default in asked.defaults.items():
        check({key: {} if default is None and key in sections else as_json(default)})


@pytest.mark.parametrize("config", [
    {"zero_optimization": {"zero_quantized_weights": False, "zero_quantized_gradients": False,
                           "zero_quantized_nontrainable_weights": False, "zenflow": {},
                           "cpu_offload": False, "cpu_offload_param": None}},
    {"zero_optimization": {"zenflow": None}}, {"zero_optimization": True},
    {"fp32_allreduce": False, "prescale_gradients": False, "gradient_predivide_factor": 1.0,
     "sparse_gradients": False, "amp": {"enabled": False, "opt_level": "O1"}},
    {"amp": {"enabled": "auto", "opt_level": "auto"}},
    {"optimizer": {"type": "AdamW", "params": {"fused": True, "foreach": False,
                                               "capturable": False, "maximize": False,
                                               "cuda_aware": False, "bias_correction": True}}},
    {"log_level": "warning", "fp8": {"enabled": False}, "_comment": "why", "//": ["why"]}])
def test_values_that_ask_for_nothing(config):
    check(config)


@pytest.mark.parametrize("path, value", [
    ("prescale_gradients", True), ("gradient_predivide_factor", 8), ("sparse_gradients", True),
    ("gradient_allreduce_op", "sum"), ("fp32_allreduce", True), ("amp", {"enabled": True}),
    ("zero_optimization/zero_quantized_gradients", True), ("zero_optimization/stage", 3),
    ("zero_optimization/zero_quantized_weights", True), ("fp8", {"enabled": True}),
    ("zero_optimization/zenflow", {"topk_ratio": 0.1}), ("bf16/bf16_optimizer_states", True),
    ("zero_optimization/offload_optimizer/device", "nvme"), ("optimizer/type", "OneBitAdam"),
    ("optimizer/type", "Lamb"), ("optimizer/type", "SGD"), ("optimizer/params/amsgrad", True),
    ("optimizer/params/bias_correction", False), ("optimizer/params/maximize", True),
    ("optimizer/params/freeze_step", 100), ("optimizer/params/max_grad_norm", 1.0)])
def test_what_cannot_be_done_is_refused_by_name(path, value):
    from zerofp8 import ConfigError

    with pytest.raises(ConfigError) as error:
        check(nested(path, value))
    assert error.value.pointer == "/" + path
    assert error.value.fix


def test_offload_by_its_obsolete_name():
    assert check({"zero_optimization": {"cpu_offload": True}}).offload_optimizer == "cpu"
    assert check({"zero_optimization": True}).stage == 1
