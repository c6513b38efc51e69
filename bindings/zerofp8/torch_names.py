"""What of torch is relied on although it is not public, looked for when the package is imported."""

import torch

from .errors import UnsupportedError
from .relied_on import absent_of

TESTED_VERSIONS = ("2.11.0",)

# (module, attribute path, arguments that it has to take)
_NEEDED = (
    ("torch", "_C._current_graph_task_id", ()),
    ("torch", "_C._will_engine_execute_node", ()),
    ("torch", "_C._storage_Use_Count", ()),
    ("torch", "_disable_dynamo", ()),
    ("torch.utils._python_dispatch", "is_traceable_wrapper_subclass", ()),
    ("torch.nn.parallel", "DistributedDataParallel._active_ddp_module", ()),
    ("torch.nn.parallel", "DistributedDataParallel._ddp_init_helper",
     ("parameters", "expect_sparse_gradient", "param_to_name_mapping", "static_graph")),
    ("torch.distributed", "Reducer._remove_autograd_hooks", ()),
    ("torch", "autograd.Variable._execution_engine.queue_callback", ()),
    ("torch", "_amp_foreach_non_finite_check_and_unscale_", ()),
    ("torch.distributed.distributed_c10d", "_get_default_store", ()),
    ("torch.distributed.distributed_c10d", "_process_group_name", ("ranks", "use_hashed_name")),
    ("torch.distributed.distributed_c10d", "new_group", ("use_local_synchronization",)),
)


def missing():
    """What the installed torch lacks, as a list of names."""
    return absent_of(_NEEDED)


def check():
    """Refuse a torch that lacks something.

    Raises
    ------
    UnsupportedError
        With the names that are missing.
    """
    absent = missing()
    if absent:
        raise lacks(", ".join(absent))


def lacks(what):
    """The error for a torch without `what`."""
    return UnsupportedError("torch", f"version {torch.__version__} without {what}",
                            "tested: " + ", ".join(TESTED_VERSIONS), "install that version")


check()  # before taken.py and others meet a missing name in their own way
