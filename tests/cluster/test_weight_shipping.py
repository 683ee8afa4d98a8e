"""tidemill.cluster.weight_shipping: by the public suite in one process, and between real processes."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.cluster.folder_parts import DEADLINES, Workers, pool
from tests.cluster.local_group import LocalGroup

from tidemill import faults
from tidemill.cluster.engine_proxy import EngineProxy
from tidemill.cluster.engine_service import EngineService
from tidemill.cluster.trainer_proxy import TrainerProxy
from tidemill.cluster.trainer_service import TrainerService
from tidemill.cluster.weight_shipping import ShippedWeightSync
from tidemill.contracts.engine import Sampling
from tidemill.contracts.events import Event, PhaseDone, ignore
from tidemill.contracts.footprint import Part
from tidemill.contracts.residency import Residency
from tidemill.contracts.state import PolicyVersion
from tidemill.contracts.weights import WeightReceiver, WeightSource, WeightSync
from tidemill.contracts.workers import Place
from tidemill.engines.transformers.engine import TransformersEngine
from tidemill.errors import ResidencyError, WeightSyncError, WorkerError
from tidemill.residency.manager import LeaseManager
from tidemill.testing.fakes.device import FakeTenant
from tidemill.testing.suites.engine_case import hand_over, open_awake, requests_of
from tidemill.testing.suites.weight_sync import TensorEngine, TensorTrainer, WeightSyncSuite
from tidemill.testing.tiny import make_tiny_model

REQUESTS = requests_of([[5, 6, 7], [8, 9], [10], [11, 12, 13, 14], [15]])
SAMPLING = Sampling(max_new_tokens=6)


class TensorRank(FakeTenant):
    """One of the ranks that all have the suite's tensors."""

    vocabulary, minibatches = 10, 1
    park = revive = update = None  # nobody calls them here

    def __init__(self, trainer: TensorTrainer) -> None:
        super().__init__("trainer", {Part.WEIGHTS: 1}, keeps=Part.ALL)
        self.awake = Part.ALL
        self.weight_specs, self.named_weights = trainer.weight_specs, trainer.named_weights


class WithoutProcesses:
    """Ships from `ranks` ranks, all of one trainer, to an engine of one replica; buckets hold about one tensor."""

    def __init__(self, residency: Residency, ranks: int, bucket_bytes: int) -> None:
        self.sync = ShippedWeightSync(residency=residency, emit=ignore, bucket_bytes=bucket_bytes)
        self.ranks = ranks
        self.engines: dict[int, EngineProxy] = {}

    def update_weights(self, trainer: WeightSource, engine: WeightReceiver, version: PolicyVersion) -> None:
        rank: Any = TensorRank(trainer)
        services = [TrainerService(lambda place, emit: rank, Place(), ignore) for _ in range(self.ranks)]
        source = TrainerProxy(LocalGroup("trainer", services), deadlines=DEADLINES)
        source.gate.open(Part.ALL)
        if id(engine) not in self.engines:
            replica = EngineService(lambda place, emit: engine, Place(), ignore)
            group = LocalGroup("engine", [replica])
            self.engines[id(engine)] = EngineProxy(group, deadlines=DEADLINES, emit=ignore, max_batch=4)
        target = self.engines[id(engine)]
        try:
            self.sync.update_weights(source, target, version)
        finally:
            assert target.version == engine.version


class TestShippedInOneBucket(WeightSyncSuite):
    def make_sync(self, residency: Residency) -> WeightSync:
        return WithoutProcesses(residency, 1, 1 << 20)


class TestShippedTensorByTensor(WeightSyncSuite):
    def make_sync(self, residency: Residency) -> WeightSync:
        return WithoutProcesses(residency, 1, 1)

    def test_the_version_is_published_after_the_last_tensor(
        self, sync: WeightSync, trainer: TensorTrainer, engine: TensorEngine
    ) -> None:
        sync.update_weights(trainer, engine, PolicyVersion(1, 0))
        assert engine.calls[0] == "begin"
        assert engine.calls[-1] == "publish"
        assert set(engine.calls[1:-1]) == {"loaded"}
        assert len(engine.calls) >= 6


# Between processes

workers = pytest.fixture(scope="module")(pool)


class Pair:
    """Ranks, replicas, leases and the sync between them."""

    def __init__(self, workers: Callable[[str, int], Workers], folder: Path, *, ranks: int, replicas: int) -> None:
        self.makers = (workers("trainer", ranks), workers("engine", replicas))
        self.folder = folder
        self.events: list[Event] = []

    def build(self, *, faults: str = "", dtype: str = "float32", bucket_bytes: int = 1 << 16, deadlines=DEADLINES):
        self.trainer = self.makers[0].trainer(self.folder, faults=faults, deadlines=deadlines)
        self.engine = self.makers[1].engine(self.folder, dtype=dtype, faults=faults, deadlines=deadlines)
        self.residency = LeaseManager(budget=1 << 30, emit=ignore, deadline=1.0)
        self.sync = ShippedWeightSync(residency=self.residency, emit=self.events.append, bucket_bytes=bucket_bytes)
        return self

    def update(self, step: int) -> None:
        with self.residency.awake(self.trainer):
            self.sync.update_weights(self.trainer, self.engine, PolicyVersion(1, step))

    def add(self, number: float) -> None:
        with self.residency.awake(self.trainer):
            self.trainer.begin(str(number))

    def answers(self) -> list[Any]:
        with self.residency.awake(self.engine):
            return self.engine.generate(REQUESTS, SAMPLING)

    def inline_answers(self, dtype: str, number: float, step: int) -> list[Any]:
        engine = TransformersEngine(model=self.folder, device="cpu", dtype=dtype, max_batch=4, emit=ignore)
        open_awake(engine)
        weights = {name: weight + number for name, weight in load_file(self.folder / "model.safetensors").items()}
        hand_over(engine, weights, PolicyVersion(1, step))
        return engine.generate(REQUESTS, SAMPLING)

    def end(self) -> None:
        for maker in self.makers:
            maker.reuse()


@pytest.fixture(params=[(2, 2), (2, 1), (1, 2)], ids=lambda sizes: f"{sizes[0]}-ranks-{sizes[1]}-replicas")
def pair(request: pytest.FixtureRequest, workers: Any, tmp_path: Path) -> Iterator[Pair]:
    ranks, replicas = request.param
    folder = make_tiny_model(tmp_path / "model", hidden=32, heads=2, kv_heads=1)
    made = Pair(workers, folder, ranks=ranks, replicas=replicas)
    yield made
    made.end()


@pytest.fixture
def two_by_two(workers: Any, tmp_path: Path) -> Iterator[Pair]:
    made = Pair(workers, make_tiny_model(tmp_path / "model", hidden=32, heads=2, kv_heads=1), ranks=2, replicas=2)
    yield made
    made.end()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_are_those_of_an_engine_in_this_process_with_the_same_weights(pair: Pair, dtype: str) -> None:
    pair.build(dtype=dtype)
    for step, added in enumerate((0.0, 0.02)):
        pair.add(added)
        pair.update(step)
        for mine, theirs in zip(pair.answers(), pair.inline_answers(dtype, added, step), strict=True):
            assert (mine.token_ids, mine.version) == (theirs.token_ids, theirs.version)
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5 if dtype == "float32" else 2e-2)
    assert [event.name for event in pair.events if isinstance(event, PhaseDone)] == ["verify", "update_weights"] * 2


def test_a_sync_holds_the_same_checksums_however_large_the_bucket(two_by_two: Pair) -> None:
    found = set()
    for bucket in (1, 1 << 28):
        two_by_two.build(bucket_bytes=bucket)
        two_by_two.update(0)
        with two_by_two.residency.awake(two_by_two.engine):
            found.add(tuple(sorted(two_by_two.engine.weight_checksums().items())))
    assert len(found) == 1


@pytest.mark.parametrize(
    "fault",
    [
        "trainer-1/weights.send.tensor=raise@16",
        "trainer-0/weights.send.tensor=raise@25",
        "engine-1/engine.load_weights=raise@2",
        "engine-0/engine.publish=raise",
        "engine-1/engine.publish=raise",
    ],
)
def test_a_fault_anywhere_leaves_the_version_unknown_and_the_next_sync_repairs_it(two_by_two: Pair, fault: str) -> None:
    pair = two_by_two.build(faults=fault)
    with pytest.raises(WeightSyncError, match="FaultInjected") as caught:
        for step in range(3):
            pair.update(step)
    assert isinstance(caught.value.__cause__, WorkerError)
    assert fault.partition("/")[0] in str(caught.value)
    assert pair.engine.version is None
    with pair.residency.awake(pair.engine), pytest.raises(WeightSyncError, match="unknown"):
        pair.engine.generate(REQUESTS, SAMPLING)
    pair.update(7)
    assert {answer.version for answer in pair.answers()} == {PolicyVersion(1, 7)}


def test_the_drivers_own_fault_points_are_passed(two_by_two: Pair) -> None:
    pair = two_by_two.build()
    with faults.armed("weights.publish=raise"), pytest.raises(WeightSyncError, match=r"weights\.publish"):
        pair.update(0)
    assert pair.engine.version is None
    pair.update(0)


@pytest.mark.parametrize("who", ["trainer-1/weights.send.tensor", "engine-1/engine.load_weights"])
def test_a_worker_killed_in_a_sync_is_named_within_seconds(two_by_two: Pair, who: str) -> None:
    pair = two_by_two.build(faults=f"{who}=kill@2")
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match=f"{who.partition('/')[0]} died"):
        pair.update(0)
    assert time.monotonic() - began < 8
    assert pair.engine.version is None


def test_a_worker_that_hangs_is_named_by_the_deadline(two_by_two: Pair) -> None:
    hasty = type(DEADLINES)(work=1.5, transition=5.0)
    pair = two_by_two.build(faults="engine-1/engine.load_weights=delay:60@2", deadlines=hasty)
    with pytest.raises(WeightSyncError, match="engine-1 did not load weights"):
        pair.update(0)


def test_a_flipped_bit_in_one_replica_is_found_and_named(two_by_two: Pair) -> None:
    pair = two_by_two.build()
    pair.update(0)
    (pair.folder / "worn-1").write_text("model.layers.1.mlp.up_proj.weight")
    with pytest.raises(WeightSyncError, match=r"engine-1 .*model.layers.1.mlp.up_proj.weight"):
        pair.update(1)
    assert pair.engine.version is None
    (pair.folder / "worn-1").unlink()
    pair.update(1)
    assert len(pair.answers()) == len(REQUESTS)


@pytest.mark.parametrize("side", ["trainer", "engine"])
def test_a_weight_without_a_partner_is_named(two_by_two: Pair, side: str, tmp_path: Path) -> None:
    weights = load_file(two_by_two.folder / "model.safetensors")
    pair = two_by_two.build()
    if side == "trainer":
        weights["model.adapter.weight"] = torch.zeros(3)
    else:
        del weights["model.norm.weight"]
    other = tmp_path / "other"
    other.mkdir()
    save_file(weights, other / "model.safetensors")
    pair.trainer = pair.makers[0].trainer(other)
    with pytest.raises(WeightSyncError, match=r"model\.(adapter|norm)\.weight"):
        pair.update(0)
    assert pair.engine.version is None


def test_nothing_is_shipped_without_the_trainers_lease(two_by_two: Pair) -> None:
    pair = two_by_two.build()
    pair.update(0)
    with pytest.raises(WeightSyncError, match="trainer.named_weights needs a lease") as caught:
        pair.sync.update_weights(pair.trainer, pair.engine, PolicyVersion(1, 1))
    assert isinstance(caught.value.__cause__, ResidencyError)
    assert pair.engine.version is None


def test_only_what_belongs_to_the_cluster_can_be_synced(two_by_two: Pair) -> None:
    pair = two_by_two.build()
    with pytest.raises(WeightSyncError, match="TensorTrainer"):
        pair.sync.update_weights(TensorTrainer(), pair.engine, PolicyVersion(1, 0))


def test_a_sync_of_one_bucket_is_seven_calls_a_worker_at_most(tmp_path: Path) -> None:
    trainer = TensorTrainer()
    rank: Any = TensorRank(trainer)
    ranks = LocalGroup("trainer", [TrainerService(lambda place, emit: rank, Place(), ignore) for _ in range(2)])
    engine = TensorEngine(trainer.weights, "bfloat16")
    replicas = LocalGroup("engine", [EngineService(lambda place, emit: engine, Place(), ignore)])
    source = TrainerProxy(ranks, deadlines=DEADLINES)
    target = EngineProxy(replicas, deadlines=DEADLINES, emit=ignore, max_batch=1)
    sync = ShippedWeightSync(residency=LeaseManager(budget=1000, emit=ignore, deadline=1.0), emit=ignore)
    source.gate.open(Part.ALL)
    for step in range(2):
        del ranks.calls[:], replicas.calls[:]
        sync.update_weights(source, target, PolicyVersion(1, step))
    assert [call for worker, call in ranks.calls if worker == 0] == ["open_shipment", "take_parcel", "close_shipment"]
    assert [call for worker, call in ranks.calls if worker == 1] == ["open_shipment", "close_shipment"]
    assert [call for _, call in replicas.calls] == ["begin_update", "load_parcel", "weight_checksums", "publish"]
