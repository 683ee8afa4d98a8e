"""A trainer rank's side of a weight hand-over: whole weights, cast and packed into parcels, bucket after bucket.

All ranks pull in lockstep, since gathering a weight is a collective; only a rank that feeds somebody packs what it
pulled. The checksums are taken here, of the weights as cast, before anything carries them away.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import torch

from tidemill import faults
from tidemill.cluster.cuda_parcels import SharedStaging
from tidemill.contracts.weights import EVERY_WEIGHT, Sample, WeightSource
from tidemill.errors import WeightSyncError
from tidemill.weights.checksum import Checksums
from tidemill.weights.elements import torch_dtype
from tidemill.weights.parcel import Entry, Parcel, aligned, host_bytes, write

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Carrier", "Sent", "WeightSender"]

Carrier = Literal["bytes", "ipc", "none"]
"""How parcels leave a rank: in host memory, by a handle to a buffer on its GPU, or not at all."""


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What a rank sent: the checksum of each weight of the sample, as it should be in an engine; digests of parcels."""

    sums: Mapping[str, int] = field(default_factory=dict)
    parcels: tuple[int, ...] = ()


class WeightSender:
    """One shipment at a time; opening one ends the one before.

    Parcels are made in lockstep by all ranks, with a small answer that the driver waits for; those who feed somebody
    are then asked for theirs, which goes to its receivers and not through the driver.
    """

    def __init__(self, trainer: WeightSource) -> None:
        self._trainer = trainer
        self._shipment: _Shipment | _NoShipment = _NoShipment()

    def open_shipment(self, dtype: str, bucket_bytes: int, carrier: Carrier, sample: Sample = EVERY_WEIGHT) -> bool:
        """Begin, and make the first parcel; whether it is the last. A collective. `dtype` is the engine's.

        Of the weights of `sample` checksums are computed.

        Raises WeightSyncError for a dtype that weights are not cast to, and what the trainer raises.
        """
        self.close_shipment()
        self._shipment = _Shipment(self._trainer, dtype, bucket_bytes, carrier, sample)
        return self._shipment.next_parcel()

    def next_parcel(self) -> bool:
        """Make the next parcel; whether it is the last. A collective: as many weights as fit the bucket, at least one.

        The buffer of the parcel before the last one is written again: its receivers must have answered.
        """
        return self._shipment.next_parcel()

    def take_parcel(self) -> Parcel:
        """The parcel made last, for the receivers that this rank feeds."""
        return self._shipment.take_parcel()

    def close_shipment(self) -> Sent:
        """Free the buffers; what this rank sent. Nothing when no shipment is open.

        Call it when every receiver has let go of what it was sent, after failures too.
        """
        shipment, self._shipment = self._shipment, _NoShipment()
        return shipment.close()


class _Staging(Protocol):
    def buffer(self, device: torch.device) -> "Tensor":
        """Where to write the next parcel, flat uint8."""
        ...

    def payload(self, used: int) -> object:
        """What to send of the buffer's first `used` bytes, which are written when this returns."""
        ...

    def close(self) -> None:
        """Free the buffers."""
        ...


class _HostStaging:
    """A new array for each parcel: it travels on without the rank. Weights on a GPU are cast there first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._array = np.empty(0, dtype=np.uint8)
        self._device = torch.empty(0, dtype=torch.uint8)

    def buffer(self, device: torch.device) -> "Tensor":
        self._array = np.empty(self._size, dtype=np.uint8)
        if device.type == "cpu":
            return host_bytes(self._array)
        if self._device.nbytes != self._size:
            self._device = torch.empty(self._size, dtype=torch.uint8, device=device)
        return self._device

    def payload(self, used: int) -> object:
        array, self._array = self._array[:used], np.empty(0, dtype=np.uint8)
        if self._device.nbytes:
            host_bytes(array).copy_(self._device[:used])
        return array

    def close(self) -> None:
        self._device = torch.empty(0, dtype=torch.uint8)


class _Packing:
    """What a rank does that feeds somebody."""

    def __init__(self, staging: _Staging, chosen: frozenset[str], words: bool) -> None:
        self._staging = staging
        self._chosen = chosen
        self._entries: list[Entry] = []
        self._digests: list[int] = []
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._sums = Checksums(words=words)

    def add(self, entry: Entry, tensor: "Tensor") -> None:
        if not self._entries:
            self._flat = self._staging.buffer(tensor.device)
        view = write(self._flat, entry, tensor)
        if entry.name in self._chosen:
            self._sums.add(entry.name, view, view.dtype)
        self._entries.append(entry)

    def parcel(self) -> Parcel:
        entries, self._entries = tuple(self._entries), []
        # The buffer is written again: whatever waits for its checksum must have been read.
        self._sums.queue()
        self._flat = torch.empty(0, dtype=torch.uint8)
        used = entries[-1].start + entries[-1].nbytes if entries else 0
        parcel = Parcel(entries=entries, payload=self._staging.payload(used), number=len(self._digests))
        self._digests.append(parcel.digest())
        return parcel

    def close(self) -> Sent:
        try:
            return Sent(sums=self._sums.take(), parcels=tuple(self._digests))
        finally:
            self._flat = torch.empty(0, dtype=torch.uint8)
            self._staging.close()


class _Passing:
    """What a rank does that feeds nobody: the others need it to gather."""

    def add(self, entry: Entry, tensor: "Tensor") -> None:
        pass

    def parcel(self) -> Parcel:
        raise WeightSyncError("cannot send a parcel of weights: this rank was opened to feed nobody")

    def close(self) -> Sent:
        return Sent()


class _Shipment:
    """The weights of one hand-over, from the first to the last."""

    def __init__(self, trainer: WeightSource, dtype: str, bucket_bytes: int, carrier: Carrier, sample: Sample) -> None:
        self._dtype = dtype
        itemsize = torch_dtype(dtype).itemsize
        specs = trainer.weight_specs()
        sizes = [aligned(math.prod(shape) * itemsize) for _, shape in specs.values()]
        self._capacity = max(min(bucket_bytes, sum(sizes)), max(sizes, default=0))
        self._packing = _packing(carrier, self._capacity, sample.chosen(specs), sample.words)
        self._seen: set[str] = set()
        self._weights: Iterator[tuple[str, Tensor]] = iter(trainer.named_weights())
        self._ahead = self._pull()

    def _pull(self) -> "list[tuple[str, Tensor]]":
        """The next weight, or nothing. It may be overwritten when the one after it is pulled."""
        for name, tensor in self._weights:
            faults.point("weights.send.tensor")
            if name in self._seen:
                raise WeightSyncError(f"the trainer hands out two weights named {name!r}")
            self._seen.add(name)
            return [(name, tensor.detach())]
        return []

    def next_parcel(self) -> bool:
        used = 0
        while self._ahead:
            ((name, tensor),) = self._ahead
            entry = Entry(name=name, dtype=self._dtype, shape=tuple(tensor.shape), start=used)
            if entry.nbytes > self._capacity:
                raise WeightSyncError(f"the trainer hands out {name!r} as {entry.shape}, larger than it said it is")
            if used and used + entry.nbytes > self._capacity:
                break
            self._packing.add(entry, tensor)
            used = aligned(used + entry.nbytes)
            self._ahead = self._pull()
        return not self._ahead

    def take_parcel(self) -> Parcel:
        return self._packing.parcel()

    def close(self) -> Sent:
        # Dropped at once: it may hold gathered weights, and be half-way through a gathering.
        self._weights, self._ahead = iter(()), []
        return self._packing.close()


def _packing(carrier: Carrier, capacity: int, chosen: frozenset[str], words: bool) -> _Packing | _Passing:
    match carrier:
        case "bytes":
            return _Packing(_HostStaging(capacity), chosen, words)
        case "ipc":
            return _Packing(SharedStaging(capacity), chosen, words)
        case "none":
            return _Passing()


class _NoShipment:
    """Before the first, and between two."""

    def next_parcel(self) -> bool:
        raise WeightSyncError("cannot make a parcel of weights: no shipment is open; call open_shipment first")

    def take_parcel(self) -> Parcel:
        raise WeightSyncError("cannot send a parcel of weights: no shipment is open; call open_shipment first")

    def close(self) -> Sent:
        return Sent()
