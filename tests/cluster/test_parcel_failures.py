"""Parcels of weights that do not arrive as they were sent (`tidemill.cluster.weight_shipping`): none is believed.

By a worker group that meddles with what it carries. Kills of real processes are at the end.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.cluster.folder_parts import DEADLINES, Workers, pool
from tests.cluster.local_group import Answered, LocalGroup
from tests.cluster.test_weight_shipping import REQUESTS, SAMPLING, Pair, TensorRank

from tidemill.cluster.engine_proxy import EngineProxy
from tidemill.cluster.engine_service import EngineService
from tidemill.cluster.tenant_service import Used
from tidemill.cluster.trainer_proxy import TrainerProxy
from tidemill.cluster.trainer_service import TrainerService
from tidemill.cluster.weight_shipping import ShippedWeightSync
from tidemill.cluster.worker import Reply
from tidemill.contracts.events import ignore
from tidemill.contracts.footprint import Part
from tidemill.contracts.state import PolicyVersion
from tidemill.contracts.weights import Samples
from tidemill.contracts.workers import Place
from tidemill.errors import WeightSyncError
from tidemill.residency.manager import LeaseManager
from tidemill.testing.suites.weight_sync import TensorEngine, TensorTrainer
from tidemill.testing.tiny import make_tiny_model
from tidemill.weights.parcel import Parcel
from tidemill.weights.samples import every_weight, no_weight

Load = Callable[[Parcel], Answered]
NAMES = [f"layer.{number}" for number in range(6)]


class MeddlingGroup(LocalGroup):
    """Carries each parcel as `carry` says, which is given the way on. `before` are the parcels of the last shipment."""

    def __init__(self, services: list[Any]) -> None:
        super().__init__("engine", services)
        self.carry: Callable[[MeddlingGroup, Parcel, Load], Answered] = straight
        self.seen: list[Parcel] = []
        self.before: list[Parcel] = []

    def start(self, worker: int, method: str, *arguments: Any, doing: str = "", passed_on: bool = False) -> Answered:
        if method == "use" and arguments[1] == "begin_update":
            self.before, self.seen = self.seen, []
        if method != "use" or arguments[1] != "load_parcel":
            return super().start(worker, method, *arguments, doing=doing, passed_on=passed_on)
        allowed, _, taken = arguments
        parcel = taken.reply.value.value
        self.seen.append(replace(parcel, payload=np.array(parcel.payload)))

        def load(carried: Parcel) -> Answered:
            used = Answered("trainer-0", Reply(value=replace(taken.reply.value, value=carried)))
            return super(MeddlingGroup, self).start(worker, method, allowed, "load_parcel", used)

        return self.carry(self, parcel, load)


def answered(parcel: Parcel) -> Answered:
    """What a replica says that has loaded it."""
    return Answered("engine-0", Reply(value=Used(value=parcel.digest(), resident=Part.ALL, host_bytes=0)))


def straight(group: MeddlingGroup, parcel: Parcel, load: Load) -> Answered:
    return load(parcel)


def drops_one(group: MeddlingGroup, parcel: Parcel, load: Load) -> Answered:
    return answered(parcel) if parcel.number == 1 else load(parcel)


def drops_the_last(group: MeddlingGroup, parcel: Parcel, load: Load) -> Answered:
    return answered(parcel) if parcel.number == 2 else load(parcel)


def carries_one_twice(group: MeddlingGroup, parcel: Parcel, load: Load) -> Answered:
    if parcel.number == 1:
        load(parcel)
    return load(parcel)


def carries_one_instead_of_the_next(group: MeddlingGroup, parcel: Parcel, load: Load) -> Answered:
    return load(group.seen[0]) if parcel.number == 1 else load(parcel)


def exchanges_two(group: MeddlingGroup, parcel: Parcel, load: Load) -> Answered:
    if parcel.number == 0:
        return answered(parcel)
    if parcel.number == 1:
        load(parcel)
        return load(group.seen[0])
    return load(parcel)


def exchanges_what_is_in_two(group: MeddlingGroup, parcel: Parcel, load: Load) -> Answered:
    if parcel.number == 0:
        return answered(parcel)
    if parcel.number == 1:
        load(replace(group.seen[0], payload=parcel.payload))
        return load(replace(parcel, payload=group.seen[0].payload))
    return load(parcel)


def answers_before_it_is_copied(group: MeddlingGroup, parcel: Parcel, load: Load) -> Answered:
    """The sender writes the buffer again while it is read: half of it is the next parcel's."""
    if parcel.number == 0:
        return answered(parcel)
    if parcel.number == 1:
        torn = np.array(group.seen[0].payload)
        torn[len(torn) // 2 :] = parcel.payload[len(torn) // 2 :]
        load(replace(group.seen[0], payload=torn))
    return load(parcel)


def opens_a_stale_handle(group: MeddlingGroup, parcel: Parcel, load: Load) -> Answered:
    return load(replace(parcel, payload=group.before[parcel.number].payload)) if parcel.number == 1 else load(parcel)


def carries_a_parcel_of_the_last_shipment(group: MeddlingGroup, parcel: Parcel, load: Load) -> Answered:
    return load(group.before[1]) if parcel.number == 1 else load(parcel)


def flips_a_bit(group: MeddlingGroup, parcel: Parcel, load: Load) -> Answered:
    flipped = np.array(parcel.payload)
    flipped[7] ^= 4
    return load(replace(parcel, payload=flipped))


def calls_it_by_another_name(group: MeddlingGroup, parcel: Parcel, load: Load) -> Answered:
    if parcel.number != 1:
        return load(parcel)
    entries = parcel.entries
    renamed = [replace(one, name=other.name) for one, other in zip(entries, reversed(entries), strict=True)]
    return load(replace(parcel, entries=tuple(renamed)))


CONTENTS = [
    exchanges_what_is_in_two,
    answers_before_it_is_copied,
    opens_a_stale_handle,
    carries_a_parcel_of_the_last_shipment,
    flips_a_bit,
]
ARRIVALS = [
    drops_one,
    drops_the_last,
    carries_one_twice,
    carries_one_instead_of_the_next,
    exchanges_two,
    calls_it_by_another_name,
]


class Meddled:
    """A rank and a replica with three parcels of two weights of one shape between them."""

    def __init__(self, samples: Samples) -> None:
        self.source = TensorTrainer()
        self.source.weights = {name: torch.randn(8, 32) for name in NAMES}
        rank: Any = TensorRank(self.source)
        ranks = LocalGroup("trainer", [TrainerService(lambda place, emit: rank, Place(), ignore)])
        self.replica = TensorEngine(self.source.weights, "float32")
        service = EngineService(lambda place, emit: self.replica, Place(), ignore)
        self.group = MeddlingGroup([service])
        self.trainer = TrainerProxy(ranks, deadlines=DEADLINES)
        self.trainer.gate.open(Part.ALL)
        self.engine = EngineProxy(self.group, deadlines=DEADLINES, emit=ignore, max_batch=1)
        residency = LeaseManager(budget=1000, emit=ignore, deadline=1.0)
        self.sync = ShippedWeightSync(residency=residency, emit=ignore, bucket_bytes=2048, samples=samples)

    def hand_over(self, step: int) -> None:
        for weight in self.source.weights.values():
            weight += 1.0
        self.sync.update_weights(self.trainer, self.engine, PolicyVersion(1, step))

    def equal(self) -> bool:
        return all(torch.equal(self.replica.live[name], weight) for name, weight in self.source.weights.items())


@pytest.mark.parametrize("carry", CONTENTS + ARRIVALS, ids=lambda carry: carry.__name__)
def test_however_a_parcel_is_carried_the_engine_is_never_open_with_others_than_the_trainers_weights(carry) -> None:
    pair = Meddled(every_weight)
    pair.hand_over(0)
    assert pair.equal()
    assert len(pair.group.seen) == 3
    pair.group.carry = carry
    with pytest.raises(WeightSyncError):
        pair.hand_over(1)
    assert (pair.engine.version, pair.replica.version) == (None, None)
    pair.group.carry = straight
    pair.hand_over(1)
    assert (pair.engine.version, pair.replica.version) == (PolicyVersion(1, 1), PolicyVersion(1, 1))
    assert pair.equal()


@pytest.mark.parametrize("carry", ARRIVALS, ids=lambda carry: carry.__name__)
def test_parcels_that_do_not_arrive_once_and_in_order_are_noticed_where_no_checksum_is_computed(carry) -> None:
    pair = Meddled(no_weight)
    pair.hand_over(0)
    pair.group.carry = carry
    with pytest.raises(WeightSyncError):
        pair.hand_over(1)
    assert pair.engine.version is None


def test_a_version_that_is_published_twice_is_one_and_no_older_one_comes_after_it() -> None:
    pair = Meddled(every_weight)
    pair.hand_over(3)
    pair.hand_over(3)
    assert pair.engine.version == PolicyVersion(1, 3)
    with pytest.raises(WeightSyncError, match="never go back"):
        pair.hand_over(2)
    assert pair.engine.version is None
    pair.hand_over(3)
    assert pair.equal()


# Between processes

workers = pytest.fixture(scope="module")(pool)


@pytest.fixture
def killed(workers: Callable[[str, int], Workers], tmp_path: Path) -> Iterator[Pair]:
    made = Pair(workers, make_tiny_model(tmp_path / "model", hidden=32, heads=2, kv_heads=1), ranks=1, replicas=1)
    yield made
    made.end()


@pytest.mark.parametrize(
    "fault",
    [
        "engine-0/engine.load_weights=kill@2",
        "engine-0/engine.publish=kill",
        "trainer-0/weights.send.tensor=kill@9",
        "trainer-0/worker.close_shipment=kill",
    ],
)
def test_after_a_kill_half_way_a_new_process_in_its_place_gets_a_whole_hand_over(killed: Pair, fault: str) -> None:
    pair = killed.build(faults=fault)
    with pytest.raises(WeightSyncError, match=f"{fault.partition('/')[0]} died"):
        pair.update(3)
    assert pair.engine.version is None
    if fault.startswith("engine"):
        pair.engine = pair.makers[1].engine(pair.folder)
    else:
        with pair.residency.awake(pair.engine), pytest.raises(WeightSyncError, match="unknown"):
            pair.engine.generate(REQUESTS, SAMPLING)
        pair.trainer = pair.makers[0].trainer(pair.folder)
    pair.residency = LeaseManager(budget=1 << 30, emit=ignore, deadline=1.0)
    pair.sync = ShippedWeightSync(residency=pair.residency, emit=ignore, bucket_bytes=1 << 16)
    pair.update(4)
    for mine, theirs in zip(pair.answers(), pair.inline_answers("float32", 0.0, 4), strict=True):
        assert (mine.token_ids, mine.version) == (theirs.token_ids, PolicyVersion(1, 4))
