"""What stands in for a CUDA stream where there is no GPU, with CPU tensors for CUDA ones.

``LateStream`` has the methods of ``zerofp8.streams.SideStream``. Its copies run when somebody has
waited for them, or when some more were queued. A copy that was not ordered behind the current
stream, or whose source was not kept, brings NaNs.
"""

import torch

from zerofp8 import devices
from zerofp8.offload import Offload
from zerofp8.placement import Cuda

CPU = torch.device("cpu")


class LateStream:
    """
    Attributes
    ----------
    log : list
        Names of calls on the stream and, where the engine is `Logged`, on the engine.
    lag : int
        A copy is found to be over when so many more were queued.
    """

    handle = 7

    def __init__(self, lag=3, log=None):
        self.lag, self.log = lag, [] if log is None else log
        self._follows = False
        self._kept = set()
        self._copies = []   # (to, source, ordered)
        self._done = 0

    def follow(self):
        self.log.append("follow")
        self._follows = True

    def lead(self):
        self.log.append("lead")
        self._run(len(self._copies))

    def keep(self, tensor):
        self.log.append("keep")
        self._kept.add(tensor.untyped_storage().data_ptr())

    def copy(self, to, source):
        self.log.append("copy")
        if isinstance(to, torch.nn.Parameter):  # noticed when it is queued, not when it is done
            torch.autograd.graph.increment_version(to)
        to.data.fill_(float("nan"))
        self._copies.append((to.data, source.detach(), self._follows))

    def mark(self):
        self._follows = False
        return LateEvent(self, len(self._copies))

    def synchronize(self):
        self.log.append("synchronize")
        self._run(len(self._copies))

    def _run(self, count):
        for to, source, ordered in self._copies[self._done:count]:
            is_parameters = isinstance(source, Mirror)
            address = source.untyped_storage().data_ptr()
            kept = is_parameters or address in self._kept
            self._kept.discard(address)
            to.copy_(source if ordered and kept else torch.full_like(source, float("nan")))
        self._done = max(self._done, count)


class Mirror(torch.Tensor):
    """A mirror, which lives as long as the optimizer: a copy from it needs no keeping."""


class LateEvent:
    def __init__(self, stream, count):
        self._stream, self._count = stream, count

    def query(self):
        if len(self._stream._copies) - self._count >= self._stream.lag:
            self._stream._run(self._count)
        return self._stream._done >= self._count

    def synchronize(self):
        self._stream.log.append("wait")
        self._stream._run(self._count)


class Logged:
    """An engine that writes its calls into a log; gradients with their index."""

    def __init__(self, engine, log):
        self._engine, self._log = engine, log

    def __dir__(self):
        return dir(self._engine)

    def __getattr__(self, name):
        method = getattr(self._engine, name)

        def call(*arguments):
            first = f" {arguments[0]}" if name == "add_gradient" else ""
            self._log.append(name + first)
            return method(*arguments)

        return call


class LoggedOffload(Offload):
    """Offload with CPU tensors; ``most`` has the largest number and bytes of copies on the way."""

    def __init__(self, sharded, lag=3, **options):
        super().__init__(CPU, sharded, LateStream(lag), **options)
        self.log = self._side.log
        self.most = [0, 0]

    def attach(self, engine):
        return super().attach(Logged(engine, self.log))

    def make_mirrors(self, parameters):
        super().make_mirrors(parameters)
        for named in parameters:
            named.mirror = named.mirror.as_subclass(Mirror)

    def _put(self, event, size, call):
        super()._put(event, size, call)
        copies = sum(e is not None for e, _, _ in self._queue)
        self.most = [max(self.most[0], copies), max(self.most[1], self._bytes)]


class LoggedCuda(Cuda):
    """A CUDA placement with CPU tensors and the CPU's engine; `index` is of the made-up device."""

    def __init__(self, index=None):
        super().__init__(CPU, LateStream(), lambda index, handle: None)
        self.log, self.index = self._side.log, index

    def attach(self, engine):
        return super().attach(Logged(engine, self.log))


def use(make):
    """``initialize`` takes ``make(settings)`` for its placement from now on."""
    devices.choose = lambda model, parameters, settings: make(settings)
