"""A number that says whether two tensors hold the same bytes.

On a CPU xxh3 of the bytes. On an accelerator a weighted sum of 32-bit words modulo 2^64, computed where the tensor is,
since eight bytes cross the bus rather than the tensor: in one launch for many tensors where Triton works, else in plain
PyTorch, equal bit for bit. Where one is to be compared with the other, the sum is asked for on the CPU too.
"""

import contextlib
import ctypes
import functools
import importlib.util
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import xxhash

from tidemill.contracts.weights import Sample
from tidemill.weights.word_sums import finished, word_sum, word_sums

__all__ = ["Checksums", "checksum", "checksums", "sampled_checksums"]

# Bytes of tensors that may wait for their sum, and so be kept alive for it: some launches for a whole model.
_WAITING = 512 << 20

_Sums = Callable[[Sequence[torch.Tensor], Sequence[torch.dtype]], torch.Tensor]


def checksum(tensor: torch.Tensor) -> int:
    """Of the elements, row-major, whatever the strides; shape and dtype are not part of it. In [0, 2^64)."""
    return checksums([("", tensor)])[""]


def sampled_checksums(tensors: Mapping[str, torch.Tensor], sample: Sample) -> dict[str, int]:
    """Of those that are in `sample`, by name, as it wants them."""
    chosen = sample.chosen(tensors)
    return checksums(((name, tensor) for name, tensor in tensors.items() if name in chosen), words=sample.words)


def checksums(tensors: Iterable[tuple[str, torch.Tensor]], *, words: bool = False) -> dict[str, int]:
    """Of each, by name; see `Checksums`. A tensor must stay as it is until this returns."""
    sums = Checksums(words=words)
    for name, tensor in tensors:
        sums.add(name, tensor, tensor.dtype)
    return sums.take()


class Checksums:
    """Checksums of many tensors. An accelerator is asked once, for all of them: each question waits for its queue.

    `words` makes those of tensors on a CPU the sums that an accelerator computes, at a tenth of the rate of xxh3.
    """

    def __init__(self, *, words: bool = False) -> None:
        self._of_bytes = word_sum if words else _of_bytes
        self._order: dict[str, int] = {}
        self._known: dict[str, int] = {}
        self._waiting: list[tuple[str, torch.Tensor, torch.dtype]] = []
        self._waiting_bytes = 0
        self._queued: list[tuple[list[tuple[str, int]], torch.Tensor]] = []
        self._spent = _Spent()
        self.seconds = 0.0

    def add(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        """Of `tensor` as it would be in `dtype`. It is read by the next `queue` or `take`, or before: until then it is
        kept alive, and must not be changed.
        """
        self._order[name] = len(self._order)
        if tensor.device.type == "cpu":
            began = time.perf_counter()
            self._known[name] = self._of_bytes(tensor.detach().to(dtype).contiguous())
            self._spent.seconds += time.perf_counter() - began
            return
        self._waiting.append((name, tensor.detach(), dtype))
        self._waiting_bytes += tensor.nbytes
        if self._waiting_bytes > _WAITING:
            self.queue()

    def queue(self) -> None:
        """What was added may be changed from now on, by what is queued on the same stream."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        for device in dict.fromkeys(tensor.device for _, tensor, _ in waiting):
            here = [one for one in waiting if one[1].device == device]
            sizes = [(name, tensor.numel() * dtype.itemsize) for name, tensor, dtype in here]
            with self._spent.measured(device):
                sums = _sums()([tensor for _, tensor, _ in here], [dtype for _, _, dtype in here])
            self._queued.append((sizes, sums))

    def take(self) -> dict[str, int]:
        """All of them, in the order in which they came; forgets them. Waits for the device.

        `seconds` is then what they took, of the device's time where it computed them.
        """
        self.queue()
        found = self._known
        for sizes, sums in self._queued:
            found |= {name: finished(total, size) for (name, size), total in zip(sizes, sums.tolist(), strict=True)}
        self.seconds, self._spent = self._spent.total(), _Spent()
        order, self._order, self._known, self._queued = self._order, {}, {}, []
        return {name: found[name] for name in order}


class _Spent:
    """Time that work takes where it is done: `seconds` on the CPU's clock, and between events in a GPU's queue."""

    def __init__(self) -> None:
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.seconds = 0.0

    @contextlib.contextmanager
    def measured(self, device: torch.device) -> Iterator[None]:
        """What the block queues on the current stream of `device`."""
        if device.type != "cuda":
            yield
            return
        stream = torch.cuda.current_stream(device)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record(stream)
        yield
        last.record(stream)
        self._events.append((first, last))

    def total(self) -> float:
        """Seconds, when all of it is done."""
        return self.seconds + sum(float(first.elapsed_time(last)) for first, last in self._events) / 1000


@functools.cache
def _sums() -> _Sums:
    """How to sum on accelerators: by the kernel, if a first try of it works."""
    if importlib.util.find_spec("triton") is None:
        return _slow_sums
    from tidemill.weights.word_kernel import kernel_sums

    try:
        probe = torch.arange(5, dtype=torch.int32, device="cuda")
        works = torch.equal(kernel_sums([probe], [probe.dtype]), word_sums([probe]))
        reason = "its sums are wrong"
    except Exception as error:
        works, reason = False, f"{type(error).__name__}: {error}"
    if not works:
        warnings.warn(
            f"checksums of weights take several times as long: Triton cannot be used ({reason})", stacklevel=2
        )
        return _slow_sums
    return _fast_sums


def _fast_sums(tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> torch.Tensor:
    from tidemill.weights.word_kernel import can_cast, kernel_sums

    ready = [
        tensor if can_cast(tensor, dtype) else tensor.to(dtype).contiguous()
        for tensor, dtype in zip(tensors, dtypes, strict=True)
    ]
    return kernel_sums(ready, dtypes)


def _slow_sums(tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> torch.Tensor:
    return word_sums([tensor.to(dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)])


def _of_bytes(tensor: torch.Tensor) -> int:
    # By address: `Tensor.numpy` would make the storage impossible to release for ever after.
    size = tensor.nbytes
    return xxhash.xxh3_64_intdigest((ctypes.c_char * size).from_address(tensor.data_ptr()) if size else b"")
