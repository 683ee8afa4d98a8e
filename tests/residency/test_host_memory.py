"""Host memory that is there, and memory that is pinned (`tidemill.residency.host_memory`)."""

import mmap
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch

from tidemill.errors import ResidencyError
from tidemill.residency import host_memory
from tidemill.residency.host_memory import map_pinned, map_plain

MIB = 1 << 20


class Runtime:
    """The part of CUDA's runtime that pins; `code` is what it answers."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.calls: list[str] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls.append(f"register {size}")
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append("unregister")
        return 0


def test_memory_is_registered_once_whole_and_unregistered() -> None:
    runtime: Any = Runtime()
    memory, unmap = map_pinned(3 << 20, runtime=lambda: runtime)
    assert len(memory) == 3 << 20 and not any(memory[:: 1 << 16])
    unmap()
    assert runtime.calls == [f"register {3 << 20}", "unregister"]


def test_memory_that_cannot_be_pinned_is_pageable_and_the_warning_says_what_it_costs() -> None:
    runtime: Any = Runtime(code=2)
    told: list[str] = []
    memory, unmap = map_pinned(1 << 20, warn=told.append, runtime=lambda: runtime)
    memory[5] = 1
    unmap()
    (text,) = told
    assert "cannot pin 1.0 MiB of host memory: cudaHostRegister returned 2" in text
    assert "17.8 and 9.1 GB/s" in text and "ulimit -l" in text
    assert runtime.calls == [f"register {1 << 20}"]


def test_without_somebody_to_warn_memory_that_cannot_be_pinned_is_refused() -> None:
    runtime: Any = Runtime(code=1)
    with pytest.raises(ResidencyError, match="returned 1"):
        map_pinned(1 << 20, runtime=lambda: runtime)


def test_a_system_without_huge_pages_has_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(mmap.mmap):
        def madvise(self, *arguments: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Plain)
    runtime: Any = Runtime()
    memory, _ = map_pinned(1 << 20, runtime=lambda: runtime)
    assert len(memory) == 1 << 20


def test_more_than_the_system_promises_is_refused() -> None:
    with pytest.raises(ResidencyError, match="cannot map"):
        map_plain(1 << 60)


def pinned(size: int, **settings: Any) -> Any:
    runtime: Any = Runtime()
    return map_pinned(size, runtime=lambda: runtime, **settings)


@pytest.mark.parametrize("kind", [map_plain, pinned])
def test_memory_is_there_when_it_is_given_out_so_that_nobody_else_counts_on_it(kind: Callable[..., Any]) -> None:
    before = psutil.Process().memory_info().rss
    memory, _ = kind(48 * MIB)
    assert psutil.Process().memory_info().rss - before > 40 * MIB
    assert len(memory) == 48 * MIB


@pytest.mark.parametrize("kind", [map_plain, pinned])
def test_memory_that_others_take_meanwhile_is_refused_and_what_was_taken_goes_back(
    monkeypatch: pytest.MonkeyPatch, kind: Callable[..., Any]
) -> None:
    monkeypatch.setattr(host_memory, "_TOUCH_BYTES", MIB)
    before = psutil.Process().memory_info().rss
    left = iter([64 * MIB] * 20)
    told = "cannot get 64.0 MiB of host memory for what sleeps: 44.0 MiB are missing, 30.0 MiB are there.*ranks"
    with pytest.raises(ResidencyError, match=told):
        kind(64 * MIB, free_bytes=lambda: next(left, 30 * MIB))
    assert psutil.Process().memory_info().rss - before < 8 * MIB


def test_where_nobody_knows_what_is_free_memory_is_taken() -> None:
    memory, _ = map_plain(MIB, free_bytes=lambda: None)
    assert len(memory) == MIB


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_can_be_used_after_pinning_failed() -> None:
    def twice() -> Any:
        cuda: Any = torch.cuda.cudart()
        memory = torch.zeros(1 << 20, dtype=torch.uint8)
        assert int(cuda.cudaHostRegister(memory.data_ptr(), 1 << 20, 0)) == 0
        real = Runtime(code=int(cuda.cudaHostRegister(memory.data_ptr(), 1 << 20, 0)))
        assert int(cuda.cudaHostUnregister(memory.data_ptr())) == 0
        return real

    told: list[str] = []
    map_pinned(1 << 20, warn=told.append, runtime=twice)
    assert len(told) == 1
    assert torch.ones(10, device="cuda").sum().item() == 10
