"""The driver's stand-in for an engine whose replicas live in workers.

Promises: all replicas hold one version, or the version is unknown and nothing is generated; a request's answer does not
depend on which replica was free. Does not: generate for two threads at once.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tidemill.cluster.driver_parcels import parcels
from tidemill.cluster.replacing import Replacing
from tidemill.cluster.spreading import cut, refuse_equal_keys
from tidemill.cluster.tenant_proxy import Deadlines, TenantProxy
from tidemill.contracts.engine import Completion, Request, Sampling
from tidemill.contracts.events import Emit, Progress
from tidemill.contracts.footprint import Part
from tidemill.contracts.residency import Moved
from tidemill.contracts.state import PolicyVersion
from tidemill.contracts.weights import EVERY_WEIGHT, Sample
from tidemill.contracts.workers import Pending, WorkerGroup
from tidemill.errors import EngineError, ResidencyError, WeightSyncError, WorkerDiedError, WorkerError
from tidemill.units import format_seconds
from tidemill.weights.comparing import compare_replicas

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["EngineProxy"]

# Seconds between two questions how far the replicas are.
_LOOK = 0.5


@dataclass(frozen=True, kw_only=True)
class _Share:
    """A chunk that a replica is answering, until `ends` on the monotonic clock at the latest."""

    pending: Pending
    chunk: list[int]
    ends: float


class EngineProxy(TenantProxy):
    """Implements `RolloutEngine` over workers whose services are `EngineService`s.

    `max_batch` is the replicas' own: chunks are no larger, so that a free replica finds work. `restarts` is how often a
    replica that died is replaced; others then answer for it, and the answers are what they would have been.
    """

    def __init__(
        self, group: WorkerGroup, *, deadlines: Deadlines, emit: Emit, max_batch: int, restarts: int = 0
    ) -> None:
        super().__init__(group, deadlines=deadlines)
        self._replacing = Replacing(group, limit=restarts, emit=emit)
        self._emit = emit
        self._max_batch = max_batch
        self._dtype: str = group.call("dtype", **deadlines.of("dtype"))[0]
        self._version: PolicyVersion | None = None
        self._newest: PolicyVersion | None = None
        self._users: dict[str, object] = {}
        # By replica. What an interruption leaves here is still being answered.
        self._running: dict[int, _Share] = {}

    @property
    def dtype(self) -> str:
        """What weights are cast to, `float32` or `bfloat16`."""
        return self._dtype

    # Memory

    def wake_up(self, part: Part) -> Moved:
        """See TenantProxy. When it fails the version is forgotten: replicas were put back by a sleep."""
        self._settle()
        version, self._version = self._version, None
        self._replace_dead(look=True)
        moved = super().wake_up(part)
        self._version = version if self._replacing.serving else None
        return moved

    def sleep(self) -> Moved:
        """See TenantProxy. The version is forgotten with the weights. Refused while another thread generates."""
        me = object()
        try:
            if not self._alone(me):
                raise ResidencyError(
                    f"cannot put {self.name} to sleep: it is generating in another thread; wait for its end"
                )
            self._wait_for_running()
            self._version = None
            self._replace_dead(look=True)
            return super().sleep()
        finally:
            if self._users and self._users["present"] is me:
                del self._users["present"]

    def _replace_dead(self, *, look: bool) -> None:
        """Others in the place of replicas that died, with the parts awake that their siblings have."""
        if look:
            self._replacing.look(self._deadlines.control)
        awake = self.resident()
        replaced = self._replacing.replace(self._deadlines.work)
        self._shift_some({replica: ("wake_up", awake & self._has(replica)) for replica in replaced})

    def _alone(self, user: object) -> bool:
        """Whether `user` has the engine for itself from now on; others are refused, not kept waiting.

        Called in the `try` at whose end it leaves, which calls nothing: Python delivers signals at calls, and one that
        raises before the `try` or within its end would leave the engine taken for good.
        """
        return self._users.setdefault("present", user) is user

    # Weights

    @property
    def version(self) -> PolicyVersion | None:
        """Of all replicas; None from `begin_update` or `sleep` until `publish`, and after any failure between."""
        return self._version

    def begin_update(self) -> None:
        """Close generation and forget the version, on all replicas."""
        self.end_each("begin_update", self.start_update())

    def start_update(self) -> list[Pending]:
        """As `begin_update`, and go on: `end_each` tells whether all have done it."""
        self._refuse_unless_awake(Part.WEIGHTS, "begin_update")
        self._version = None
        self._settle()
        return self.start_each("begin_update", [()] * len(self.group.names))

    def load_weights(self, tensors: "Iterable[tuple[str, Tensor]]") -> None:
        """Copy weights into every replica, through the driver's memory. A sync of a whole trainer goes past it."""
        self._refuse_unless_awake(Part.WEIGHTS, "load_weights")
        for parcel in parcels(tensors, self._dtype):
            self._on_all("load_parcel", parcel)

    def weight_checksums(self, sample: Sample = EVERY_WEIGHT) -> Mapping[str, int]:
        """Those that all replicas have. Raises WeightSyncError, naming replica and weight, when one differs."""
        held = self.replica_checksums(sample)
        compare_replicas(held)
        return next(iter(held.values()))

    def replica_checksums(self, sample: Sample = EVERY_WEIGHT) -> Mapping[str, Mapping[str, int]]:
        """Checksum of each weight as it lies there, by the replica's name."""
        return dict(zip(self.group.names, self.end_each("weight_checksums", self.start_checksums(sample)), strict=True))

    def start_checksums(self, sample: Sample = EVERY_WEIGHT) -> list[Pending]:
        """Let all compute their checksums, and go on: `end_each` has them, in the order of the replicas."""
        self._refuse_unless_awake(Part.WEIGHTS, "weight_checksums")
        self._settle()
        return self.start_each("weight_checksums", [(sample,)] * len(self.group.names))

    def publish(self, version: PolicyVersion) -> None:
        """Take on `version` and open generation, on all replicas: when one refuses, the version is unknown."""
        self._refuse_unless_awake(Part.WEIGHTS, "publish")
        self._refuse_older(version)
        self._version = None
        self._on_all("publish", version)
        self._replacing.filled()
        self._version = self._newest = version

    def load_pretrained(self, version: PolicyVersion) -> None:
        """Let every replica load the model folder's own weights as `version`."""
        self._refuse_unless_awake(Part.WEIGHTS, "load_pretrained")
        self._version = None
        self._refuse_older(version)
        self._on_all("load_pretrained", version)
        self._replacing.filled()
        self._version = self._newest = version

    def _refuse_older(self, version: PolicyVersion) -> None:
        if self._newest is not None and version < self._newest:
            self._version = None
            raise WeightSyncError(
                f"cannot publish version {version}: {self.name} has held {self._newest} before and versions never go "
                "back; a restarted run must raise the attempt"
            )

    def _on_all(self, method: str, *arguments: Any) -> list[Any]:
        self._settle()
        return self._use_all(method, *arguments)

    # Generation

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Completions in the order of the requests. Each chunk of them may take as long as work may.

        Raises WorkerError, naming the replica, when one dies and nobody may take its place.
        """
        self._refuse_unless_awake(Part.WEIGHTS | Part.KV_CACHE, "generate")
        if self._version is None:
            raise WeightSyncError(
                f"cannot generate: the version of {self.name}'s weights is unknown, because it slept or an update did "
                "not end; sync the weights first"
            )
        refuse_equal_keys(requests)
        me = object()
        try:
            if not self._alone(me):
                raise EngineError(f"cannot generate: {self.name} is busy in another thread; use one thread at a time")
            self._wait_for_running()
            return self._answer(requests, sampling)
        finally:
            if self._users and self._users["present"] is me:
                del self._users["present"]

    def _answer(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        waiting = deque(cut(requests, replicas=len(self.group.names), max_batch=self._max_batch))
        found: dict[int, Completion] = {}
        while waiting or self._running:
            for replica in self._replacing.serving:
                if waiting and replica not in self._running:
                    self._hand_out(replica, waiting, requests, sampling)
            self.group.wait([share.pending for share in self._running.values()], _LOOK)
            done = [replica for replica, share in self._running.items() if share.pending.done()]
            for replica in done:
                self._take(replica, found, waiting)
            if requests:
                far = len(found) + (0 if done else self._answered())
                self._emit(Progress(what="answers", done=far, total=len(requests)))
            self._end_silent(waiting)
        self._replace_dead(look=False)
        return [found[index] for index in range(len(requests))]

    def _hand_out(
        self, replica: int, waiting: deque[list[int]], requests: Sequence[Request], sampling: Sampling
    ) -> None:
        chunk = waiting.popleft()
        try:
            pending = self.start(replica, "generate", [requests[index] for index in chunk], sampling)
        except WorkerDiedError as error:
            self._leave_over(replica, chunk, waiting, error)
        else:
            ends = time.monotonic() + self._deadlines.work
            self._running[replica] = _Share(pending=pending, chunk=chunk, ends=ends)

    def _take(self, replica: int, found: dict[int, Completion], waiting: deque[list[int]]) -> None:
        share = self._running.pop(replica)
        try:
            found.update(zip(share.chunk, share.pending.result(0.0).value, strict=True))
        except WorkerDiedError as error:
            self._leave_over(replica, share.chunk, waiting, error)

    def _leave_over(self, replica: int, chunk: list[int], waiting: deque[list[int]], error: WorkerError) -> None:
        """As it was cut, and first: what meets in a chunk decides about the last bits of its answers."""
        self._replacing.lose(replica, error, len(chunk))
        waiting.appendleft(chunk)

    def _answered(self) -> int:
        """How many answers of the chunks under way are done. Who died while asked is seen when its chunk is taken."""
        total = 0
        for replica, share in self._running.items():
            with contextlib.suppress(WorkerDiedError):
                answered = self.group.control(replica, "answered", deadline=self._deadlines.control)
                total += min(len(share.chunk), answered)
        return total

    def _end_silent(self, waiting: deque[list[int]]) -> None:
        """Replicas that have had their time are lost with what they were asked; without others all are ended."""
        late = [replica for replica, share in self._running.items() if time.monotonic() > share.ends]
        for replica in late:
            error = WorkerError(
                f"{self.group.names[replica]} did not generate within {format_seconds(self._deadlines.work)}; "
                f"{self.name}'s workers were ended; raise cluster.deadline if that is normal here"
            )
            try:
                self._leave_over(replica, self._running.pop(replica).chunk, waiting, error)
            except WorkerError:
                self.group.close()
                raise

    def _settle(self) -> None:
        """Let end what an interrupted or failed generation left under way. Another thread's is left alone."""
        if not self._users:
            self._wait_for_running()

    def _wait_for_running(self) -> None:
        while self._running:
            self.group.wait([share.pending for share in self._running.values()], _LOOK)
            for replica in [replica for replica, share in self._running.items() if share.pending.done()]:
                # Nobody wants its answers any more, and whoever died is named by the next call.
                del self._running[replica]
            self._end_silent(deque())
