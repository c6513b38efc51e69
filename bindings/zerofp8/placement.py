"""Where the engine's state and kernels are in relation to the model's tensors.

A placement knows which device the engine runs on, which memory it updates weights in, and how its
work is ordered with what the model has queued. `devices.choose` makes the one that fits; everything
else talks to it, and to the `PlacedEngine` that it gives.
"""

from functools import partial

import torch

from . import _C
from .errors import Error
from .parameters import DTYPES
from .streams import SideStream

# Engine calls that read or write the model's weights; and others that come after what is queued.
_OF_WEIGHTS = {"step", "enqueue_step", "write_groups", "load", "save", "weight_changed",
               "weights_changed", "set_full_state"}
_ORDERED = _OF_WEIGHTS | {
    "reduce_gradients", "discard_gradients", "discard_gradient", "gradient_norms", "full_state",
    "own_state", "state_pieces", "read_pieces", "write_pieces", "counters", "restore_counters",
    "close", "fetch_report", "grad_norm", "applied_steps", "skipped_steps", "step_of", "set_step"}


class Host:
    """Parameters on the CPU, and so is the engine: calls take effect at once."""

    kind = "the CPU"
    index = None  # of the CUDA device that the engine runs on
    is_offload = False

    def __init__(self, device=torch.device("cpu")):
        self.device = device  # of the parameters

    def engine_device(self):
        """What the engine is given; None: the CPU. For one engine."""
        return None

    def attach(self, engine):
        """Give gradients to this engine from now on.

        Returns
        -------
        PlacedEngine
        """
        self._give = engine.add_gradient
        return PlacedEngine(engine, self)

    def make_mirrors(self, parameters):
        """Contiguous copies where the engine cannot update the parameter itself."""
        for named in parameters:
            if not named.parameter.is_contiguous():
                named.mirror = _contiguous_copy(named)

    # -- gradients -------------------------------------------------------------------------------

    def add_gradient(self, index, grad):
        """Add a contiguous tensor to a parameter's gradient; its memory may be freed afterwards."""
        self._give(index, grad.data_ptr(), DTYPES[grad.dtype])

    def release(self):
        """Gradients that were added may be written from now on."""

    def end_micro_batch(self, end):
        """Call the engine's ``end`` behind the gradients of the micro-batch."""
        end()

    # -- order -----------------------------------------------------------------------------------

    def before(self, name):
        """An engine's call of this name follows."""

    def after(self, name, failed=False):
        """It has returned or raised."""

    # -- weights ---------------------------------------------------------------------------------

    def fetch(self, named):
        """The mirror becomes what the parameter is."""
        named.mirror.copy_(named.parameter)

    def send_back(self, parameters):
        """Parameters become what their mirrors are."""
        for named in parameters:
            if named.mirror is not None:
                named.parameter.copy_(named.mirror)

    def broadcast(self, comm, tensor):
        """Contents of the communicator's first rank to all of its ranks."""
        place = self.device if comm.on_device else torch.device("cpu")
        sent = tensor.to(place).contiguous()
        if comm.on_device:  # the call follows the device's default stream, others may not
            torch.cuda.synchronize(place)
        comm.broadcast(sent.data_ptr(), sent.numel() * sent.element_size(), 0)
        if comm.on_device:
            torch.cuda.synchronize(place)
        if sent.data_ptr() != tensor.data_ptr():
            tensor.copy_(sent)


class Cuda(Host):
    """Parameters on a CUDA device and the engine on the same, on a stream of its own.

    Gradients are added beside the backward pass. The model's next work waits for an update.

    Parameters
    ----------
    device : torch.device
    side : SideStream
    make_device : callable
        Makes the engine's device from its index and stream.
    """

    kind = "cuda"

    def __init__(self, device, side=None, make_device=_C.cuda_device):
        super().__init__(device)
        self.index = device.index
        self._side = side or SideStream(device)
        self._make_device = make_device

    def engine_device(self):
        self._side.follow()  # the engine reads weights from its start on
        return self._make_device(self.index, self._side.handle)

    def add_gradient(self, index, grad):
        self._side.follow()
        try:
            super().add_gradient(index, grad)
        except BaseException:
            self.after("add_gradient", failed=True)
            raise
        self._side.keep(grad)

    def release(self):
        self._side.lead()

    def before(self, name):
        self._side.follow()
        if name == "close":
            self._side.synchronize()

    def after(self, name, failed=False):
        # Within a capture, a side stream that is left alone would hide why a call has failed.
        if name in _OF_WEIGHTS or failed:
            self._side.lead()

    def end_micro_batch(self, end):
        try:
            end()
        except BaseException:
            self.after("end_micro_batch", failed=True)
            raise


def _contiguous_copy(named):
    try:
        return named.parameter.detach().clone(memory_format=torch.contiguous_format)
    except torch.OutOfMemoryError as error:
        raise Error(f"parameter \"{named.name}\" is not contiguous, and there is no memory for a "
                    f"contiguous copy ({str(error).splitlines()[0]}); make it contiguous before "
                    "initialize") from None


class PlacedEngine:
    """An engine whose calls are ordered with the model's work; otherwise the engine.

    Attributes
    ----------
    placement : Host, Cuda or Offload
    unordered : zerofp8._C.Engine
        Without the order.
    """

    def __init__(self, engine, placement):
        self.placement = placement
        self.unordered = engine  # for threads that read state beside the trainer
        self.add_gradient = placement.add_gradient  # (index, tensor)
        self.end_micro_batch = partial(placement.end_micro_batch, engine.end_micro_batch)
        for name in dir(engine):
            if name.startswith("_") or name in ("add_gradient", "end_micro_batch"):
                continue
            method = getattr(engine, name)
            if name in _ORDERED and type(placement) is not Host:
                method = partial(_in_order, placement, name, method)
            setattr(self, name, method)


def _in_order(placement, name, method, *arguments):
    placement.before(name)
    try:
        result = method(*arguments)
    except BaseException:
        placement.after(name, failed=True)
        raise
    placement.after(name)
    return result
