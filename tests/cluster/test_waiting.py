"""tidemill.cluster.waiting: until one of several calls is done."""

import time

from tidemill.cluster.waiting import wait_for_one


class Later:
    """Done `seconds` after it was made."""

    def __init__(self, seconds: float) -> None:
        self.at = time.monotonic() + seconds

    def done(self) -> bool:
        return time.monotonic() >= self.at

    def result(self, deadline: float) -> None:
        raise AssertionError("nobody asked for it")


def test_it_returns_when_the_first_is_done() -> None:
    began = time.monotonic()
    wait_for_one([Later(30.0), Later(0.05)], 20.0)
    assert 0.05 <= time.monotonic() - began < 1.0


def test_it_returns_at_once_when_one_was_done_before() -> None:
    began = time.monotonic()
    wait_for_one([Later(30.0), Later(0.0)], 20.0)
    assert time.monotonic() - began < 0.05


def test_it_returns_when_the_time_is_up() -> None:
    began = time.monotonic()
    wait_for_one([Later(30.0)], 0.05)
    assert 0.05 <= time.monotonic() - began < 1.0
