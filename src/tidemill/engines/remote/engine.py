"""An engine whose replicas are servers: token ids go there, token ids and log-probs come back.

Promises: an answer comes from the version that the engine reports: weights are staged once, checked, loaded by every
server, and each proves that it answers from them before it serves; a server that fails is out until it has done so
again. Does not: tokenize, decode or sample here, and generate for two threads at once.
"""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from tidemill.contracts.engine import Completion, Request, Sampling
from tidemill.contracts.events import Emit, Metrics, Notice
from tidemill.contracts.footprint import Part
from tidemill.contracts.residency import Moved
from tidemill.contracts.state import PolicyVersion
from tidemill.contracts.weights import EVERY_WEIGHT, Sample
from tidemill.engines.common.answers import Answer, completions
from tidemill.engines.common.held_version import HeldVersion
from tidemill.engines.common.presence import check_resident
from tidemill.engines.common.requests import Limits, check_requests, check_sampling
from tidemill.engines.remote.client import ServerFailed
from tidemill.engines.remote.dialect import Dialect
from tidemill.engines.remote.dispatch import Dispatch, Watch
from tidemill.engines.remote.probe import NoReference, Probe
from tidemill.engines.remote.replica import Replica
from tidemill.engines.remote.staged_weights import StagedWeights
from tidemill.errors import EngineError, ResidencyError, TidemillError, WeightSyncError
from tidemill.residency.gate import TenantGate

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Probing", "ServerEngine"]

_PARTS = Part.WEIGHTS | Part.KV_CACHE


class Probing:
    """Which of the syncs are followed by a comparison: every `every`-th, from the first on; 0 is none."""

    def __init__(self, probe: Probe | NoReference, *, every: int) -> None:
        self._probe, self._every, self._syncs = probe, every, -1

    def next_sync(self) -> None:
        """Another version is being handed over."""
        self._syncs += 1

    @property
    def probe(self) -> Probe | NoReference:
        """For the present version, and whoever comes back to it."""
        return self._probe if self._every and self._syncs % self._every == 0 else NoReference()


class ServerEngine:
    """Implements `RolloutEngine` over `replicas`. Starts asleep and without a version.

    `cache_bytes` is None for servers on GPUs of their own: they count nothing here and never sleep. Else it is what the
    cache of a server takes of the GPU that it shares with the trainer, beside the weights.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        dialect: Dialect,
        staged: StagedWeights,
        pretrained: Callable[[], "Iterable[tuple[str, Tensor]]"],
        probing: Probing,
        tokenizer: Any,
        limits: Limits,
        dtype: str,
        watch: Watch,
        cache_bytes: int | None,
        emit: Emit,
    ) -> None:
        self._replicas = list(replicas)
        self._dialect, self._staged, self._pretrained, self._probing = dialect, staged, pretrained, probing
        self._tokenizer, self._limits, self._dtype, self._watch = tokenizer, limits, dtype, watch
        self._cache_bytes, self._emit = cache_bytes, emit
        self._gate = TenantGate(self.name)
        self._held = HeldVersion()
        # What takes no bytes here is there all the time.
        self._resident = _PARTS if cache_bytes is None else Part.NONE
        self._stamp = ""
        self._users: dict[str, object] = {}

    @property
    def name(self) -> str:
        """`engine`."""
        return "engine"

    @property
    def gate(self) -> TenantGate:
        """Opened by Residency for the length of a lease."""
        return self._gate

    @property
    def dtype(self) -> str:
        """What weights are cast to, `float32` or `bfloat16`."""
        return self._dtype

    # Memory

    def resident(self) -> Part:
        """Weights and cache: whichever was woken."""
        return self._resident

    def footprint(self, part: Part) -> int:
        """Bytes on the GPU that a server shares with the trainer; none on one of its own."""
        if self._cache_bytes is None:
            return 0
        weights = self._staged.nbytes if Part.WEIGHTS in part else 0
        return weights + (self._cache_bytes if Part.KV_CACHE in part else 0)

    def host_bytes(self) -> int:
        """The staged weights, from which a server that comes back is served."""
        return self._staged.held_bytes

    def wake_up(self, part: Part) -> Moved:
        """Let the servers take memory. When one cannot, all sleep, and the version is forgotten."""
        new = part & _PARTS & ~self._resident
        if new:
            try:
                self._each(lambda replica: replica.wake_up(new))
            except TidemillError as error:
                self._put_back()
                raise ResidencyError(f"cannot wake engine ({new.words()}): {error}") from error
        self._resident |= new
        return Moved()

    def sleep(self) -> Moved:
        """Servers that share the trainer's GPU give their memory back and forget their weights; others go on.

        Refused while an answer is generated.
        """
        me = object()
        try:
            if not self._alone(me):
                raise ResidencyError("cannot put engine to sleep: it is generating in another thread; wait for its end")
            if self._cache_bytes is not None and self._resident:
                self._held.forget()
                self._each(lambda replica: replica.sleep())
                self._resident = Part.NONE
            return Moved()
        except EngineError as error:
            raise ResidencyError(f"cannot put engine to sleep: {error}") from error
        finally:
            if self._users and self._users["present"] is me:
                del self._users["present"]

    def _put_back(self) -> None:
        self._held.forget()
        self._resident = Part.NONE
        for replica in self._replicas:
            try:
                replica.sleep()
            except TidemillError as error:
                self._emit(Notice(text=f"{replica.name} could not be put to sleep again: {error}", level="warning"))

    def _alone(self, user: object) -> bool:
        """Whether `user` has the engine for itself from now on; others are refused, not kept waiting.

        Called in the `try` at whose end it leaves, which calls nothing: Python delivers signals at calls, and one that
        raises before the `try` or within its end would leave the engine taken for good.
        """
        return self._users.setdefault("present", user) is user

    def _each(self, work: Callable[[Replica], None]) -> None:
        """With every server at once; raises the first failure when all have ended."""
        with ThreadPoolExecutor(len(self._replicas), "server") as pool:
            asked = [pool.submit(work, replica) for replica in self._replicas]
        for each in asked:
            each.result()

    # Weights

    @property
    def version(self) -> PolicyVersion | None:
        """Of all the servers that may serve; None from `begin_update` or `sleep` until `publish`."""
        return self._held.version

    def begin_update(self) -> None:
        """Close generation and forget the version. What servers were still asked ends."""
        self._need(Part.WEIGHTS, "begin_update")
        self._held.begin()
        for replica in self._replicas:
            replica.forget()
            replica.interrupt()
        self._staged.begin()

    def load_weights(self, tensors: "Iterable[tuple[str, Tensor]]") -> None:
        """Stage weights for the servers: all at once, or some in each of several calls."""
        self._need(Part.WEIGHTS, "load_weights")
        with self._held.loading():
            self._staged.load(tensors)

    def weight_checksums(self, sample: Sample = EVERY_WEIGHT) -> Mapping[str, int]:
        """Checksum of each weight of `sample` where servers read it. What they make of it, their probe tells."""
        self._need(Part.WEIGHTS, "weight_checksums")
        return self._staged.checksums(sample)

    def publish(self, version: PolicyVersion) -> None:
        """Let every server load what is staged, and prove it where it has its cache; then open generation.

        A server that is gone is left out, and gets the weights when it is back. Raises WeightSyncError when none is
        there, and when one refuses the weights or answers from others.
        """
        self._need(Part.WEIGHTS, "publish")
        self._held.check(version, self._staged.missing())
        self._staged.flush()
        self._probing.next_sync()
        self._stamp = f"tidemill-{version.attempt}-{version.step}-{secrets.token_hex(4)}"
        self._each(self._hand_to)
        if all(replica.lost for replica in self._replicas):
            reasons = "; ".join(f"{replica.name}: {replica.why}" for replica in self._replicas)
            raise WeightSyncError(f"no server of the engine could take version {version}: {reasons}")
        if Part.KV_CACHE in self._resident:
            self._prove(version)
        self._held.take(version)

    def _hand_to(self, replica: Replica) -> None:
        try:
            replica.take(self._staged, self._stamp)
        except ServerFailed as error:
            self._leave_out(replica, error)

    def _leave_out(self, replica: Replica, error: ServerFailed) -> None:
        replica.out(str(error))
        self._emit(Notice(text=f"{replica.name} is out: {error}", level="warning"))

    def _prove(self, version: PolicyVersion) -> None:
        # In this thread, one after the other: the reference is one model.
        for replica in (replica for replica in self._replicas if not replica.lost):
            try:
                replica.prove(self._probing.probe, self._staged, str(version))
            except ServerFailed as error:
                self._leave_out(replica, error)

    def load_pretrained(self, version: PolicyVersion) -> None:
        """Stage the model folder's own weights as `version`: for use without a trainer."""
        self.begin_update()
        self.load_weights(self._pretrained())
        self.publish(version)

    # Generation

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Completions in the order of the requests. Raises EngineError, naming request and server.

        Servers that fail meanwhile are left out, and their requests asked of others (`engine/reissued`).
        """
        self._need(_PARTS, "generate")
        version = self._held.known()
        check_sampling(sampling, self._limits)
        self._dialect.check_sampling(sampling)
        check_requests(requests, sampling, self._limits)
        me = object()
        try:
            if not self._alone(me):
                raise EngineError("cannot generate: the engine is busy in another thread; use one thread at a time")
            answers = self._answer(requests, sampling, version) if requests else []
        finally:
            if self._users and self._users["present"] is me:
                del self._users["present"]
        return completions(answers, version, self._tokenizer)

    def _answer(self, requests: Sequence[Request], sampling: Sampling, version: PolicyVersion) -> list[Answer]:
        try:
            self._prove(version)
        except WeightSyncError:
            self._held.forget()
            raise
        dispatch = Dispatch(
            self._replicas,
            at_once=self._limits.max_batch,
            watch=self._watch,
            revive=lambda replica: replica.renew(self._staged, self._stamp, self._probing.probe, str(version)),
            emit=self._emit,
        )
        try:
            found = dispatch.run(requests, sampling)
        finally:
            if dispatch.reissued:
                self._emit(Metrics(values={"engine/reissued": float(dispatch.reissued)}))
        return [
            Answer(token_ids=list(one.token_ids), logprobs=list(one.logprobs), stop_reason=one.stop_reason)
            for one in found
        ]

    def _need(self, part: Part, doing: str) -> None:
        self._gate.check(part, doing)
        check_resident(self._resident, part, doing)

    def close(self) -> None:
        """End the servers that are ours, and remove what was staged for all."""
        for replica in self._replicas:
            replica.close()
        self._staged.close()
