import errno
import os
from pathlib import Path

import pytest

from tidemill.checkpoint.durable import free_bytes, fsync_folder, is_full, remove_tree, write_all, write_durably


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
    assert not is_full(OSError(errno.EACCES, "")) and not is_full(ValueError())


def test_a_folder_that_is_not_there_is_removed_already(tmp_path: Path) -> None:
    remove_tree(tmp_path / "none")
    fsync_folder(tmp_path)
    assert free_bytes(tmp_path) > 0
