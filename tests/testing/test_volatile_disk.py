"""tidemill.testing.volatile_disk: what POSIX promises after a power cut, and nothing more."""

import os
import shutil
import threading
from functools import partial
from pathlib import Path

import pytest

from tidemill.testing.volatile_disk import Choose, PowerCut, VolatileDisk

Contents = dict[str, bytes | None]


def nothing(options: int) -> int:
    return 0


def everything(options: int) -> int:
    return options - 1


def write(path: Path, data: bytes, *, sync: bool) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    os.write(descriptor, data)
    if sync:
        os.fsync(descriptor)
    os.close(descriptor)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def tree(folder: Path) -> Contents:
    """Bytes of every file by path, None for a folder."""
    found = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes() for path in found}


def left(disk: VolatileDisk, target: Path, choose: Choose) -> Contents:
    disk.leave(target, choose)
    found = tree(target)
    shutil.rmtree(target)
    return found


def all_left(disk: VolatileDisk, target: Path) -> list[Contents]:
    """Of every possible choice."""
    found: list[Contents] = []
    waiting: list[tuple[int, ...]] = [()]
    while waiting:
        script = waiting.pop()
        asked: list[int] = []

        def choose(options: int, script: tuple[int, ...] = script, asked: list[int] = asked) -> int:
            asked.append(options)
            return script[len(asked) - 1] if len(asked) <= len(script) else 0

        contents = left(disk, target, choose)
        if contents not in found:
            found.append(contents)
        for place in range(len(script), len(asked)):
            rest = (0,) * (place - len(script))
            waiting += [(*script, *rest, value) for value in range(1, asked[place])]
    return found


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "disk" / "old").mkdir(parents=True)
    (tmp_path / "disk" / "old" / "a").write_bytes(b"what was there")
    return tmp_path / "disk"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "left"


def test_what_was_there_is_durable(place: Path, target: Path) -> None:
    with VolatileDisk(place) as disk:
        assert all_left(disk, target) == [{"old": None, "old/a": b"what was there"}]


def test_a_file_is_there_for_sure_when_both_its_bytes_and_its_name_were_synced(place: Path, target: Path) -> None:
    shutil.rmtree(place / "old")
    with VolatileDisk(place) as disk:
        write(place / "b", b"new", sync=True)
        assert all_left(disk, target) == [{}, {"b": b"new"}]
        sync_folder(place)
        assert all_left(disk, target) == [{"b": b"new"}]


def test_bytes_that_were_not_synced_may_be_lost_whole_or_in_part_though_the_name_stays(
    place: Path, target: Path
) -> None:
    shutil.rmtree(place / "old")
    with VolatileDisk(place) as disk:
        write(place / "b", b"new!", sync=False)
        sync_folder(place)
        files = [contents["b"] for contents in all_left(disk, target)]
        assert {b"", b"ne", b"ne\0\0", b"\0\0w!", b"\0\0\0\0", b"new!"} == set(files)


def test_bytes_written_over_synced_ones_may_be_mixed_with_them(place: Path, target: Path) -> None:
    with VolatileDisk(place) as disk:
        write(place / "old" / "a", b"WHAT IS HERE  ", sync=False)
        files = [contents["old/a"] for contents in all_left(disk, target)]
        assert b"what was there" in files and b"WHAT IS HERE  " in files and b"WHAT ISs there" in files


def test_a_rename_is_whole_or_not_at_all_and_durable_with_its_folder(place: Path, target: Path) -> None:
    with VolatileDisk(place) as disk:
        (place / "old").rename(place / "young")
        assert all_left(disk, target) == [
            {"old": None, "old/a": b"what was there"},
            {"young": None, "young/a": b"what was there"},
        ]
        sync_folder(place)
        assert list(left(disk, target, nothing)) == ["young", "young/a"]


def test_names_come_true_one_by_one_and_in_any_choice(place: Path, target: Path) -> None:
    with VolatileDisk(place) as disk:
        (place / "one").mkdir()
        (place / "two").mkdir()
        (place / "old").rename(place / "three")
        (place / "three").rename(place / "four")
        found = [{name for name in contents if "/" not in name} for contents in all_left(disk, target)]
        old = [{"old"}, {"three"}, {"four"}]
        assert all(set(made) | name in found for made in ([], ["one"], ["two"], ["one", "two"]) for name in old)
        assert len(found) == 12


def test_a_folder_that_is_removed_may_lose_its_files_before_its_name(place: Path, target: Path) -> None:
    with VolatileDisk(place) as disk:
        shutil.rmtree(place / "old")
        assert {"old": None} in all_left(disk, target)
        assert left(disk, target, nothing) == {"old": None, "old/a": b"what was there"}
        sync_folder(place)
        assert all_left(disk, target) == [{}]


def test_a_name_given_anew_may_be_that_of_the_file_before_it(place: Path, target: Path) -> None:
    with VolatileDisk(place) as disk:
        write(place / "old" / "b", b"new", sync=True)
        (place / "old" / "b").replace(place / "old" / "a")
        assert {contents["old/a"] for contents in all_left(disk, target)} == {b"what was there", b"new"}


def test_after_the_cut_nothing_is_done_any_more(place: Path, target: Path) -> None:
    with VolatileDisk(place) as disk:
        disk.cut(after=1)
        (place / "one").mkdir()
        assert disk.is_dead
        with pytest.raises(PowerCut, match="before: mkdir two"):
            (place / "two").mkdir()
        with pytest.raises(PowerCut):
            write(place / "old" / "b", b"", sync=False)
        with pytest.raises(PowerCut):
            (place / "old" / "a").unlink()
        assert set(left(disk, target, everything)) == {"old", "old/a", "one"}


def test_every_operation_is_told_before_it_is_made_and_may_fail(place: Path) -> None:
    told: list[str] = []

    def before(operation: str) -> None:
        told.append(operation)
        if operation == "mkdir no":
            raise OSError("no")

    with VolatileDisk(place, before=before) as disk:
        write(place / "b", b"new", sync=True)
        (place / "b").rename(place / "c")
        with pytest.raises(OSError, match="no"):
            (place / "no").mkdir()
        sync_folder(place)
        shutil.rmtree(place / "old")
        assert disk.operations == len(told) - 1
    assert told == [
        "create b", "write b", "fsync b", "rename b to c", "mkdir no", "fsync disk", "unlink a", "rmdir old",
    ]  # fmt: skip


def test_what_happens_elsewhere_is_nobodys_business_and_all_is_as_before_at_the_end(
    place: Path, tmp_path: Path
) -> None:
    functions = {name: getattr(os, name) for name in ("open", "write", "fsync", "rename", "mkdir", "unlink")}
    with VolatileDisk(place) as disk:
        disk.cut()
        write(tmp_path / "elsewhere", b"", sync=True)
        (tmp_path / "elsewhere").unlink()
    assert functions == {name: getattr(os, name) for name in functions}


def test_a_change_that_was_not_seen_is_noticed(place: Path, target: Path) -> None:
    with VolatileDisk(place) as disk:
        (place / "behind its back").write_bytes(b"")
        with pytest.raises(AssertionError, match="behind its back"):
            disk.leave(target, nothing)


def test_many_files_that_come_and_go_keep_nothing_open(place: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with VolatileDisk(place):
        for _ in range(50):
            write(place / "b", b"new", sync=True)
            (place / "b").unlink()
            sync_folder(place)
        assert len(list(Path("/proc/self/fd").iterdir())) < before + 10
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_threads_are_counted_one_by_one(place: Path) -> None:
    with VolatileDisk(place) as disk:
        jobs = [partial(write, place / str(number), b"abc", sync=True) for number in range(8)]
        threads = [threading.Thread(target=job) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert disk.operations == 24


def test_choices_are_counted_through(place: Path, target: Path) -> None:
    """The harness of these tests: two names of their own are four possibilities."""
    with VolatileDisk(place) as disk:
        (place / "one").mkdir()
        (place / "two").mkdir()
        assert len(all_left(disk, target)) == 4
