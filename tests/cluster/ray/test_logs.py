"""tidemill.cluster.ray.logs: files that workers write to are shown by the driver."""

import time
from pathlib import Path

import pytest

from tidemill.cluster.ray import logs
from tidemill.cluster.ray.logs import LogTail, last_lines
from tidemill.contracts.events import Event, Notice


def texts(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Notice)]


def test_lines_are_shown_with_the_name_of_their_worker_as_they_come(tmp_path: Path) -> None:
    seen: list[Event] = []
    tail = LogTail(seen.append)
    tail.add("trainer-1", tmp_path / "trainer-1.log")
    with (tmp_path / "trainer-1.log").open("ab") as file:
        file.write(b"first\nsec")
        file.flush()
        ends = time.monotonic() + 10
        while not seen and time.monotonic() < ends:
            time.sleep(0.01)
        assert texts(seen) == ["trainer-1 | first"]
        file.write(b"ond\n\nno end of line")
    tail.close()
    assert texts(seen) == ["trainer-1 | first", "trainer-1 | second", "trainer-1 | no end of line"]
    tail.close()


def test_what_an_earlier_start_wrote_is_not_shown_again(tmp_path: Path) -> None:
    path = tmp_path / "engine-0.log"
    path.write_bytes(b"of the earlier start\n")
    seen: list[Event] = []
    tail = LogTail(seen.append)
    tail.add("engine-0", path)
    with path.open("ab") as file:
        file.write(b"of this start\n")
    tail.close()
    assert texts(seen) == ["engine-0 | of this start"]


def test_a_progress_bar_shows_its_last_state_and_odd_bytes_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "log"
    seen: list[Event] = []
    tail = LogTail(seen.append)
    tail.add("trainer-0", path)
    path.write_bytes(b"10%\r50%\r100%\r\n\xff\xfe\n")
    tail.close()
    assert texts(seen) == ["trainer-0 | 100%", "trainer-0 | \N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}"]


def test_a_flood_is_cut_where_it_is_shown_and_whole_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_SHOWN_AT_ONCE", 3)
    monkeypatch.setattr(logs, "_EVERY", 60.0)
    path = tmp_path / "log"
    seen: list[Event] = []
    tail = LogTail(seen.append)
    tail.add("trainer-0", path)
    path.write_text("".join(f"line {number}\n" for number in range(10)))
    tail.close()
    assert texts(seen)[-1] == f"trainer-0 | (7 more lines in {path})"
    assert len(seen) == 4


def test_the_last_lines_of_a_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert last_lines(path) == []
    path.write_text("".join(f"line {number}\n\n" for number in range(100_000)))
    assert last_lines(path, 2) == ["line 99998", "line 99999"]
