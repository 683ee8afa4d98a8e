"""Weights that go from the driver's own memory to replicas: the slow way, for whoever is in no worker."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from tidemill.weights.elements import torch_dtype
from tidemill.weights.parcel import Parcel, pack

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["parcels"]

# Bytes of weights that are sent at once: the driver holds them twice.
_BUCKET = 256 << 20


def parcels(tensors: "Iterable[tuple[str, Tensor]]", dtype: str) -> Iterator[Parcel]:
    """All of `tensors`, in parcels of about a bucket; one parcel at least."""
    wanted = torch_dtype(dtype)
    held: list[tuple[str, Tensor]] = []
    size, sent = 0, False
    for name, tensor in tensors:
        # A copy, since the source may make the next one in the same place.
        held.append((name, tensor.detach().to("cpu", wanted, copy=True)))
        size += held[-1][1].nbytes
        if size >= _BUCKET:
            yield pack(held, dtype)
            held, size, sent = [], 0, True
    if held or not sent:
        yield pack(held, dtype)
