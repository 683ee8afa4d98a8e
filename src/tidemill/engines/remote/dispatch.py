"""Requests of one `generate`, asked of several servers at once, until each has one answer.

A server that fails leaves its requests to the others; answers of it that were not confirmed are asked anew. Meanwhile
somebody looks after each server: whether one that answers is well, and whether one that is out can be had back. Draws
depend on seed and key, so that it does not matter who answers.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tidemill.contracts.engine import Request, Sampling
from tidemill.contracts.events import Emit, Notice, Progress
from tidemill.engines.remote.client import ServerFailed, ServerSilent
from tidemill.engines.remote.dialect import ServerAnswer
from tidemill.engines.remote.replica import Replica
from tidemill.engines.remote.routing import Ring, routed
from tidemill.errors import EngineError, TidemillError
from tidemill.units import format_seconds

__all__ = ["Dispatch", "Watch"]

_LOOK = 0.25  # seconds between two looks of the driver
_STRIKES = 3  # questions in a row that a server may leave unanswered
_LET_GO = 5.0  # seconds for threads whose calls were ended


@dataclass(frozen=True, kw_only=True)
class Watch:
    """`every` seconds a server is looked after; `recovery` seconds at most no server is well.

    A request is asked `tries` times at most.
    """

    every: float
    recovery: float
    tries: int = 4


class Dispatch:
    """Made for one call. `revive` brings a replica back or raises; it is called in a thread of that replica's own."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        at_once: int,
        watch: Watch,
        revive: Callable[[Replica], None],
        emit: Emit,
    ) -> None:
        self._replicas = {replica.name: replica for replica in replicas}
        self._at_once, self._watch, self._revive, self._emit = at_once, watch, revive, emit
        self._ring = Ring(list(self._replicas))
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._queues: dict[str, deque[int]] = {name: deque() for name in self._replicas}
        self._spare: deque[int] = deque()
        self._found: dict[int, ServerAnswer] = {}
        self._unsure: dict[str, set[int]] = {name: set() for name in self._replicas}
        self._tries: Counter[int] = Counter()
        self._busy: Counter[str] = Counter()
        self._notices: list[Notice] = []
        self._fatal: EngineError | None = None
        self._over = False
        self.reissued = 0

    def run(self, requests: Sequence[Request], sampling: Sampling) -> list[ServerAnswer]:
        """An answer for each request, in order. Raises EngineError, naming request and server."""
        self._requests, self._sampling = requests, sampling
        self._share_out()
        try:
            for replica in self._replicas.values():
                self._start(self._look_after, replica)
                self._employ(replica)
            self._wait()
        finally:
            self._end()
        return [self._found[index] for index in range(len(requests))]

    def _share_out(self) -> None:
        serving = [name for name, replica in self._replicas.items() if replica.serving]
        if not serving:
            self._spare.extend(range(len(self._requests)))
            return
        shares = routed(self._ring, [request.token_ids for request in self._requests], serving)
        for name, share in shares.items():
            self._queues[name].extend(share)

    def _start(self, work: Callable[[Replica], None], replica: Replica) -> None:
        thread = threading.Thread(target=self._guarded, args=(work, replica), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _guarded(self, work: Callable[[Replica], None], replica: Replica) -> None:
        try:
            work(replica)
        except Exception as error:  # nothing may vanish with its thread
            self._stop(error if isinstance(error, EngineError) else _unexpected(replica, error))

    def _employ(self, replica: Replica) -> None:
        for _ in range(min(self._at_once, len(self._requests)) if replica.serving else 0):
            self._start(self._serve, replica)

    # One thread of several that ask a server

    def _serve(self, replica: Replica) -> None:
        while (index := self._next(replica)) is not None:
            try:
                answer = replica.ask(self._requests[index], self._sampling)
            except ServerFailed as error:
                self._lose(replica, str(error), [index])
                return
            with self._changed:
                self._busy[replica.name] -= 1
                self._found[index] = answer
                # What names the version of its weights itself needs no later look at the server.
                if not answer.stamp:
                    self._unsure[replica.name].add(index)
                if not replica.serving:
                    self._give_up_unsure(replica)
                self._changed.notify_all()

    def _next(self, replica: Replica) -> int | None:
        """The next request for it: its own, one that was left over, or the last of who has most. None at the end."""
        with self._changed:
            while not self._over and replica.serving:
                index = self._choose(replica.name)
                if index is not None:
                    self._tries[index] += 1
                    self._busy[replica.name] += 1
                    return index
                self._changed.wait(_LOOK)
        return None

    def _choose(self, name: str) -> int | None:
        own = self._queues[name] or self._spare
        if own:
            return own.popleft()
        # What its own server will ask at once is left to it: that is where the prompt is known.
        waiting = [queue for other, queue in self._queues.items() if self._busy[other] >= self._at_once]
        longest = max(waiting, key=len, default=None)
        return longest.pop() if longest else None

    def _lose(self, replica: Replica, why: str, lost: Sequence[int]) -> None:
        """The replica is out; requests that it was asked go to others."""
        with self._changed:
            if self._over:
                return
            first = replica.serving
            replica.serving = False
            self._busy[replica.name] = 0
            self._leave_over(lost, why)
            self._give_up_unsure(replica)
            if first:
                self._spare.extend(self._queues[replica.name])
                self._queues[replica.name].clear()
                self._say(f"{replica.name} is out: {why}; its requests go to others")
            self._changed.notify_all()
        if first:
            replica.out(why)

    def _give_up_unsure(self, replica: Replica) -> None:
        unsure, self._unsure[replica.name] = self._unsure[replica.name], set()
        for index in unsure:
            del self._found[index]
        self._leave_over(sorted(unsure), f"{replica.name} failed before its answers were confirmed")

    def _leave_over(self, lost: Sequence[int], why: str) -> None:
        self.reissued += len(lost)
        self._spare.extend(lost)
        for index in lost:
            if self._tries[index] >= self._watch.tries and self._fatal is None:
                key = self._requests[index].key
                self._fatal = EngineError(
                    f"cannot answer request {key}: {self._tries[index]} tries failed, last: {why}"
                )

    # One thread that looks after a server

    def _look_after(self, replica: Replica) -> None:
        strikes = 0
        while self._rest():
            if not replica.serving:
                strikes = 0
                self._try_revive(replica)
                continue
            try:
                self._confirm(replica)
                strikes = 0
            except EngineError as error:
                strikes += 1
                if strikes >= _STRIKES or not replica.process.alive() or not isinstance(error, ServerSilent):
                    self._lose(replica, str(error), [])

    def _rest(self) -> bool:
        """Wait until the next look; False when there is none."""
        ends = time.monotonic() + self._watch.every
        with self._changed:
            while not self._over and (left := ends - time.monotonic()) > 0:
                self._changed.wait(left)
            return not self._over

    def _confirm(self, replica: Replica) -> None:
        """Answers that came before it was asked how it stands are what they seem."""
        with self._changed:
            sure = set(self._unsure[replica.name])
        replica.confirm()
        with self._changed:
            self._unsure[replica.name] -= sure
            self._changed.notify_all()

    def _try_revive(self, replica: Replica) -> None:
        try:
            self._revive(replica)
        except TidemillError as error:
            replica.why = str(error)
            return
        with self._changed:
            self._say(f"{replica.name} is back, with the present weights")
            self._changed.notify_all()
        self._employ(replica)

    # The driver's thread

    def _wait(self) -> None:
        told, well = -1, time.monotonic()
        while True:
            with self._changed:
                if self._fatal is not None:
                    raise self._fatal
                done = len(self._found)
                complete = done == len(self._requests)
                unsure = [self._replicas[name] for name, some in self._unsure.items() if some] if complete else []
                notices, self._notices = self._notices, []
                if not complete:
                    self._changed.wait(_LOOK)
            for notice in notices:
                self._emit(notice)
            if done != told and self._requests:
                self._emit(Progress(what="answers", done=done, total=len(self._requests)))
                told = done
            if complete and not unsure:
                return
            for replica in unsure:
                self._confirm_or_lose(replica)
            well = time.monotonic() if any(r.serving for r in self._replicas.values()) else well
            if time.monotonic() - well > self._watch.recovery:
                raise EngineError(self._nobody())

    def _confirm_or_lose(self, replica: Replica) -> None:
        try:
            self._confirm(replica)
        except EngineError as error:
            self._lose(replica, str(error), [])

    def _nobody(self) -> str:
        said = "; ".join(f"{replica.name}: {replica.why}" for replica in self._replicas.values())
        return (
            f"cannot generate: no server of the engine has been well for {format_seconds(self._watch.recovery)} "
            f"({len(self._found)} of {len(self._requests)} requests are answered): {said}"
        )

    def _end(self) -> None:
        with self._changed:
            self._over = True
            complete = len(self._found) == len(self._requests)
            notices, self._notices = self._notices, []
            self._changed.notify_all()
        for replica in self._replicas.values():
            # The servers let go of what nobody waits for any more, and so does who was bringing one back.
            if not (complete and replica.serving):
                replica.interrupt()
        ends = time.monotonic() + _LET_GO
        for thread in self._threads:
            thread.join(max(0.0, ends - time.monotonic()))
        for notice in notices:
            self._emit(notice)

    def _stop(self, error: EngineError) -> None:
        with self._changed:
            if not self._over:
                self._fatal = self._fatal or error
            self._changed.notify_all()

    def _say(self, text: str) -> None:
        self._notices.append(Notice(text=text, level="warning"))


def _unexpected(replica: Replica, error: Exception) -> EngineError:
    failure = EngineError(f"{replica.name} could not be asked: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
