"""The fakes keep the contracts that they stand for: tidemill.testing.fakes.device, .policy, .meaning, .parts, ..."""

from pathlib import Path

import pytest

from tidemill.checkpoint.commit import Committer
from tidemill.checkpoint.staged import stage
from tidemill.checkpoint.stored import read_checkpoint
from tidemill.contracts.engine import Request, Sampling
from tidemill.contracts.footprint import Part
from tidemill.contracts.state import Cursor, PolicyVersion, RunState
from tidemill.errors import CheckpointError, ResidencyError
from tidemill.testing.fakes.device import FakeGate, FakeTenant
from tidemill.testing.fakes.layouts import InShards, Whole
from tidemill.testing.fakes.meaning import FakeData
from tidemill.testing.fakes.policy import FakeEngine, FakeTrainer
from tidemill.testing.suites.tenant import TenantSuite


def test_a_fake_that_sleeps_has_no_memory_to_touch() -> None:
    trainer = FakeTrainer()
    trainer.wake_up(Part.ALL)
    trainer.on_device("model/w")[:] = 1.0
    trainer.sleep()
    with pytest.raises(ResidencyError, match="was released"):
        trainer.on_device("model/w")
    trainer.wake_up(Part.ALL)
    assert trainer.on_device("model/w").tolist() == [1.0] * 8


def test_a_closed_gate_names_tenant_and_operation() -> None:
    gate = FakeGate("trainer")
    gate.open(Part.WEIGHTS)
    gate.check(Part.WEIGHTS, "step")
    with pytest.raises(ResidencyError, match="trainer cannot step without a lease for weights, optimizer"):
        gate.check(Part.WEIGHTS | Part.OPTIMIZER, "step") if gate.close(Part.WEIGHTS) is None else None


def test_a_fake_engine_answers_from_the_weights_that_a_fake_trainer_begins_with() -> None:
    engine, trainer, twin = FakeEngine(), FakeTrainer(), FakeEngine()
    for tenant in (engine, trainer, twin):
        tenant.wake_up(Part.ALL)
        tenant.gate.open(Part.ALL)
    engine.load_pretrained(PolicyVersion(1, 0))
    twin.begin_update()
    twin.load_weights(trainer.named_weights())
    twin.publish(PolicyVersion(1, 0))
    asked = [Request(key="0:0#0", token_ids=(1,))]
    sampling = Sampling(max_new_tokens=4)
    assert engine.generate(asked, sampling) == twin.generate(asked, sampling)


def test_fake_data_crosses_epochs_without_a_gap() -> None:
    data, cursor, ids = FakeData(rows=5, count=3), Cursor(), []
    for _ in range(5):
        prompts, cursor = data.take(cursor)
        ids += [prompt.id for prompt in prompts]
    assert (cursor.epoch, cursor.position) == (3, 0)
    assert [sorted(ids[i : i + 5]) for i in (0, 5, 10)] == [list("01234")] * 3


def test_a_fake_tenant_counts_only_the_parts_it_has() -> None:
    tenant = FakeTenant("t", {Part.WEIGHTS: 3, Part.KV_CACHE: 4}, keeps=Part.NONE)
    assert [tenant.footprint(part) for part in (Part.WEIGHTS, Part.GRADS, Part.ALL)] == [3, 0, 7]
    assert TenantSuite is not None


@pytest.mark.parametrize("ranks", [1, 2, 3, 11])
def test_a_fake_trainer_in_shards_loads_what_one_in_one_piece_would(ranks: int, tmp_path: Path) -> None:
    trainer = FakeTrainer(InShards(ranks))
    trainer.wake_up(Part.ALL)
    trainer.gate.open(Part.ALL)
    trainer.on_device("model/w")[:] = range(8)
    taken = trainer.snapshot()
    assert not taken.tensors and len(taken.shards) == ranks
    state = RunState(step=1, attempt=1, seed=0, cursor=Cursor(), warm_up_cursor=Cursor())
    committer = Committer(folder=tmp_path, attempt=1, identity={}, settings={}, retention={})
    path = committer.commit(stage(state, {"trainer": taken}), lambda count: None)
    saved = read_checkpoint(path, step=1).parts["trainer"]
    for layout in (InShards(ranks + 1), Whole()):
        other = FakeTrainer(layout)
        other.wake_up(Part.ALL)
        other.gate.open(Part.ALL)
        other.load(saved)
        assert other.on_device("model/w").tolist() == list(range(8))
    taken.release()
    with pytest.raises(CheckpointError, match="its snapshot was released"):
        taken.shards[0].write(tmp_path / "late", lambda count: None)
