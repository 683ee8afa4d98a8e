"""tidemill.checkpoint.direct_file: files written past the page cache, and what happens where that cannot be."""

import errno
import fcntl
import mmap
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tidemill.checkpoint.direct_file import ALIGNMENT, DirectFile
from tidemill.faults import passed

BYTES = os.urandom(3 * ALIGNMENT)


def buffer() -> memoryview:
    memory = mmap.mmap(-1, len(BYTES))
    memory.write(BYTES)
    return memoryview(memory)


@contextmanager
def opened(path: Path, size: int) -> Iterator[DirectFile]:
    file = DirectFile(path, size)
    try:
        yield file
    finally:
        file.close()


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 12288])
def test_a_file_has_its_size_and_its_bytes(tmp_path: Path, size: int) -> None:
    padded = -(-size // ALIGNMENT) * ALIGNMENT
    with opened(tmp_path / "a", size) as file, passed() as names:
        for start in reversed(range(0, padded, ALIGNMENT)):
            file.write(start, buffer()[start : start + ALIGNMENT])
        file.finish("here")
    assert (tmp_path / "a").read_bytes() == BYTES[:size] and names == ["here"]


def test_a_file_that_is_there_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        DirectFile(tmp_path / "a", 100)
    assert (tmp_path / "a").read_bytes() == b"mine"


def goes_past_the_cache(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


Pwrite = Callable[[int, Any, int], int]


@pytest.fixture
def file_system(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Pwrite, int, Any, int], int]], None]:
    """Has another one answer each `pwrite`: it is given the real one, and its arguments."""

    def answer(by: Callable[[Pwrite, int, Any, int], int]) -> None:
        real = os.pwrite
        monkeypatch.setattr(os, "pwrite", lambda *arguments: by(real, *arguments))

    return answer


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("first_refused", [0, 1])
def test_where_direct_writes_are_refused_a_file_is_written_as_any_other(
    tmp_path: Path, file_system: Any, code: int, first_refused: int
) -> None:
    calls: list[int] = []

    def refusing(real: Pwrite, descriptor: int, data: Any, start: int) -> int:
        calls.append(start)
        if goes_past_the_cache(descriptor) and len(calls) > first_refused:
            raise OSError(code, "not past the page cache")
        return real(descriptor, data, start)

    file_system(refusing)
    with opened(tmp_path / "a", 8000) as file:
        for start in (0, ALIGNMENT):
            file.write(start, buffer()[start : start + ALIGNMENT])
        file.finish("here")
        assert not file.direct
    assert (tmp_path / "a").read_bytes() == BYTES[:8000]


def test_a_write_that_takes_fewer_bytes_goes_on_from_there(tmp_path: Path, file_system: Any) -> None:
    file_system(lambda real, descriptor, data, start: real(descriptor, data[:ALIGNMENT], start))
    with opened(tmp_path / "a", len(BYTES)) as file:
        file.write(0, buffer())
        file.finish("here")
    assert (tmp_path / "a").read_bytes() == BYTES


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_what_is_wrong_with_the_disk_is_told(tmp_path: Path, file_system: Any, code: int) -> None:
    def failing(real: Pwrite, descriptor: int, data: Any, start: int) -> int:
        raise OSError(code, os.strerror(code))

    file_system(failing)
    with opened(tmp_path / "a", len(BYTES)) as file, pytest.raises(OSError) as caught:
        file.write(0, buffer())
    assert caught.value.errno == code


def test_a_file_that_will_not_fit_is_refused_before_its_first_byte(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OSError) as caught:
            DirectFile(tmp_path / "a", 1 << 21)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
