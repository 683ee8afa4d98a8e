"""The hand-over between the real trainer and the real engine, under the smallest budget in which both can live."""

from pathlib import Path

import pytest
import torch

from tidemill.contracts.engine import Request, Sampling
from tidemill.contracts.events import ignore
from tidemill.contracts.footprint import Part
from tidemill.contracts.state import PolicyVersion
from tidemill.contracts.workers import Place
from tidemill.engines.transformers.engine import TransformersEngine
from tidemill.errors import ResidencyError, WeightSyncError
from tidemill.planning.budget import budget_for
from tidemill.residency.manager import LeaseManager
from tidemill.testing.tiny import make_tiny_model
from tidemill.trainers.fsdp.trainer import FsdpTrainer
from tidemill.weights.direct import DirectWeightSync

GREEDY = Sampling(max_new_tokens=3, temperature=0.0)
REQUESTS = [Request(key="a", token_ids=(5, 6, 7))]


class Pair:
    """Trainer, engine, leases and the sync between them."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.trainer = FsdpTrainer(
            model=folder,
            place=Place(),
            compute_dtype="float32",
            tokens_per_micro_batch=64,
            minibatches=1,
            recompute=False,
            max_grad_norm=1.0,
            phases={},
            page_bytes=1 << 16,
            emit=ignore,
        )
        self.engine = TransformersEngine(
            model=folder, device="cpu", dtype=dtype, max_batch=2, kv_tokens=512, emit=ignore
        )
        budget, _ = budget_for(
            "always",
            trainer_bytes=self.trainer.footprint(Part.ALL),
            engine_weight_bytes=self.engine.footprint(Part.WEIGHTS),
            engine_bytes=self.engine.footprint(Part.ALL),
            device_bytes=0,
        )
        self.residency = LeaseManager(budget=budget, emit=ignore, deadline=1.0)
        self.residency.admit(self.trainer)
        self.sync = DirectWeightSync(residency=self.residency, emit=ignore)

    def hand_over(self, step: int) -> None:
        with self.residency.awake(self.trainer):
            self.sync.update_weights(self.trainer, self.engine, PolicyVersion(1, step))

    def crowd_out_the_engine(self) -> None:
        with self.residency.awake(self.trainer):
            pass


@pytest.fixture(params=[("float32", True), ("bfloat16", False)], ids=["float32-tied", "bfloat16-untied"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    dtype, tied = request.param
    return Pair(make_tiny_model(tmp_path / "model", hidden=32, heads=2, kv_heads=2, tied=tied), dtype)


def test_after_each_hand_over_the_engine_holds_the_trainers_weights_and_answers_at_their_version(pair: Pair) -> None:
    for step in range(3):
        pair.hand_over(step)
        with pair.residency.awake(pair.engine):
            assert {answer.version for answer in pair.engine.generate(REQUESTS, GREEDY)} == {PolicyVersion(1, step)}
        with pair.residency.awake(pair.trainer), torch.no_grad():
            for _, weight in pair.trainer.named_weights():
                weight.add_(0.01)
            # As a step would: what the pages hold is no longer what the tensors hold.
            pair.trainer._version += 1
    sleeps, wakes = pair.residency.transitions()["trainer"]
    assert (sleeps, wakes) == (3, 3)


def test_an_engine_woken_without_weights_refuses_to_generate(pair: Pair) -> None:
    pair.hand_over(0)
    with pair.residency.awake(pair.engine):
        pass
    pair.crowd_out_the_engine()
    for part in (Part.WEIGHTS, Part.ALL):
        with pair.residency.awake(pair.engine, part), pytest.raises((ResidencyError, WeightSyncError)):
            pair.engine.generate(REQUESTS, GREEDY)
    pair.hand_over(1)
    with pair.residency.awake(pair.engine):
        assert pair.engine.generate(REQUESTS, GREEDY)


def test_a_hand_over_without_the_trainers_lease_is_refused_and_leaves_the_engine_closed(pair: Pair) -> None:
    pair.hand_over(0)
    with pytest.raises(WeightSyncError, match="named_weights needs a lease"):
        pair.sync.update_weights(pair.trainer, pair.engine, PolicyVersion(1, 1))
    assert pair.engine.version is None


def test_a_snapshot_of_the_sleeping_trainer_needs_no_wake_while_the_engine_generates(pair: Pair) -> None:
    pair.hand_over(0)
    with pair.residency.awake(pair.engine):
        before = pair.residency.transitions()["trainer"]
        assert pair.trainer.footprint(pair.trainer.resident()) == 0
        snapshot = pair.trainer.snapshot()
        assert pair.engine.generate(REQUESTS, GREEDY)
        assert sum(tensor.data.nbytes for tensor in snapshot.tensors.values()) > 0
        snapshot.release()
        assert pair.residency.transitions()["trainer"] == before
