"""The store at which ranks meet: outside every process group, so that it outlives them all."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from tidemill.contracts.workers import Place
from tidemill.errors import ClusterError, RankMissingError, ResidencyError

__all__ = ["MeetingPoint"]

# What a rank writes when it comes, and when it stops waiting.
_HERE, _GONE = "here", "gone"


class MeetingPoint:
    """One rank's connection to the store. No wait in it is longer than `deadline` seconds; keys begin with `prefix`."""

    def __init__(self, *, place: Place, prefix: str, deadline: float) -> None:
        self._place = place
        self._deadline = deadline
        self._store = PrefixStore(prefix, _connect(place, deadline))

    def store(self, prefix: str) -> Any:
        """The part of the store whose keys begin with `prefix`: a second world on the same keys would hang."""
        return PrefixStore(prefix, self._store)

    def meet(self, key: str, doing: str) -> None:
        """Return when every rank has called this with the same key. Raises RankMissingError naming those who did not.

        A rank that gives up says so, so that all of them may try the same key again.
        """
        mine = f"{key}/{self._place.rank}"
        ends = time.monotonic() + self._deadline
        self._ask(doing, lambda: self._store.set(mine, _HERE))
        waiting, pause = list(range(self._place.ranks)), 0.0005
        while waiting := [rank for rank in waiting if self._mark(key, rank, doing) != _HERE]:
            if time.monotonic() > ends:
                self._ask(doing, lambda: self._store.set(mine, _GONE))
                never = [rank for rank in waiting if not self._mark(key, rank, doing)]
                raise RankMissingError(
                    f"cannot {doing}: {_ranks(never or waiting)} of {self._place.ranks} did not come within "
                    f"{self._deadline:g} s; each is dead or busy with something else, and its log says with what"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.02)

    def _mark(self, key: str, rank: int, doing: str) -> str:
        mark = f"{key}/{rank}"
        if not self._ask(doing, lambda: self._store.check([mark])):
            return ""
        return str(self._ask(doing, lambda: self._store.get(mark)).decode())

    def _ask(self, doing: str, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except RuntimeError as error:
            raise ResidencyError(
                f"cannot {doing}: the store at {self._place.rendezvous} does not answer rank {self._place.rank} "
                f"({error}); the process of rank 0, which keeps it, has probably died"
            ) from error


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _connect(place: Place, deadline: float) -> Store:
    if not place.rendezvous and place.ranks == 1:
        return HashStore()
    host, _, port = place.rendezvous.rpartition(":")
    if not host or not port.isdecimal():
        raise ClusterError(
            f"cannot join rank {place.rank} of {place.ranks}: its rendezvous is {place.rendezvous!r} and must be "
            "`host:port` of the store that rank 0's process started"
        )
    try:
        return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=deadline))
    except RuntimeError as error:
        raise ClusterError(
            f"cannot join rank {place.rank} of {place.ranks}: no store answers at {place.rendezvous} within "
            f"{deadline:g} s ({error}); check that rank 0's process lives and that its port can be reached from here"
        ) from error
