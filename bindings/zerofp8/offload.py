"""Parameters on a CUDA device, state and kernels on the CPU; what goes there and back overlaps."""

from collections import deque
from functools import partial

from .parameters import DTYPES
from .placement import Host
from .streams import SideStream, host_memory

# Gradients on their way to the host: so many bytes, or two gradients if these are larger.
_BYTES_ON_THE_WAY = 64 << 20


class Offload(Host):
    """The engine on the CPU, which updates a page-locked copy of each parameter.

    A gradient is copied to the host beside the backward pass; when its copy is over, one of the
    next hooks gives it to the engine, so that the CPU adds while the next ones are copied. All are
    given in the order of the hooks, and an end of a micro-batch in its place among them, so that
    everything has the bits of training on the CPU.

    Parameters
    ----------
    device : torch.device
        The parameters'.
    sharded : bool
        Whether the end of a micro-batch is collective (a sharded accumulator).
    side : SideStream
    bytes_on_the_way : int
        Bound of the host memory of copies that are not given yet.
    """

    kind = "the CPU (offloaded)"
    is_offload = True

    def __init__(self, device, sharded, side=None, bytes_on_the_way=_BYTES_ON_THE_WAY):
        super().__init__(device)
        self._sharded = sharded
        self._side = side or SideStream(device)
        self._bound = bytes_on_the_way
        self._queue = deque()   # (event or None, bytes, what to call), in order
        self._bytes = 0         # of the copies in it
        self._returned = None   # event: parameters have got what is in the mirrors

    def make_mirrors(self, parameters):
        for named in parameters:
            named.mirror = host_memory(named.parameter)
            named.mirror.copy_(named.parameter.detach())

    # -- gradients -------------------------------------------------------------------------------

    def add_gradient(self, index, grad):
        size = grad.numel() * grad.element_size()
        while len(self._queue) > 1 and self._bytes + size > self._bound:
            self._give_oldest()
        host = host_memory(grad)
        self._side.follow()
        self._side.copy(host, grad)
        self._side.keep(grad)
        self._put(self._side.mark(), size, partial(_give, self._give, index, host))
        while self._queue and (self._queue[0][0] is None or self._queue[0][0].query()):
            self._give_oldest()

    def release(self):
        self._side.lead()

    def end_micro_batch(self, end):
        if not self._sharded and self._queue:
            self._put(None, 0, end)
            return
        self._drain()
        end()

    def _put(self, event, size, call):
        self._queue.append((event, size, call))
        self._bytes += size

    def _give_oldest(self):
        event, size, call = self._queue.popleft()
        self._bytes -= size
        if event is not None:
            event.synchronize()
        call()

    def _drain(self):
        while self._queue:
            self._give_oldest()

    # -- order -----------------------------------------------------------------------------------

    def before(self, name):
        if name == "close":
            self._side.synchronize()
            self._queue.clear()
            self._bytes = 0
            return
        self._drain()
        if name in ("step", "load"):
            self._let_mirrors_go()

    def _let_mirrors_go(self):
        """The host may write to mirrors: no copy reads them any more."""
        if self._returned is not None:
            self._returned.synchronize()
            self._returned = None

    # -- weights ---------------------------------------------------------------------------------

    def fetch(self, named):
        self._let_mirrors_go()
        super().fetch(named)

    def send_back(self, parameters):
        self._side.follow()  # backward may still read what is overwritten here
        for named in parameters:
            self._side.copy(named.parameter, named.mirror)
        self._returned = self._side.mark()
        self._side.lead()


def _give(give, index, host):
    give(index, host.data_ptr(), DTYPES[host.dtype])
