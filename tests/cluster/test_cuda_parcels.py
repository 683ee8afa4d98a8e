"""tidemill.cluster.cuda_parcels: weights read where another process on the same GPU put them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.cluster.folder_parts import DEADLINES, Workers, pool

from tidemill.cluster.weight_sender import WeightSender
from tidemill.cluster.weight_shipping import ShippedWeightSync
from tidemill.contracts.engine import Sampling
from tidemill.contracts.events import ignore
from tidemill.contracts.footprint import Part
from tidemill.contracts.state import PolicyVersion
from tidemill.engines.transformers.engine import TransformersEngine
from tidemill.errors import WeightSyncError
from tidemill.residency.manager import LeaseManager
from tidemill.testing.suites.engine_case import hand_over, open_awake, requests_of
from tidemill.testing.suites.weight_sync import TensorTrainer
from tidemill.testing.tiny import make_tiny_model
from tidemill.weights.parcel import host_bytes, unpack

pytestmark = pytest.mark.gpu
REQUESTS = requests_of([[5, 6, 7], [8, 9], [10], [11, 12, 13, 14], [15]])
SAMPLING = Sampling(max_new_tokens=6, temperature=0.0)

workers = pytest.fixture(scope="module")(pool)


class Pair:
    """One rank and `replicas` replicas on one GPU; weights of some megabytes, in buckets of one."""

    def __init__(
        self, workers: Callable[[str, int], Workers], folder: Path, *, replicas: int, faults: str = ""
    ) -> None:
        self.folder = folder
        self.trainer = workers("trainer", 1).trainer(folder, device="cuda", faults=faults)
        self.engine = workers("engine", replicas).engine(folder, device="cuda", dtype="bfloat16", faults=faults)
        self.residency = LeaseManager(budget=1 << 40, emit=ignore, deadline=1.0)
        self.sync = ShippedWeightSync(residency=self.residency, emit=ignore, bucket_bytes=1 << 20)

    def update(self, step: int) -> None:
        with self.residency.awake(self.trainer):
            self.sync.update_weights(self.trainer, self.engine, PolicyVersion(1, step))

    def add(self, number: float) -> None:
        with self.residency.awake(self.trainer):
            self.trainer.begin(str(number))

    def allocated(self) -> list[int]:
        groups = (self.trainer.group, self.engine.group)
        return [size for group in groups for size in group.call("allocated", deadline=DEADLINES.work)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", hidden=256, layers=4)


@pytest.fixture(autouse=True)
def gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture
def made(workers: Callable[[str, int], Workers]) -> Iterator[Callable[[str, int], Workers]]:
    yield workers
    for role, size in (("trainer", 1), ("engine", 1), ("engine", 2)):
        workers(role, size).reuse()


@pytest.mark.parametrize("replicas", [1, 2])
def test_replicas_on_the_ranks_gpu_hold_its_weights_and_answer_as_an_engine_in_this_process(
    made: Any, folder: Path, replicas: int
) -> None:
    pair = Pair(made, folder, replicas=replicas)
    here = TransformersEngine(model=folder, device="cuda", dtype="bfloat16", max_batch=4, emit=ignore)
    open_awake(here)
    for step, added in enumerate((0.0, 0.01)):
        pair.add(added)
        pair.update(step)
        weights = {name: weight + added for name, weight in load_file(folder / "model.safetensors").items()}
        hand_over(here, weights, PolicyVersion(1, step))
        with pair.residency.awake(pair.engine):
            assert pair.engine.weight_checksums() == here.weight_checksums()
            answers = pair.engine.generate(REQUESTS, SAMPLING)
        assert {answer.version for answer in answers} == {PolicyVersion(1, step)}
    ((_, _, feeding),) = pair.sync._planned
    assert feeding.carrier == ("ipc",)


def test_what_senders_and_receivers_hold_stays_the_same_over_many_syncs(made: Any, folder: Path) -> None:
    pair = Pair(made, folder, replicas=2)
    held = []
    for step in range(30):
        pair.update(step)
        held.append(pair.allocated())
        if step == 3:
            free = torch.cuda.mem_get_info()[0]
    # What a process allocates once, at its first calls, is none of ours.
    assert held[3:] == [held[3]] * 27
    assert free - torch.cuda.mem_get_info()[0] < 64 << 20


@pytest.mark.parametrize("fault", ["engine-0/engine.load_weights=raise@2", "trainer-0/weights.send.tensor=raise@12"])
def test_after_a_failure_nothing_stays_shared_and_the_next_sync_works(made: Any, folder: Path, fault: str) -> None:
    pair = Pair(made, folder, replicas=1, faults=fault)
    before = pair.allocated()[0]
    with pytest.raises(WeightSyncError, match="FaultInjected"):
        pair.update(0)
    assert pair.allocated()[0] == before
    pair.update(1)
    assert pair.engine.version == PolicyVersion(1, 1)
    assert pair.allocated()[0] == before


def test_the_trainers_memory_can_go_while_the_engine_keeps_what_it_loaded(made: Any, folder: Path) -> None:
    pair = Pair(made, folder, replicas=1)
    pair.update(0)
    with pair.residency.awake(pair.engine):
        held = pair.engine.weight_checksums()
        pair.trainer.sleep()
        assert pair.engine.weight_checksums() == held
        assert pair.engine.resident() & Part.WEIGHTS


def test_weights_on_a_gpu_reach_an_engine_elsewhere_as_bytes() -> None:
    trainer = TensorTrainer()
    trainer.weights = {name: weight.cuda() for name, weight in trainer.weights.items()}
    sender = WeightSender(trainer)
    arrived = {}
    last = sender.open_shipment("bfloat16", 300, "bytes")
    while True:
        parcel = sender.take_parcel()
        arrived |= {name: weight.clone() for name, weight in unpack(parcel.entries, host_bytes(parcel.payload))}
        if last:
            break
        last = sender.next_parcel()
    assert set(sender.close_shipment().sums) == set(trainer.weights)
    for name, weight in trainer.weights.items():
        assert torch.equal(arrived[name], weight.cpu().bfloat16())
