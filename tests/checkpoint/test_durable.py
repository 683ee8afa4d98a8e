import errno
import os
from pathlib import Path

import pytest

from tidemill.checkpoint.durable import (
    free_bytes,
    fsync_file,
    fsync_folder,
    full_in_words,
    is_full,
    make_folder,
    remove_tree,
    replace_durably,
    write_all,
    write_durably,
)
from tidemill.faults import armed


def test_a_file_is_never_written_over(tmp_path: Path) -> None:
    write_durably(tmp_path / "a", b"one", fault="a", fsync_fault="b")
    with pytest.raises(FileExistsError):
        write_durably(tmp_path / "a", b"two", fault="a", fsync_fault="b")
    assert (tmp_path / "a").read_bytes() == b"one"


def test_every_byte_is_written_through_a_pipe_that_takes_few() -> None:
    reader, writer = os.pipe()
    data = bytes(range(256)) * 100
    os.set_blocking(writer, True)
    write_all(writer, data)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        assert stream.read() == data


def test_full_disks_quotas_and_file_limits_are_full() -> None:
    assert all(is_full(OSError(number, "")) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
    told = [full_in_words(OSError(number, "")) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)]
    assert told[0] == "the disk is full" and "quota" in told[1] and "ulimit -f" in told[2]
    assert not is_full(OSError(errno.EACCES, "")) and not is_full(ValueError())


def test_a_folder_that_is_not_there_is_removed_already(tmp_path: Path) -> None:
    remove_tree(tmp_path / "none")
    fsync_folder(tmp_path)
    assert free_bytes(tmp_path) > 0


def test_every_new_folder_is_named_durably_in_the_one_above_it(tmp_path: Path, synced: list[Path]) -> None:
    make_folder(tmp_path / "a" / "b" / "c")
    assert synced == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
    synced.clear()
    make_folder(tmp_path / "a" / "b" / "c")
    make_folder(tmp_path / "a" / "b" / "d")
    assert synced == [tmp_path / "a" / "b"]
    with pytest.raises(FileExistsError):
        make_folder(write_one(tmp_path / "file"))


def test_a_file_is_replaced_after_its_content_is_durable_and_then_its_name(tmp_path: Path, synced: list[Path]) -> None:
    path = write_one(tmp_path / "a.json")
    (tmp_path / "a.tmp").write_text("left by a killed one")
    replace_durably(path, b"two", faults="test")
    assert synced == [tmp_path / "a.tmp", tmp_path]
    assert path.read_bytes() == b"two"
    fsync_file(path)
    assert synced[-1] == path


@pytest.mark.parametrize("point", ["test.write", "test.fsync"])
def test_a_file_that_cannot_be_replaced_stays_as_it_was_and_alone(tmp_path: Path, point: str) -> None:
    path = write_one(tmp_path / "a.json")
    with armed(f"{point}=disk-full"), pytest.raises(OSError, match="No space left"):
        replace_durably(path, b"two", faults="test")
    assert path.read_bytes() == b"one"
    assert list(tmp_path.iterdir()) == [path]


def write_one(path: Path) -> Path:
    path.write_bytes(b"one")
    return path
