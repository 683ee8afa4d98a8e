"""Calls into the CUDA driver library, for memory that PyTorch's allocator cannot give: shared, or at a kept address.

Each call needs a current context in its thread: one call of `torch.cuda.synchronize(device)` makes PyTorch's so.
"""

import ctypes
import functools
from typing import Any

import torch

__all__ = ["CudaDriverError", "allocate", "call", "tensor_at"]

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class CudaDriverError(RuntimeError):
    """The driver refused a call: `code` is its CUresult."""

    def __init__(self, name: str, code: int) -> None:
        said = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(said))
        super().__init__(f"{name} answered {code} ({(said.value or b'unknown').decode()})")
        self.code = code


def call(name: str, *arguments: Any) -> None:
    """Call `name` of the driver with ctypes values. Raises CudaDriverError unless it answers 0."""
    code = getattr(_driver(), name)(*arguments)
    if code != 0:
        raise CudaDriverError(name, code)


def allocate(name: str, *arguments: Any) -> None:
    """As `call`, of something that takes device memory: once more when PyTorch has given back what it does not use.

    Raises MemoryError when there is not enough even then.
    """
    try:
        call(name, *arguments)
    except CudaDriverError as first:
        if first.code != _OUT_OF_MEMORY:
            raise
        torch.cuda.empty_cache()
        try:
            call(name, *arguments)
        except CudaDriverError as second:
            if second.code != _OUT_OF_MEMORY:
                raise
            raise MemoryError(str(second)) from second


def tensor_at(owner: Any, address: int, size: int, device: torch.device) -> torch.Tensor:
    """Flat uint8 tensor of the `size` bytes at `address`. As long as anybody views it, it keeps `owner` alive."""
    return torch.as_tensor(_Described(owner, address, size), device=device)


class _Described:
    """Device memory as other libraries describe it; PyTorch makes a tensor of it without a copy."""

    def __init__(self, owner: Any, address: int, size: int) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
