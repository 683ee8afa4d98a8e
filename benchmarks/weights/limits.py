"""What the device can do: copying and reading as many bytes as are handed over, and how fast they are summed up."""

import statistics
from collections.abc import Callable

import torch

from benchmarks.bus import timed
from benchmarks.figures import Figure
from benchmarks.weights.sides import Receiver, Source
from tidemill.weights.checksum import Checksums, checksums

__all__ = ["Limits", "hash_figures", "limits_of"]

Limits = dict[str, float]
"""Seconds: of a `copy` of the engine's bytes within the device, and of a `read` of them."""

_TIMES = 5


def _median(device: torch.device, work: Callable[[], object]) -> float:
    work()
    return statistics.median(timed(device, work) for _ in range(_TIMES))


def limits_of(size: int, device: torch.device) -> Limits:
    """Of flat memory of `size` bytes; the best of what is measured is the limit."""
    size = -(-size // 4) * 4
    there, here = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    floats = there.view(torch.float32)
    reads = [_median(device, floats.sum), _median(device, floats.amax)]
    return {"copy": _median(device, lambda: here.copy_(there)), "read": min(reads)}


def hash_figures(case: str, source: Source, receiver: Receiver, limits: Limits) -> list[Figure]:
    """How fast checksums of what the engine holds are computed, and of what the trainer has, cast on the way."""
    device = receiver.slab.device
    held = sum(view.nbytes for view in receiver.views.values())
    had = sum(weight.nbytes for weight in source.weights.values())
    dtype = next(iter(receiver.views.values())).dtype

    def cast() -> None:
        sums = Checksums()
        for name, weight in source.weights.items():
            sums.add(name, weight, dtype)
        sums.take()

    def whole() -> None:
        checksums([("slab", receiver.slab)])

    seconds = {
        "hash": (_median(device, lambda: checksums(receiver.views.items())), held),
        "hash_cast": (_median(device, cast), had),
        "hash_one": (_median(device, whole), receiver.slab.nbytes),
    }
    rate = held / limits["read"]
    figures = []
    for name, (spent, size) in seconds.items():
        for metric, value, unit in (
            (f"{name}_rate", size / spent / 1e9, "1e9 bytes read/s"),
            (f"{name}_ratio", size / spent / rate, "of the read rate"),
        ):
            figures.append(
                Figure(
                    benchmark="weights", arm="checksums", case=case, metric=metric, value=value, unit=unit,
                    cycle="median", verified=True,
                )
            )  # fmt: skip
    return figures
