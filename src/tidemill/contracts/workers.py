"""Processes that hold a trainer's ranks or an engine's replicas, and the driver's way of calling them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tidemill.contracts.engine import RolloutEngine
from tidemill.contracts.events import Emit
from tidemill.contracts.trainer import RankTrainer

__all__ = ["BuildEngine", "BuildTrainer", "Pending", "Place", "WorkerGroup"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one worker lives: rank `rank` of `ranks` (an engine: replica `rank` of `ranks`), on `device`.

    `device` is `cpu` or `cuda`: a worker sees no GPU but its own. `rendezvous` is `host:port` of the store at which
    ranks meet to make process groups; it is empty for a rank that is alone, and for engines.
    """

    rank: int = 0
    ranks: int = 1
    device: str = "cpu"
    rendezvous: str = ""


BuildTrainer = Callable[[Place, Emit], RankTrainer]
"""Builds one rank's trainer where it is called; it can be sent to another process."""
BuildEngine = Callable[[Place, Emit], RolloutEngine]
"""As `BuildTrainer`, for one replica of an engine."""


class Pending(Protocol):
    """The answer to a call that goes on behind the caller's back.

    One may stand among the arguments of another call: that worker gets its value, and the driver never holds it.
    """

    def done(self) -> bool:
        """Whether `result` would return, or raise, at once. A worker that died has answered."""
        ...

    def result(self, deadline: float) -> Any:
        """The value. Raises what the worker raised, and WorkerError when it died or `deadline` seconds went by."""
        ...


class WorkerGroup(Protocol):
    """Workers of one role. Each does one call at a time, in order; `control` is answered beside the call under way.

    Values come in the order of the workers. Arguments and values are plain data and numpy arrays, never tensors.
    For messages, `doing` is what a silent worker did not do, `sleep` say, and `setting` the path of its `deadline`.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """`trainer-0`, `trainer-1`, ...: as in messages, logs and fault points."""
        ...

    def call(
        self, method: str, *arguments: Any, deadline: float, doing: str = "", setting: str = "cluster.deadline"
    ) -> list[Any]:
        """Every worker's answer to the same call. They work at the same time.

        Raises what a worker raised, naming it, and WorkerError when one died or did not answer within `deadline`
        seconds. When one fails and others do not end soon after (they wait for it in a collective), all are ended.
        """
        ...

    def call_each(
        self,
        method: str,
        arguments: Sequence[tuple[Any, ...]],
        *,
        deadline: float,
        doing: str = "",
        setting: str = "cluster.deadline",
    ) -> list[Any]:
        """As `call`, with arguments of its own for each worker."""
        ...

    def start(self, worker: int, method: str, *arguments: Any, doing: str = "", passed_on: bool = False) -> Pending:
        """Call one worker and go on. `passed_on`: the answer is for another worker only, and brings no events."""
        ...

    def gather(
        self, pending: Sequence[Pending], *, deadline: float, doing: str, setting: str = "cluster.deadline"
    ) -> list[Any]:
        """The values of one started call of each worker, in order; raises and ends as `call`."""
        ...

    def wait(self, pending: Sequence[Pending], seconds: float) -> None:
        """Return when one of these, of any worker here, is done, or after `seconds` at the latest."""
        ...

    def control(self, worker: int, method: str, *arguments: Any, deadline: float) -> Any:
        """Call one worker beside what it does; for short questions that touch no device."""
        ...

    def notify(self, worker: int, method: str, *arguments: Any) -> None:
        """As `control`, and nobody waits for the answer; a worker that is gone needs to be told nothing."""
        ...

    def restart(self, worker: int, *, deadline: float) -> None:
        """End this worker, if there still is something to end, and build its service in a new one in its place.

        Raises WorkerError when that does not come up within `deadline` seconds, and what its service raises.
        """
        ...

    def close(self) -> None:
        """End the workers. May be called twice."""
        ...
