"""Direct weight sync (`tidemill.weights.direct`)."""

import pytest

from tidemill import faults
from tidemill.contracts.events import Event, PhaseDone, ignore
from tidemill.contracts.residency import Residency
from tidemill.contracts.state import PolicyVersion
from tidemill.contracts.weights import WeightSync
from tidemill.errors import Interrupted, WeightSyncError
from tidemill.residency.manager import LeaseManager
from tidemill.testing.suites.weight_sync import TensorEngine, TensorTrainer, WeightSyncSuite
from tidemill.weights.direct import DirectWeightSync


class TestDirectWeightSync(WeightSyncSuite):
    def make_sync(self, residency: Residency) -> WeightSync:
        return DirectWeightSync(residency=residency, emit=ignore)


def sync_of(events: list[Event]) -> DirectWeightSync:
    return DirectWeightSync(residency=LeaseManager(budget=1000, emit=ignore, deadline=1.0), emit=events.append)


def test_the_hand_over_is_timed() -> None:
    events: list[Event] = []
    trainer = TensorTrainer()
    sync_of(events).update_weights(trainer, TensorEngine(trainer.weights, "float32"), PolicyVersion(0, 0))
    assert [(e.name, e.owner) for e in events if isinstance(e, PhaseDone)] == [
        ("verify", "engine"),
        ("update_weights", "engine"),
    ]


@pytest.mark.parametrize("point", ["weights.send.tensor", "weights.publish"])
def test_a_fault_inside_leaves_the_engine_closed(point: str) -> None:
    trainer = TensorTrainer()
    engine = TensorEngine(trainer.weights, "float32")
    sync = sync_of([])
    sync.update_weights(trainer, engine, PolicyVersion(0, 0))
    with faults.armed(f"{point}=raise"), pytest.raises(WeightSyncError):
        sync.update_weights(trainer, engine, PolicyVersion(0, 1))
    assert engine.version is None


def test_an_interruption_stays_an_interruption() -> None:
    class Interrupting(TensorTrainer):
        def named_weights(self):
            raise Interrupted("stop")

    trainer = Interrupting()
    engine = TensorEngine(trainer.weights, "float32")
    with pytest.raises(Interrupted):
        sync_of([]).update_weights(trainer, engine, PolicyVersion(0, 0))
    assert engine.version is None


def test_an_unknown_engine_dtype_is_refused() -> None:
    trainer = TensorTrainer()
    engine = TensorEngine(trainer.weights, "float32")
    engine.dtype = "int4"
    with pytest.raises(WeightSyncError, match="int4"):
        sync_of([]).update_weights(trainer, engine, PolicyVersion(0, 0))


def test_a_name_handed_out_twice_is_refused() -> None:
    class Twice(TensorTrainer):
        def named_weights(self):
            yield from super().named_weights()
            yield from super().named_weights()

    trainer = Twice()
    with pytest.raises(WeightSyncError, match="two weights named 'embed'"):
        sync_of([]).update_weights(trainer, TensorEngine(trainer.weights, "float32"), PolicyVersion(0, 0))
