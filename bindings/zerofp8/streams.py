"""The CUDA stream beside the model's, and memory that copies are fast to and from."""

import torch

from .errors import Error


class SideStream:
    """A stream of a CUDA device on which work runs beside the model's.

    "The current stream" is the one that the calling code queues on: in a hook, backward's. The
    stream is one of torch's, which live as long as the process: the engine may end after this.

    Parameters
    ----------
    device : torch.device
    """

    def __init__(self, device):
        self.device = device
        self.stream = torch.cuda.Stream(device)

    @property
    def handle(self):
        """The cudaStream_t as a number."""
        return self.stream.cuda_stream

    def follow(self):
        """What is queued here from now on runs after what the current stream has queued so far."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def lead(self):
        """What the current stream gets from now on runs after what was queued here so far."""
        torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def keep(self, tensor):
        """The caching allocator gives the memory to nobody before this stream is done with it."""
        tensor.record_stream(self.stream)

    @torch.no_grad()
    def copy(self, to, source):
        """Queue a copy between device memory and page-locked host memory."""
        with torch.cuda.stream(self.stream):
            to.copy_(source, non_blocking=True)

    def mark(self):
        """An event that is over when all that was queued here so far is."""
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def synchronize(self):
        """The host waits."""
        self.stream.synchronize()


def is_capturing():
    """Whether what the current stream gets is recorded into a CUDA graph instead of run."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def host_memory(like):
    """An empty contiguous host tensor of a tensor's shape and dtype; page-locked where CUDA is.

    Raises
    ------
    Error
        There is not so much memory that can be locked.
    """
    try:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=torch.cuda.is_available())
    except RuntimeError as error:
        size = like.numel() * like.element_size()
        raise Error(f"offloading: no page-locked host memory for {size} bytes "
                    f"({str(error).splitlines()[0]}); free memory or raise the limit of locked "
                    "memory (ulimit -l), or set /zero_optimization/offload_optimizer/device to "
                    "\"none\"") from None
