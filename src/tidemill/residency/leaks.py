"""Tensors on the device that nobody owns: when they grow, and then grow again, that is a leak, and stops the sleep.

Whoever keeps tensors on a device on purpose says so, once, by `own`. All other tensors are garbage in the making:
activations, caches, a loss that somebody kept. A few live on from step to step, and somebody may take some for good;
more and more of them is a fault that ends in an out-of-memory hours later, far from its cause.
"""

import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tidemill.contracts.events import Emit, Notice
from tidemill.errors import ResidencyError
from tidemill.residency.workspaces import free_workspaces
from tidemill.units import MIB, format_bytes

__all__ = [
    "CpuMeter",
    "CudaMeter",
    "Kept",
    "LeakGate",
    "Meter",
    "Owner",
    "leak_gate",
    "meter_of",
    "own",
    "uncounted_bytes",
]

TOLERANCE = 64 * MIB
"""Bytes by which what nobody owns may grow: libraries keep a little here and there."""

_WARM_UP = 2  # sleeps until everything has run once
_SHOWN = 3
_LOOKS = {1, 2, *(8**power for power in range(1, 20))}
_LOOKS_BEHIND_A_GROWTH = 3


@dataclass(frozen=True)
class Kept:
    """A tensor that its owner keeps. `counted`: its memory is of PyTorch's allocator, which counts it.

    `absent` are bytes that the allocator counts as its own, with this tensor, though others have taken them out.
    """

    tensor: torch.Tensor
    counted: bool = True
    absent: int = 0


class Owner(Protocol):
    """Who keeps tensors on purpose."""

    def kept(self) -> Iterable[Kept]:
        """One for each storage that has memory now, on whatever device."""
        ...


_owners: "weakref.WeakSet[Any]" = weakref.WeakSet()
_owners_lock = threading.Lock()


def own(owner: Owner) -> None:
    """Count what `owner` keeps as owned, as long as it lives."""
    with _owners_lock:
        _owners.add(owner)


def _owned_on(device: torch.device) -> list[Kept]:
    with _owners_lock:
        owners = list(_owners)
    return [kept for owner in owners for kept in owner.kept() if kept.tensor.device.type == device.type]


def uncounted_bytes(device: torch.device) -> int:
    """Bytes on `device` that owners keep and PyTorch's allocator does not count, less those that it counts in vain."""
    owned = _owned_on(device)
    uncounted = sum(kept.tensor.untyped_storage().nbytes() for kept in owned if not kept.counted)
    return uncounted - sum(kept.absent for kept in owned)


class Meter(Protocol):
    """How many bytes of tensors on a device nobody owns."""

    def unowned(self) -> int:
        """Bytes now."""
        ...

    def largest(self) -> list[str]:
        """The largest of them that Python knows, in words: for a message, slow."""
        ...


class CudaMeter:
    """Asks PyTorch's allocator, which knows every tensor, also those that only a graph of autograd holds."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def unowned(self) -> int:
        """See Meter. The workspaces of cuBLAS are given back first, where they can be."""
        free_workspaces()
        owned = {
            kept.tensor.untyped_storage().data_ptr(): kept.tensor.untyped_storage().nbytes()
            for kept in _owned_on(self._device)
            if kept.counted
        }
        return torch.cuda.memory_allocated(self._device) - sum(owned.values())

    def largest(self) -> list[str]:
        """See Meter."""
        return _largest(self._device)


class CpuMeter:
    """Walks over the objects that Python knows: slow, and blind to what only a graph of autograd holds."""

    def unowned(self) -> int:
        """See Meter."""
        return sum(tensor.untyped_storage().nbytes() for tensor in _strangers(torch.device("cpu")))

    def largest(self) -> list[str]:
        """See Meter."""
        return _largest(torch.device("cpu"))


def meter_of(device: torch.device) -> Meter:
    """The one that suits the device."""
    return CudaMeter(device) if device.type == "cuda" else CpuMeter()


def leak_gate(tenant: str, device: torch.device, *, stop: bool, emit: Emit) -> "LeakGate":
    """The gate that suits the device; warnings are notices."""

    def warn(text: str) -> None:
        emit(Notice(text=text, level="warning"))

    return LeakGate(tenant, meter_of(device), stop=stop, warn=warn, slow=device.type == "cpu")


def _kinds(kind: type[torch.Tensor]) -> Iterator[type[torch.Tensor]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _kinds(below)


def _strangers(device: torch.device) -> Iterator[torch.Tensor]:
    """One tensor of each storage on `device` that nobody owns."""
    seen = {kept.tensor.untyped_storage().data_ptr() for kept in _owned_on(device)}
    # By `type`, not `isinstance`: that asks lazy modules and proxies for attributes, which wakes them, and is slower.
    kinds = set(_kinds(torch.Tensor))
    for found in [found for found in gc.get_objects() if type(found) in kinds]:
        if found.device.type != device.type:
            continue
        try:
            storage = found.untyped_storage()
            address = storage.data_ptr() if storage.nbytes() else 0
        except (RuntimeError, NotImplementedError):
            continue  # a tensor without memory of its own, as fakes and wrappers are
        if address and address not in seen:
            seen.add(address)
            yield found


def _largest(device: torch.device) -> list[str]:
    found = sorted(_strangers(device), key=lambda tensor: -tensor.untyped_storage().nbytes())[:_SHOWN]
    return [
        f"{format_bytes(tensor.untyped_storage().nbytes())} ({str(tensor.dtype).removeprefix('torch.')} "
        f"{list(tensor.shape)}{', with a graph behind it' if tensor.grad_fn is not None else ''})"
        for tensor in found
    ]


class LeakGate:
    """Looked at by a tenant as it goes to sleep, when nothing but what it keeps should be alive.

    `stop` says whether growth that goes on fails the sleep or is told to `warn`. A slow meter is asked at sleeps 1, 2,
    8, 64 and so on, and at the next few behind each growth: what grows at every step is found all the same.
    """

    def __init__(
        self,
        tenant: str,
        meter: Meter,
        *,
        stop: bool,
        warn: Callable[[str], None],
        slow: bool,
        tolerance: int = TOLERANCE,
    ) -> None:
        self._tenant = tenant
        self._meter = meter
        self._stop = stop
        self._warn = warn
        self._slow = slow
        self._tolerance = tolerance
        self._sleeps = 0
        self._usual = 0
        self._accepted = 0
        self._look_until = 0

    def check(self) -> None:
        """Raises ResidencyError, before anything moves, when what nobody owns has grown twice; or warns of each growth.

        The first two sleeps say what is usual. What grows once, by more than the tolerance, is warned of and accepted:
        another thread may have taken it for good. A growth beyond that is a leak, at whatever later sleep it shows.
        """
        self._sleeps += 1
        if self._slow and self._sleeps not in _LOOKS and self._sleeps > self._look_until:
            return
        unowned = self._meter.unowned()
        if self._sleeps <= _WARM_UP:
            self._usual = self._accepted = max(self._usual, unowned)
            return
        if self._grown(unowned):
            gc.collect()  # what only a cycle of references holds is no leak yet
            unowned = self._meter.unowned()
        if unowned <= self._usual + self._tolerance:
            self._accepted = self._usual
        if not self._grown(unowned):
            return
        text = self._words(unowned)
        if self._stop and self._accepted > self._usual:
            raise ResidencyError(
                f"cannot put {self._tenant} to sleep: {text}, or set residency.leaks=warn to go on (they had grown "
                f"before, to {format_bytes(self._accepted)})"
            )
        self._accepted = unowned
        self._look_until = self._sleeps + _LOOKS_BEHIND_A_GROWTH
        self._warn(f"{text}; {self._tenant} sleeps all the same{', until they grow again' if self._stop else ''}")

    def _grown(self, unowned: int) -> bool:
        return unowned > self._accepted + self._tolerance

    def _words(self, unowned: int) -> str:
        largest = self._meter.largest()
        names = f", the largest {'; '.join(largest)}" if largest else ""
        return (
            f"{format_bytes(unowned)} of tensors on the device have no owner, {format_bytes(unowned - self._usual)} "
            f"more than at its first {_WARM_UP} sleeps{names}: keep no tensor of a step (a loss, a batch, log-probs) "
            "beyond it; `.item()` or `.cpu()` what you want to keep"
        )
