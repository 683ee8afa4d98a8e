"""tidemill.units and tidemill.faults."""

import errno

import pytest

from tidemill import faults
from tidemill.units import format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"), [("12 GiB", 12 << 30), ("1.5GB", 1_500_000_000), ("4096", 4096), (" 64 mib ", 64 << 20)]
)
def test_sizes_are_read_as_people_write_them(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1 GiB", "12 parsecs", "1e9", "9" * 400])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="12 GiB"):
        parse_bytes(text)


def test_bytes_and_seconds_are_written_for_people() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 2 << 30)] == ["0 B", "1023 B", "1.5 KiB", "2.0 GiB"]
    assert [format_seconds(s) for s in (0.012, 4.21, 185, 3720)] == ["12 ms", "4.2 s", "3 min 05 s", "1 h 02 min"]


def test_a_fault_strikes_at_the_nth_pass_and_only_while_armed() -> None:
    with faults.armed("here=raise@2"):
        faults.point("here")
        with pytest.raises(faults.FaultInjected, match="here"):
            faults.point("here")
        faults.point("here")
    faults.point("here")


def test_a_full_disk_looks_like_one() -> None:
    with faults.armed("write=disk-full"), pytest.raises(OSError) as caught:
        faults.point("write")
    assert caught.value.errno == errno.ENOSPC


def test_the_points_that_a_program_passes_can_be_listed() -> None:
    with faults.passed() as names:
        faults.point("a")
        faults.point("b")
    assert names == ["a", "b"]


def test_a_step_is_left_out_each_time_or_the_time_that_is_said_and_never_while_nothing_is_armed() -> None:
    assert not faults.skipped("here")
    with faults.armed("here=skip,there=skip@2,bad=raise"):
        assert [faults.skipped("here") for _ in range(3)] == [True] * 3
        assert [faults.skipped("there") for _ in range(3)] == [False, True, False]
        assert not faults.skipped("bad") and not faults.skipped("elsewhere")
        faults.point("here")  # a point of the same name is passed as ever
    assert not faults.skipped("here")


def test_what_is_armed_may_be_a_call_made_at_each_pass() -> None:
    calls: list[str] = []
    with faults.calling("here", lambda: calls.append("called")):
        faults.point("here")
        faults.point("here")
        faults.point("there")
    faults.point("here")
    assert calls == ["called"] * 2
