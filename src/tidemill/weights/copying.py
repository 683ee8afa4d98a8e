"""Copying one weight into live storage."""

import ctypes

import torch

__all__ = ["copy_weight"]

# On a CPU PyTorch wakes its worker threads for any tensor of more than some ten thousand elements; below this size
# waking them takes longer than copying.
_SMALL = 1 << 20


def copy_weight(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` into `target`, of the same shape, casting where the dtypes differ. No gradient is recorded."""
    if _plain(target, source):
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
        return
    with torch.no_grad():
        target.copy_(source)


def _plain(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether the bytes can go over as they lie: small, on the CPU, row-major, of one dtype."""
    return (
        source.nbytes <= _SMALL
        and source.dtype == target.dtype
        and source.device.type == "cpu" == target.device.type
        and source.is_contiguous()
        and target.is_contiguous()
    )
