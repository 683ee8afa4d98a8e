"""Weights from the trainer's ranks to the engine's replicas, in parcels that go from worker to worker.

The driver says what to do next and compares the checksums; no weight passes through it. While replicas load one parcel
the ranks gather the next: two are on their way at most, and each sender has two buffers.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tidemill import faults
from tidemill.cluster.engine_proxy import EngineProxy
from tidemill.cluster.feeding import Feeding, plan_feeding
from tidemill.cluster.tenant_proxy import TenantProxy
from tidemill.cluster.trainer_proxy import TrainerProxy
from tidemill.cluster.weight_sender import Sent
from tidemill.contracts.events import Emit
from tidemill.contracts.residency import Residency
from tidemill.contracts.state import PolicyVersion
from tidemill.contracts.weights import Sample, Samples, WeightReceiver, WeightSource
from tidemill.contracts.workers import Pending
from tidemill.errors import WeightSyncError
from tidemill.weights.comparing import compare_checksums, compare_parcels
from tidemill.weights.handing import handing_over
from tidemill.weights.samples import every_weight
from tidemill.weights.verifying import Verifier

__all__ = ["ShippedWeightSync"]


class ShippedWeightSync:
    """Between a `TrainerProxy` and an `EngineProxy`, under the engine's lease for weights; the caller holds the other.

    `bucket_bytes` bounds a parcel, unless one weight alone is larger. The weights of `samples` are compared by
    checksum, all parcels by what they say that they bring. `words` says that a rank or replica may lie on an
    accelerator.
    """

    def __init__(
        self,
        *,
        residency: Residency,
        emit: Emit,
        bucket_bytes: int = 256 << 20,
        samples: Samples = every_weight,
        words: bool = False,
    ) -> None:
        self._residency = residency
        self._verifier = Verifier(samples=samples, words=words, emit=emit)
        self._emit = emit
        self._bucket_bytes = bucket_bytes
        self._planned: list[tuple[TrainerProxy, EngineProxy, Feeding]] = []

    def update_weights(self, trainer: WeightSource, engine: WeightReceiver, version: PolicyVersion) -> None:
        """Close generation, ship, compare on every replica, publish `version`, in this order and all or nothing.

        Raises WeightSyncError on any failure; from `begin_update` on the engine's version is then unknown, and it
        refuses to generate until a later sync succeeds.
        """
        if not isinstance(trainer, TrainerProxy) or not isinstance(engine, EngineProxy):
            raise WeightSyncError(
                f"cannot ship weights from {type(trainer).__name__} to {type(engine).__name__}: both must be of the "
                "cluster that this weight sync is of"
            )
        with handing_over(engine, version, residency=self._residency, emit=self._emit):
            self._hand_over(trainer, engine, version)

    def _hand_over(self, trainer: TrainerProxy, engine: EngineProxy, version: PolicyVersion) -> None:
        sample = self._verifier.begin(version)
        closed = engine.start_update()
        feeding = self._feeding(trainer, engine)
        with _open_shipment(trainer, engine, feeding) as shipment:
            shipment.ship(self._bucket_bytes, closed, sample)
            # Beside the end of the shipment: the last parcel is loaded.
            computed = engine.start_checksums(sample)
        with self._verifier.timed(engine.name):
            checksums = engine.end_each("weight_checksums", computed)
            for replica, (name, held) in enumerate(zip(engine.group.names, checksums, strict=True)):
                sent = shipment.sent[feeding.feeder[replica]]
                compare_parcels(sent.parcels, shipment.loaded[replica], name)
                compare_checksums(sent.sums, held, name)
        faults.point("weights.publish")
        engine.publish(version)
        self._verifier.passed(engine.name, compared=len(checksums[0]), total=len(trainer.weight_specs()))

    def _feeding(self, trainer: TrainerProxy, engine: EngineProxy) -> Feeding:
        """Asked once: workers do not move."""
        for known, fed, feeding in self._planned:
            if known is trainer and fed is engine:
                return feeding
        feeding = plan_feeding(trainer.each("where", _nothing(trainer)), engine.each("where", _nothing(engine)))
        self._planned = [(trainer, engine, feeding)]
        return feeding


@dataclass(kw_only=True)
class _Shipment:
    """One hand-over. `sent` is what each rank said at its end, `loaded` the digests of parcels by replica."""

    trainer: TrainerProxy
    engine: EngineProxy
    feeding: Feeding
    loads: list[Pending]
    sent: Sequence[Sent] = ()
    loaded: list[list[int]] = field(default_factory=list)

    def ship(self, bucket_bytes: int, closed: Sequence[Pending], sample: Sample) -> None:
        """Every parcel, until the last is loaded; `closed` is the end of generation, before the first is."""
        self.loaded = [[] for _ in self.feeding.feeder]
        opening = [(self.engine.dtype, bucket_bytes, carrier, sample) for carrier in self.feeding.carrier]
        opened = self.trainer.start_shipment(opening)
        self.engine.end_each("begin_update", closed)
        last: list[bool] = self.trainer.end_each("open_shipment", opened)
        while True:
            self._start_loading()
            if all(last):
                break
            last = self.trainer.each("next_parcel", _nothing(self.trainer))
            self._end_loading()
        self._end_loading()

    def _start_loading(self) -> None:
        feeders = sorted({*self.feeding.feeder})
        taken = {rank: self.trainer.start(rank, "take_parcel", passed_on=True) for rank in feeders}
        for replica, rank in enumerate(self.feeding.feeder):
            self.loads.append(self.engine.start(replica, "load_parcel", taken[rank]))

    def _end_loading(self) -> None:
        loads, self.loads = self.loads, []
        answers = self.engine.group.gather(loads, **self.engine.deadlines.of("load_parcel"))
        for loaded, used in zip(self.loaded, answers, strict=True):
            loaded.append(used.value)

    def close(self) -> None:
        """Free the senders' buffers, when nobody reads them any more."""
        for load in self.loads:
            self.engine.group.wait([load], self.engine.deadlines.transition)
        self.sent = self.trainer.each("close_shipment", _nothing(self.trainer))


@contextlib.contextmanager
def _open_shipment(trainer: TrainerProxy, engine: EngineProxy, feeding: Feeding) -> Iterator[_Shipment]:
    shipment = _Shipment(trainer=trainer, engine=engine, feeding=feeding, loads=[])
    try:
        yield shipment
    except BaseException as cause:
        try:
            shipment.close()
        except Exception as second:
            cause.add_note(f"and the shipment could not be closed: {second}")
        raise
    shipment.close()


def _nothing(proxy: TenantProxy) -> list[tuple[()]]:
    return [() for _ in proxy.group.names]
