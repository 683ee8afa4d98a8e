"""Many weights into live storage in few launches: on an accelerator each copy by itself waits for Python."""

from types import TracebackType
from typing import Self

import torch

from tidemill.weights.copying import copy_weight

__all__ = ["GroupedCopies"]

# Bytes of sources that may wait for their copy, and so be kept alive for it.
_WAITING = 512 << 20

_Group = tuple[list[torch.Tensor], list[torch.Tensor]]


class GroupedCopies:
    """A block at whose end everything added in it is copied, or on the device's queue; after an exception, perhaps not.

    A source is kept alive until then, and must stay as it is.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[torch.device, torch.dtype, torch.dtype], _Group] = {}
        self._waiting = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._copy()
        self._groups.clear()

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source` into `target`, of the same shape, casting where the dtypes differ."""
        if not _groupable(target, source):
            copy_weight(target, source)
            return
        targets, sources = self._groups.setdefault((target.device, target.dtype, source.dtype), ([], []))
        targets.append(target)
        sources.append(source)
        self._waiting += source.nbytes
        if self._waiting > _WAITING:
            self._copy()

    def _copy(self) -> None:
        groups, self._groups, self._waiting = self._groups, {}, 0
        with torch.no_grad():
            for targets, sources in groups.values():
                torch._foreach_copy_(targets, sources)


def _groupable(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether the copy is one of those that one launch makes many of."""
    return (
        target.device == source.device
        and target.device.type != "cpu"
        and target.is_contiguous()
        and source.is_contiguous()
        and source.numel() > 0
    )
