"""Turns at a saver's memory (`tidemill.residency.turns`)."""

import math
import threading
import time

import pytest

from tidemill.errors import ResidencyError
from tidemill.residency.turns import Turns


@pytest.mark.parametrize("seconds", [10, 1e12, math.inf])
def test_a_turn_waits_for_the_one_before_it(seconds: float) -> None:
    turns, order = Turns(seconds=seconds), []
    taken = threading.Event()

    def first() -> None:
        with turns.take("capture"):
            taken.set()
            time.sleep(0.1)
            order.append("capture")

    thread = threading.Thread(target=first)
    thread.start()
    taken.wait(5)
    with turns.take("restore"):
        order.append("restore")
    thread.join(5)
    assert order == ["capture", "restore"]


def test_a_turn_that_never_ends_is_not_waited_for_longer_than_said() -> None:
    turns = Turns(seconds=0.05)
    with turns.take("capture"), pytest.raises(ResidencyError, match="cannot load: 'capture' is under way for 50 ms"):
        turns.take("load").__enter__()
    with turns.take("load"):
        pass


def test_another_thread_waits_until_what_is_half_done_has_ended() -> None:
    turns, order = Turns(seconds=60), []

    def second() -> None:
        with turns.take("capture"):
            order.append("capture")

    thread = threading.Thread(target=second)
    with turns.take("leave", in_pieces=True):
        thread.start()
        time.sleep(0.05)
        order.append("leave")
    thread.join(5)
    assert order == ["leave", "capture"]


def test_what_is_half_done_is_not_waited_for_by_who_began_it() -> None:
    turns = Turns(seconds=60)
    with turns.take("leave", in_pieces=True), pytest.raises(ResidencyError, match="'leave' is half done"):
        turns.take("restore").__enter__()


def test_a_turn_admits_what_it_says_from_then_on_and_nothing_else() -> None:
    turns = Turns(seconds=0.05)
    with turns.take("capture") as turn:
        with pytest.raises(ResidencyError):
            turns.take("restore").__enter__()
        turns.admit(turn, "restore")
        with turns.take("restore"):
            pass
        with pytest.raises(ResidencyError):
            turns.take("release").__enter__()


def test_a_turn_ends_with_an_exception_too() -> None:
    turns = Turns(seconds=0.05)
    with pytest.raises(KeyError), turns.take("capture"):
        raise KeyError
    with turns.take("capture"):
        pass
