"""What of DeepSpeed is relied on, looked for when ``install`` is called."""

from ..errors import UnsupportedError
from ..relied_on import absent_of

TESTED_VERSIONS = ("0.19.8", "0.19.6", "0.18.9")
# With 0.18.9, gradients of stages before the last came out divided by the micro-batches once more
# (seen under zerofp8's hooks; its source divides per output tensor). 0.19.8 does not do so.
PIPELINES_FROM = "0.19.6"

_ENGINE = "deepspeed.runtime.engine"
_PIPE = "deepspeed.runtime.pipe.engine"

# (module, attribute path, arguments that it has to take)
_NEEDED = (
    (_ENGINE, "BF16_Optimizer", ()),
    (_ENGINE, "DeepSpeedEngine._do_sanity_check", ()),
    (_ENGINE, "DeepSpeedEngine._do_optimizer_sanity_check", ("basic_optimizer",)),
    (_ENGINE, "DeepSpeedEngine._configure_basic_optimizer", ("model_parameters",)),
    (_ENGINE, "DeepSpeedEngine._configure_bf16_optimizer", ("optimizer",)),
    (_ENGINE, "DeepSpeedEngine._configure_zero_optimizer", ("optimizer",)),
    (_ENGINE, "DeepSpeedEngine._save_zero_checkpoint", ("save_path", "tag")),
    (_ENGINE, "DeepSpeedEngine._load_zero_checkpoint", ("load_dir", "tag",
                                                        "load_optimizer_states")),
    (_ENGINE, "DeepSpeedEngine._backward_epilogue", ()),
    (_ENGINE, "DeepSpeedEngine.gradient_clipping", ()),
    (_PIPE, "BF16_Optimizer", ()),
    (_PIPE, "PipelineEngine._exec_backward_pass", ()),
    (_PIPE, "PipelineEngine._exec_reduce_tied_grads", ()),
    (_PIPE, "PipelineEngine._bf16_reduce_grads", ()),
    ("deepspeed.runtime.config", "DeepSpeedConfig.__init__", ("config", "mpu")),
    ("deepspeed.runtime.constants", "BFLOAT16", ()),
    ("deepspeed.runtime.base_optimizer", "ZeROOptimizer.scale_if_loss", ()),
    ("deepspeed.runtime.base_optimizer", "ZeROOptimizer.enter_backward", ()),
    ("deepspeed.runtime.base_optimizer", "ZeROOptimizer.exit_backward", ()),
    ("deepspeed.runtime.base_optimizer", "ZeROOptimizer.register_grad_acc_post_hook", ()),
    ("deepspeed.runtime.pipe.module", "PipelineModule.get_tied_weights_and_groups", ()),
    ("deepspeed.runtime.pipe.topology", "PipelineParallelGrid.get_data_parallel_group", ()),
    ("deepspeed.runtime.pipe.topology", "PipelineParallelGrid.get_pipe_parallel_group", ()),
    ("deepspeed.runtime.pipe.topology", "PipelineParallelGrid.get_slice_parallel_group", ()),
    ("deepspeed.accelerator", "get_accelerator", ()),
)


def version():
    """Version of the installed DeepSpeed."""
    try:
        import deepspeed
    except ImportError as error:
        raise UnsupportedError("deepspeed", f"no DeepSpeed that can be imported ({error})",
                               "tested: " + ", ".join(TESTED_VERSIONS),
                               "pip install deepspeed") from None
    return deepspeed.__version__.split("+")[0]


def check_pipeline(stages, accumulation_steps):
    """Refuse pipelines of a DeepSpeed whose gradients have a wrong scale."""
    from packaging.version import Version

    found = version()
    if stages > 1 and accumulation_steps > 1 and Version(found) < Version(PIPELINES_FROM):
        raise UnsupportedError(
            "deepspeed", f"version {found}, a pipeline and {accumulation_steps} micro-batches: it "
            "divides the gradients of the first stages by the micro-batches twice",
            f"{PIPELINES_FROM} or newer for pipelines", "pip install -U deepspeed")


def missing():
    """What the installed DeepSpeed lacks, as a list of names."""
    return absent_of(_NEEDED)


def check():
    """Refuse a DeepSpeed that lacks something.

    Raises
    ------
    UnsupportedError
        With the names that are missing and the versions that were tested.
    """
    found, absent = version(), missing()
    if absent:
        raise UnsupportedError("deepspeed", f"version {found} without " + ", ".join(absent),
                               "tested: " + ", ".join(TESTED_VERSIONS),
                               "install one of these, or use zerofp8.initialize in your own loop")
    return found
