"""One replica of an engine in a worker's process."""

import traceback
from collections.abc import Mapping, Sequence

from tidemill.cluster.cuda_parcels import SharedBuffer, opened
from tidemill.cluster.tenant_service import TenantService, Used
from tidemill.contracts.engine import Completion, Request, Sampling
from tidemill.contracts.events import Emit, Event, Progress
from tidemill.contracts.footprint import Part
from tidemill.contracts.state import PolicyVersion
from tidemill.contracts.weights import EVERY_WEIGHT, Sample
from tidemill.contracts.workers import BuildEngine, Place
from tidemill.weights.parcel import Parcel, host_bytes, unpack

__all__ = ["EngineService"]


class EngineService(TenantService):
    """Carries out what the driver's `EngineProxy` asks of its replica."""

    def __init__(self, build: BuildEngine, place: Place, emit: Emit) -> None:
        self._emit = emit
        self._answered = 0
        self._engine = build(place, self._hear)
        super().__init__(self._engine)

    def _hear(self, event: Event) -> None:
        # A replica's progress is of its share: the driver asks for it and tells the whole.
        if isinstance(event, Progress):
            self._answered = event.done
        else:
            self._emit(event)

    def dtype(self) -> str:
        """Of its weights."""
        return self._engine.dtype

    def answered(self) -> int:
        """How many answers of the `generate` under way are done. Asked beside it."""
        return self._answered

    def begin_update(self) -> None:
        """See WeightReceiver."""
        self._engine.begin_update()

    def load_parcel(self, sent: Used | Parcel) -> int:
        """Load a parcel's weights; its digest. When this returns, nothing of the parcel is used any more."""
        # Before the parcel is opened: its handle may be of device memory.
        self._engine.gate.check(Part.WEIGHTS, "load_weights")
        try:
            parcel = sent.value if isinstance(sent, Used) else sent
            self._load(parcel)
            return int(parcel.digest())
        except Exception as error:
            # Frames that it went through hold views of memory that is the sender's.
            traceback.clear_frames(error.__traceback__)
            raise

    def _load(self, parcel: Parcel) -> None:
        if isinstance(parcel.payload, SharedBuffer):
            with opened(parcel.payload) as flat:
                self._engine.load_weights(unpack(parcel.entries, flat))
        else:
            self._engine.load_weights(unpack(parcel.entries, host_bytes(parcel.payload)))

    def weight_checksums(self, sample: Sample = EVERY_WEIGHT) -> Mapping[str, int]:
        """See WeightReceiver."""
        return dict(self._engine.weight_checksums(sample))

    def publish(self, version: PolicyVersion) -> None:
        """See WeightReceiver."""
        self._engine.publish(version)

    def load_pretrained(self, version: PolicyVersion) -> None:
        """See RolloutEngine."""
        self._engine.load_pretrained(version)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """See RolloutEngine."""
        self._answered = 0
        return self._engine.generate(requests, sampling)
