"""The driver's stand-in for a trainer whose ranks are workers.

Every decision is taken here, once, before a rank is called: whether there is a lease, whether the batch can be used,
which rank computes which row. A refusal by one rank alone would leave the others waiting for it in a collective.

Ranks are equal or useless: when a step, a load or the start of a phase ended differently on some of them, the state
is torn, and all but `load` and the transitions is refused until a load succeeds.
"""

import contextlib
import itertools
import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tidemill.algorithms.deal import deal, deal_rows, put_back
from tidemill.algorithms.token_ids import check_token_ids
from tidemill.cluster.pulled_weights import pulled_weights
from tidemill.cluster.remote_shard import RemoteShard
from tidemill.cluster.tenant_proxy import Deadlines, TenantProxy
from tidemill.cluster.tenant_service import Used
from tidemill.cluster.trainer_service import RANK_RANDOM, REFUSALS, Taken, TrainerDescription
from tidemill.cluster.weight_sender import Carrier
from tidemill.contracts.algorithm import Loss
from tidemill.contracts.batch import Batch, StepReport
from tidemill.contracts.checkpoint import Saved, Snapshot, TensorSpec
from tidemill.contracts.footprint import Part
from tidemill.contracts.residency import Moved
from tidemill.contracts.weights import Sample
from tidemill.contracts.workers import Pending, WorkerGroup
from tidemill.errors import TrainerError, WorkerDiedError, WorkerError
from tidemill.weights.parcel import Parcel

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float32
    from torch import Tensor

__all__ = ["TrainerProxy"]


class TrainerProxy(TenantProxy):
    """Implements `Trainer` over `group`, whose services are `TrainerService`s: one call a step, two a sleep or wake.

    `parks` says whether process groups go in sleep, too; a sleep and a wake are one call each without.
    """

    def __init__(self, group: WorkerGroup, *, deadlines: Deadlines) -> None:
        super().__init__(group, deadlines=deadlines)
        described: list[TrainerDescription] = group.call("describe_trainer", **deadlines.of("describe_trainer"))
        self._described = described[0]
        self._ranks = len(described)
        self._torn = ""
        self.parks = True
        self._parked = False
        self._tokens = itertools.count()
        self._held: set[int] = set()
        self._specs: list[Mapping[str, TensorSpec]] = []
        self._layout: Hashable = None
        self._closing = False
        self._lock = threading.Lock()

    def wake_up(self, part: Part) -> Moved:
        """As Tenant's; then process groups, when every rank has its memory. A failure in those ends the workers."""
        moved = super().wake_up(part)
        if self._parked:
            self._groups("revive", f"wake {self.name}")
            self._parked = False
        return moved

    def sleep(self) -> Moved:
        """As Tenant's; then process groups, when every rank sleeps. A failure in those ends the workers."""
        moved = super().sleep()
        if self.parks and not self._parked:
            self._groups("park", f"put {self.name} to sleep")
            self._parked = True
        return moved

    def _groups(self, method: str, doing: str) -> None:
        try:
            self._use_all(method)
        except BaseException as cause:
            # Some ranks may have the groups and some not: whoever entered a collective now would wait for ever.
            self._group.close()
            reason = f"cannot {doing}: {cause}; its process groups are in no known state"
            self._lose(f"{reason}, so its workers were ended")
            if isinstance(cause, WorkerDiedError) or not isinstance(cause, Exception):
                raise
            raise WorkerError(f"{reason}, so its workers were ended; resume the run from its checkpoint") from cause

    def begin(self, phase: str) -> None:
        """See Trainer."""
        self._refuse_unless_awake(Part.ALL, "begin")
        self._refuse_if_torn("begin a phase")
        with self._changing("the start of a phase"):
            self._use_all("begin", phase)

    def step(self, batch: Batch, loss: Loss) -> StepReport:
        """See Trainer; rows are dealt over ranks by their tokens, and the report is of all of them."""
        self._refuse_unless_awake(Part.ALL, "step")
        self._refuse_if_torn("step")
        check_token_ids(batch, vocabulary=self._described.vocabulary)
        shares = deal(batch, ranks=self._ranks, minibatches=self._described.minibatches)
        with self._changing("a step"):
            arguments = [([share.batch for share in own], loss) for own in shares]
            reports: list[StepReport] = self._use_each("update", arguments)
        dealt = itertools.chain.from_iterable(shares)
        return replace(
            reports[0], logprobs=put_back(dealt, [report.logprobs for report in reports], tokens=batch.tokens)
        )

    def log_probs(self, batch: Batch) -> "Float32[np.ndarray, ' N']":
        """See Trainer; each row is computed by one rank."""
        self._refuse_unless_awake(Part.WEIGHTS, "log_probs")
        self._refuse_if_torn("compute log-probs")
        check_token_ids(batch, vocabulary=self._described.vocabulary)
        shares = deal_rows(batch, ranks=self._ranks)
        values = self._use_each("log_probs", [(share.batch,) for share in shares])
        return put_back(shares, values, tokens=batch.tokens)

    def weight_specs(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """See WeightSource. It was asked once: nothing is communicated."""
        return self._described.weight_specs

    def named_weights(self) -> "Iterator[tuple[str, Tensor]]":
        """See WeightSource; as copies on the CPU, gathered a bucket at a time. A weight sync has a faster way."""
        self._check_weights()
        self._refuse_if_torn("hand out weights")
        return pulled_weights(
            self.each, self._parcel, ranks=self._ranks, specs=self.weight_specs(), check=self._check_weights
        )

    def start_shipment(self, opening: Sequence[tuple[str, int, Carrier, Sample]]) -> list[Pending]:
        """Begin to send weights to workers, each rank as `opening` says; see WeightSender. Refused as `named_weights`.

        A weight sync goes on by `end_each`, `each` and `start`.
        """
        self._check_weights()
        self._refuse_if_torn("hand out weights")
        return self.start_each("open_shipment", opening)

    def each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """As TenantProxy's: how weights are shipped. Those of a torn state go nowhere."""
        if method != "close_shipment":
            self._refuse_if_torn("hand out weights")
        return super().each(method, arguments)

    def _parcel(self) -> Parcel:
        used: Used = self.start(0, "take_parcel").result(self._deadlines.work)
        parcel: Parcel = used.value
        return parcel

    def _check_weights(self) -> None:
        self._refuse_unless_awake(Part.WEIGHTS, "named_weights")

    def snapshot(self) -> Snapshot:
        """See Trainer. What is written stays with the ranks until it is released; no collective is used.

        `extra` is rank 0's, with the random states of every rank's process.
        """
        self._refuse_if_torn("save the trainer")
        token = next(self._tokens)
        with self._lock:
            self._held.add(token)
        try:
            taken: list[Taken] = self._use_all("take_snapshot", token, bool(self._specs))
        except BaseException:
            self._specs = []
            self._release(token)
            raise
        if any(own.specs is not None for own in taken):
            self._layout = object()
            before = self._specs or [{} for _ in taken]
            self._specs = [old if own.specs is None else own.specs for own, old in zip(taken, before, strict=True)]
        shards = [
            RemoteShard(self._group, worker=worker, token=token, specs=specs, deadline=self._deadlines.control)
            for worker, specs in enumerate(self._specs)
            if specs
        ]
        extra = dict(taken[0].extra) | {RANK_RANDOM: [own.random for own in taken]}
        return Snapshot(shards=shards, extra=extra, release=lambda: self._release(token), layout=self._layout)

    def _release(self, token: int) -> None:
        """Let go of a snapshot, once, from any thread; the last one after `close` ends the workers."""
        with self._lock:
            if token not in self._held:
                return
            self._held.remove(token)
            last = self._closing and not self._held
        if last:
            self._group.close()
            return
        for worker in range(self._ranks):
            # Nobody waits for it: until it is heard, the worker only holds more than it must.
            self._group.notify(worker, "release_snapshot", token)

    def load(self, saved: Saved) -> None:
        """See Trainer. When some ranks refused and others did not, the state is torn until a load succeeds."""
        self._refuse_unless_awake(Part.ALL, "load")
        with self._changing("a load"):
            self._use_all("load", saved)
        self._torn = ""

    @contextlib.contextmanager
    def _changing(self, what: str) -> Iterator[None]:
        """A call that changes every rank. After a failure the state is torn, unless all ranks refused alike."""
        try:
            yield
        except BaseException as error:
            if not (_refusal(error) and self._agree()):
                self._torn = f"{what} failed on some ranks ({type(error).__name__}: {error})"
            raise

    def _agree(self) -> bool:
        try:
            return len(set(self._use_all("changes"))) == 1
        except WorkerError:
            return False

    def _refuse_if_torn(self, doing: str) -> None:
        if self._torn:
            raise TrainerError(
                f"cannot {doing}: {self._torn}, so the ranks are of no one step; load a checkpoint or start the run "
                "again"
            )

    def close(self) -> None:
        """End the workers, once the last snapshot is released: until then what it holds can still be written."""
        with self._lock:
            self._closing = True
            ready = not self._held
        self._lost = self._lost or "it was closed"
        if ready:
            self._group.close()


def _refusal(error: BaseException) -> bool:
    # One who waited in vain for others is in the middle of something.
    return isinstance(error, REFUSALS) and not isinstance(error, WorkerError)
