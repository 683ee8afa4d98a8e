"""What a machine has (`tidemill.planning.machine`)."""

from pathlib import Path

import pytest

from tidemill.planning import machine
from tidemill.planning.machine import available_bytes, smallest_gpu, this_machine
from tidemill.units import GIB, MIB


def system(root: Path, **files: str) -> Path:
    """A system with `proc/meminfo` of 100 GiB to be had, and files by path with `__` for `/`."""
    for name, text in {"proc__meminfo": f"MemTotal: 1 kB\nMemAvailable:  {100 << 20} kB\n", **files}.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_least_of_system_and_groups_counts(tmp_path: Path) -> None:
    assert available_bytes(system(tmp_path / "free")) == 100 * GIB
    limited = {
        "proc__self__cgroup": "0::/job/step\n",
        "sys__fs__cgroup__job__memory.max": f"{8 * GIB}\n",
        "sys__fs__cgroup__job__memory.current": f"{5 * GIB}\n",
        "sys__fs__cgroup__job__memory.stat": f"anon 1\ninactive_file {GIB}\nactive_file {GIB}\n",
        "sys__fs__cgroup__job__step__memory.max": "max\n",
    }
    assert available_bytes(system(tmp_path / "second", **limited)) == 5 * GIB
    first = {
        "proc__self__cgroup": "12:cpu:/a\n4:memory,x:/a\n",
        "sys__fs__cgroup__memory__memory.limit_in_bytes": f"{3 * GIB}",
        "sys__fs__cgroup__memory__memory.usage_in_bytes": f"{4 * GIB}",
    }
    assert available_bytes(system(tmp_path / "first", **first)) == 0


@pytest.mark.parametrize("path", ["/", "/host/knows/this"])
def test_in_a_container_the_limit_lies_at_the_mount_whatever_the_group_is_called(tmp_path: Path, path: str) -> None:
    limited = {
        "proc__self__cgroup": f"0::{path}\n",
        "sys__fs__cgroup__memory.max": f"{8 * GIB}\n",
        "sys__fs__cgroup__memory.current": f"{6 * GIB}\n",
        "sys__fs__cgroup__memory.stat": f"anon 5\ninactive_file {2 * GIB}\nactive_file {GIB}\n",
    }
    assert available_bytes(system(tmp_path, **limited)) == 5 * GIB


def test_of_nested_groups_the_tightest_counts(tmp_path: Path) -> None:
    nested = {
        "proc__self__cgroup": "0::/a/b\n",
        "sys__fs__cgroup__a__b__memory.max": "max\n",
        "sys__fs__cgroup__a__memory.max": f"{3 * GIB}\n",
        "sys__fs__cgroup__a__memory.current": f"{GIB}\n",
        "sys__fs__cgroup__memory.max": f"{9 * GIB}\n",
        "sys__fs__cgroup__memory.current": f"{GIB}\n",
    }
    assert available_bytes(system(tmp_path, **nested)) == 2 * GIB


def test_cached_files_of_a_group_of_version_1_count_as_free(tmp_path: Path) -> None:
    first = {
        "proc__self__cgroup": "7:cpu:/x\n4:memory:/docker/abc\n",
        "sys__fs__cgroup__memory__memory.limit_in_bytes": f"{4 * GIB}\n",
        "sys__fs__cgroup__memory__memory.usage_in_bytes": f"{2 * GIB}\n",
        "sys__fs__cgroup__memory__memory.stat": f"total_inactive_file {GIB}\n",
    }
    assert available_bytes(system(tmp_path, **first)) == 3 * GIB


def test_a_system_that_tells_nothing_is_unknown(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None


def tool(folder: Path, answer: str, code: int = 0) -> str:
    """Stands in for the GPU's tool."""
    path = folder / "gpu-tool"
    path.write_text(f"#!/bin/sh\nprintf '{answer}'\nexit {code}\n")
    path.chmod(0o755)
    return str(path)


def test_the_smallest_gpu_counts(tmp_path: Path) -> None:
    assert smallest_gpu(tool(tmp_path, "143771\\n81559\\n")) == 81559 * MIB
    assert smallest_gpu(tool(tmp_path, "[N/A]\\n")) is None
    assert smallest_gpu(tool(tmp_path, "8", code=9)) is None
    assert smallest_gpu(str(tmp_path / "none")) is None


@pytest.mark.parametrize(
    ("device", "told", "seen", "expected"),
    [
        ("auto", None, None, ("cpu", None)),
        ("auto", None, 7, ("cuda", 7)),
        ("auto", 9, 7, ("cuda", 9)),
        ("cuda", None, None, ("cuda", None)),
        ("cpu", 9, 7, ("cpu", None)),
    ],
)
def test_a_gpu_is_planned_for_where_one_is_seen_or_told_of(
    monkeypatch: pytest.MonkeyPatch, device: str, told: int | None, seen: int | None, expected: tuple[str, int | None]
) -> None:
    monkeypatch.setattr(machine, "smallest_gpu", lambda: seen)
    found = this_machine(device=device, device_bytes=told, host_bytes=5)
    assert (found.device, found.device_bytes, found.host_bytes) == (*expected, 5)
    assert this_machine(device="cpu").host_bytes == pytest.approx(available_bytes(), rel=0.2)
