"""Host memory that is there, and memory that is pinned (`tidemill.residency.host_memory`)."""

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

from tidemill.errors import ResidencyError
from tidemill.residency.host_memory import available_bytes, map_pinned, map_plain

GIB = 1 << 30


def system(root: Path, available: int = 100 * GIB, **files: str) -> Path:
    """A root folder as Linux has it; of `files`, `__` stands for a slash and `_` stays."""
    files = {"proc__meminfo": f"MemTotal: 1 kB\nMemAvailable: {available // 1024} kB\n", **files}
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("DOT", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_limits_it_is_what_the_system_says(tmp_path: Path) -> None:
    assert available_bytes(system(tmp_path)) == 100 * GIB


@pytest.mark.parametrize("path", ["/", "/host/knows/this"])
def test_a_container_of_version_2_allows_less_and_its_cached_files_count_as_free(tmp_path: Path, path: str) -> None:
    root = system(
        tmp_path,
        proc__self__cgroup=f"0::{path}\n",
        sys__fs__cgroup__memoryDOTmax=f"{8 * GIB}\n",
        sys__fs__cgroup__memoryDOTcurrent=f"{6 * GIB}\n",
        sys__fs__cgroup__memoryDOTstat=f"anon 5\ninactive_file {2 * GIB}\nactive_file {GIB}\n",
    )
    assert available_bytes(root) == 5 * GIB


def test_of_nested_groups_the_tightest_counts(tmp_path: Path) -> None:
    root = system(
        tmp_path,
        proc__self__cgroup="0::/a/b\n",
        sys__fs__cgroup__a__b__memoryDOTmax="max\n",
        sys__fs__cgroup__a__b__memoryDOTcurrent=f"{GIB}\n",
        sys__fs__cgroup__a__memoryDOTmax=f"{3 * GIB}\n",
        sys__fs__cgroup__a__memoryDOTcurrent=f"{GIB}\n",
    )
    assert available_bytes(root) == 2 * GIB


def test_a_group_of_version_1_is_looked_at_too(tmp_path: Path) -> None:
    root = system(
        tmp_path,
        proc__self__cgroup="7:cpu:/x\n4:memory:/docker/abc\n",
        sys__fs__cgroup__memory__memoryDOTlimit_in_bytes=f"{4 * GIB}\n",
        sys__fs__cgroup__memory__memoryDOTusage_in_bytes=f"{2 * GIB}\n",
        sys__fs__cgroup__memory__memoryDOTstat=f"total_inactive_file {GIB}\n",
    )
    assert available_bytes(root) == 3 * GIB


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    root = system(
        tmp_path,
        proc__self__cgroup="0::/\n",
        sys__fs__cgroup__memoryDOTmax="10\n",
        sys__fs__cgroup__memoryDOTcurrent="20\n",
    )
    assert available_bytes(root) == 0


def test_here_there_is_some() -> None:
    assert available_bytes() > 1 << 20


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
