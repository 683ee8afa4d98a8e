"""A trainer's weights brought to the driver, bucket after bucket: for whoever is in no worker. The slow way."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tidemill.contracts.weights import Sample
from tidemill.errors import TrainerError
from tidemill.weights.elements import torch_dtype
from tidemill.weights.parcel import Parcel, host_bytes, unpack

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["pulled_weights"]

_BUCKET = 64 << 20
_NAMES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}

Each = Callable[[str, list[tuple[Any, ...]]], list[Any]]


def pulled_weights(
    each: Each,
    take: Callable[[], Parcel],
    *,
    ranks: int,
    specs: Mapping[str, tuple[str, tuple[int, ...]]],
    check: Callable[[], None],
) -> "Iterator[tuple[str, Tensor]]":
    """Every weight as a CPU tensor of its own; `check` before each. A collective of all ranks at each bucket.

    `each` calls every rank, `take` gets rank 0's parcel. A hand-over to an engine that begins meanwhile ends this one.
    Raises TrainerError for weights that are no floats.
    """
    wide = _wide({dtype for dtype, _ in specs.values()})
    opening = [(wide, _BUCKET, "bytes" if rank == 0 else "none", Sample(of=0)) for rank in range(ranks)]
    last: bool = each("open_shipment", opening)[0]
    yield from _unpacked(take(), specs, check)
    while not last:
        check()
        last = each("next_parcel", [()] * ranks)[0]
        yield from _unpacked(take(), specs, check)
    each("close_shipment", [()] * ranks)


def _wide(dtypes: set[str]) -> str:
    """A dtype that holds what every one of `dtypes` holds."""
    if unknown := sorted(dtypes - set(_NAMES)):
        raise TrainerError(f"cannot bring weights of dtype {', '.join(unknown)} to the driver; only {list(_NAMES)}")
    if "F64" in dtypes:
        return "float64"
    return _NAMES[dtypes.pop()] if len(dtypes) == 1 else "float32"


def _unpacked(
    parcel: Parcel, specs: Mapping[str, tuple[str, tuple[int, ...]]], check: Callable[[], None]
) -> "Iterator[tuple[str, Tensor]]":
    # The views below live on the array's memory; each weight leaves as a copy.
    array = np.asarray(parcel.payload)
    for name, view in unpack(parcel.entries, host_bytes(array)):
        check()
        yield name, view.to(torch_dtype(_NAMES[specs[name][0]]), copy=True)
