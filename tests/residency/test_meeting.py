"""The store at which ranks meet (`tidemill.residency.meeting`)."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tidemill.contracts.workers import Place
from tidemill.errors import ResidencyError
from tidemill.residency.groups import open_rendezvous
from tidemill.residency.meeting import MeetingPoint


def ranks(count: int, deadline: float) -> list[MeetingPoint]:
    address = open_rendezvous("127.0.0.1")
    places = [Place(rank=rank, ranks=count, rendezvous=address) for rank in range(count)]
    return [MeetingPoint(place=place, prefix="", deadline=deadline) for place in places]


def test_nobody_goes_on_before_the_last_has_come() -> None:
    first, second, third = ranks(3, 10)
    with ThreadPoolExecutor() as pool:
        early = [pool.submit(rank.meet, "a", "begin") for rank in (first, second)]
        with pytest.raises(TimeoutError):
            early[0].result(0.2)
        third.meet("a", "begin")
        assert [answer.result(5) for answer in early] == [None, None]


def test_those_who_never_came_are_named_and_those_who_gave_up_are_not() -> None:
    first, second, _ = ranks(3, 0.3)
    for rank in (first, second):
        with pytest.raises(ResidencyError, match="cannot begin: rank 2 of 3 did not come|ranks 1, 2 of 3 did not come"):
            rank.meet("a", "begin")
    with pytest.raises(ResidencyError, match="rank 2 of 3 did not come"):
        first.meet("a", "begin")


def test_a_rank_that_gave_up_is_not_met_until_it_comes_again() -> None:
    first, second = ranks(2, 0.3)
    with pytest.raises(ResidencyError, match="rank 1 of 2"):
        first.meet("a", "begin")
    with pytest.raises(ResidencyError, match="rank 0 of 2"):
        second.meet("a", "begin")
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(rank.meet, "a", "begin") for rank in (first, second)]
        assert [answer.result(5) for answer in answers] == [None, None]


def test_keys_of_different_meetings_are_apart_and_a_rank_alone_meets_itself() -> None:
    (alone,) = [MeetingPoint(place=Place(), prefix="", deadline=1)]
    alone.meet("a", "begin")
    alone.meet("b", "begin")
    alone.store("x/").set("key", "1")
    alone.store("y/").set("key", "2")
    assert alone.store("x/").get("key") == b"1"
