"""tidemill.cluster.trainer_proxy, tidemill.cluster.trainer_service and tidemill.cluster.pulled_weights."""

import functools
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tidemill.algorithms.losses.clip import ClipLoss
from tidemill.checkpoint.rng import RandomState
from tidemill.checkpoint.safetensors_file import TensorFile
from tidemill.cluster import calling
from tidemill.cluster.inline import InlineCluster
from tidemill.cluster.pulled_weights import pulled_weights
from tidemill.cluster.trainer_proxy import TrainerProxy
from tidemill.cluster.trainer_service import TrainerService
from tidemill.contracts.checkpoint import Saved
from tidemill.contracts.events import Notice, ignore
from tidemill.contracts.footprint import Part
from tidemill.contracts.trainer import Trainer
from tidemill.contracts.workers import Place
from tidemill.errors import CheckpointError, PluginError, ResidencyError, TrainerError, WorkerError
from tidemill.testing.fakes.rank_trainer import FakeRankTrainer, build_fake_rank
from tidemill.testing.suites.trainer import awake, copied, ragged_batch, same

CLIP = ClipLoss(low=0.2, high=0.2)


def stepped(trainer: Trainer, seed: int = 0) -> None:
    with awake(trainer):
        trainer.begin("rl")
        trainer.step(ragged_batch(seed=seed), CLIP)


def state_of(trainer: Trainer) -> Saved:
    with awake(trainer):
        snapshot = trainer.snapshot()
    try:
        return copied(snapshot)
    finally:
        snapshot.release()


class Counting:
    """A group whose calls are counted."""

    def __init__(self, group: Any) -> None:
        self.group, self.names, self.calls = group, group.names, Counter[str]()

    def call(self, method: str, *arguments: Any, **told: Any) -> list[Any]:
        self.calls[method] += 1
        return list(self.group.call(method, *arguments, **told))

    def call_each(self, method: str, arguments: Sequence[Any], **told: Any) -> list[Any]:
        self.calls[method] += 1
        return list(self.group.call_each(method, arguments, **told))


def test_a_step_is_one_call_and_a_sleep_or_a_wake_two(two_ranks: Any) -> None:
    group = Counting(two_ranks().group)
    trainer = TrainerProxy(group, deadlines=two_ranks()._deadlines)  # type: ignore[arg-type]
    with awake(trainer):
        trainer.begin("rl")
    for use, calls in (
        (lambda: trainer.step(ragged_batch(), CLIP), {"use": 1}),
        (trainer.sleep, {"shift": 1, "use": 1}),
        (lambda: trainer.wake_up(Part.ALL), {"shift": 1, "use": 1}),
    ):
        trainer.gate.open(Part.ALL)
        group.calls.clear()
        use()
        assert group.calls == calls


def test_a_step_is_of_all_rows_wherever_they_are_computed(two_ranks: Any) -> None:
    trainer, batch = two_ranks(), ragged_batch()
    with awake(trainer):
        trainer.begin("rl")
        report = trainer.step(batch, CLIP)
    assert report.metrics["train/tokens"] == batch.tokens
    assert Notice(text="rank 0 updated") in two_ranks.events
    assert Notice(text="rank 1 updated") not in two_ranks.events


@pytest.mark.parametrize("rows", [1, 6, 7])
def test_log_probs_come_back_in_the_places_of_their_tokens(three_ranks: Any, rows: int) -> None:
    batch = ragged_batch(rows=rows)
    alone, trainer = FakeRankTrainer(Place(), ignore), three_ranks()
    with awake(trainer), awake(alone):
        assert np.array_equal(trainer.log_probs(batch), alone.log_probs(batch))


def test_a_batch_that_cannot_be_used_is_refused_before_a_rank_hears_of_it(two_ranks: Any) -> None:
    trainer, batch = two_ranks(), ragged_batch()
    wrong = replace(batch, token_ids=np.where(np.arange(batch.tokens) == 3, 32, batch.token_ids))
    odd = ragged_batch(rows=5)
    with awake(trainer):
        trainer.begin("rl")
        for use in (lambda: trainer.step(wrong, CLIP), lambda: trainer.log_probs(wrong)):
            with pytest.raises(TrainerError, match="token ids from 0 to 32: the model has 32 words"):
                use()
        with pytest.raises(TrainerError, match="5 rows into 2 equal minibatches"):
            trainer.step(odd, CLIP)
        trainer.step(batch, CLIP)


def test_weights_reach_the_driver_whole_and_in_their_own_dtype(two_ranks: Any) -> None:
    trainer = two_ranks()
    stepped(trainer)
    state = state_of(trainer)
    with awake(trainer):
        found = dict(trainer.named_weights())
    assert trainer.weight_specs() == dict.fromkeys(("v", "w"), ("F64", (5, 3)))
    assert sorted(found) == ["v", "w"]
    for name, tensor in found.items():
        assert tensor.numpy().tobytes() == bytes(state.tensors[f"model/{name}"].data)


def test_weights_that_are_no_floats_are_refused() -> None:
    weights = pulled_weights(
        lambda method, arguments: [], lambda: pytest.fail(), ranks=1, specs={"w": ("I64", (1,))}, check=lambda: None
    )
    with pytest.raises(TrainerError, match="I64"):
        next(weights)


def test_only_ranks_with_something_to_write_have_a_shard(two_ranks: Any) -> None:
    trainer = two_ranks(functools.partial(FakeRankTrainer, replicas=2))
    stepped(trainer)
    with awake(trainer):
        snapshot = trainer.snapshot()
    assert len(snapshot.shards) == 1
    assert {spec.shape for spec in snapshot.shards[0].specs.values()} == {(5, 3)}
    assert len(snapshot.extra["rank_random"]) == 2
    snapshot.release()


def test_a_snapshot_needs_a_lease_only_when_what_sleep_copied_is_out_of_date(two_ranks: Any) -> None:
    trainer = two_ranks()
    stepped(trainer)
    with pytest.raises(ResidencyError, match=r"trainer.*snapshot|snapshot.*lease"):
        trainer.snapshot()
    trainer.sleep()
    trainer.snapshot().release()
    trainer.wake_up(Part.ALL)
    trainer.snapshot().release()


def test_two_snapshots_live_beside_each_other(two_ranks: Any) -> None:
    trainer = two_ranks()
    stepped(trainer)
    trainer.sleep()
    first = trainer.snapshot()
    before = copied(first)
    stepped(trainer, seed=1)
    trainer.sleep()
    second = trainer.snapshot()
    after = copied(second)
    assert not same(before, after)
    assert same(copied(first), before)
    first.release()
    assert same(copied(second), after)
    with pytest.raises(CheckpointError, match="released"):
        copied(first)
    second.release()


def test_a_snapshot_that_one_rank_cannot_take_is_held_by_none(two_ranks: Any) -> None:
    trainer = two_ranks(faults="trainer-1/fake.snapshot=raise")
    trainer.sleep()
    with pytest.raises(WorkerError, match="trainer-1 on .* failed: FaultInjected"):
        trainer.snapshot()
    with pytest.raises(CheckpointError, match="released"):
        trainer.group.control(0, "shard_state", 0, deadline=5)
    trainer.snapshot().release()


def test_release_may_come_from_any_thread_more_than_once_and_after_the_end(two_ranks: Any) -> None:
    trainer = two_ranks()
    trainer.sleep()
    first, second = trainer.snapshot(), trainer.snapshot()
    threads = [threading.Thread(target=first.release) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trainer.group.close()
    second.release()
    second.release()


def test_close_ends_the_workers_with_the_last_snapshot(two_ranks: Any) -> None:
    trainer = two_ranks()
    trainer.sleep()
    first, second = trainer.snapshot(), trainer.snapshot()
    before = copied(first)
    trainer.close()
    first.release()
    assert same(copied(second), before)
    with pytest.raises(WorkerError, match="it was closed"):
        trainer.wake_up(Part.ALL)
    second.release()
    with pytest.raises(WorkerError, match="died"):
        trainer.group.call("changes", deadline=5)


def test_a_load_that_every_rank_refuses_changes_nothing(two_ranks: Any) -> None:
    trainer = two_ranks()
    stepped(trainer)
    before = state_of(trainer)
    garbled = dict(before.extra) | {"rank_random": [{}, {}]}
    for wrong in (Saved(tensors={}, extra=before.extra), Saved(tensors=before.tensors, extra=garbled)):
        with awake(trainer), pytest.raises(CheckpointError):
            trainer.load(wrong)
    assert same(state_of(trainer), before)
    stepped(trainer, seed=1)


def test_a_load_that_fails_on_one_rank_tears_the_state_until_a_load_succeeds(two_ranks: Any) -> None:
    trainer = two_ranks(faults="trainer-1/fake.load=disk-full")
    stepped(trainer)
    saved = state_of(trainer)
    with awake(trainer):
        with pytest.raises(OSError, match="No space"):
            trainer.load(saved)
        for use in (
            lambda: trainer.step(ragged_batch(), CLIP),
            lambda: trainer.begin("rl"),
            lambda: trainer.log_probs(ragged_batch()),
            lambda: trainer.named_weights(),
            lambda: trainer.each("open_shipment", [("float32", 1, "none")] * 2),
            lambda: trainer.snapshot(),
        ):
            with pytest.raises(TrainerError, match="a load failed on some ranks"):
                use()
    trainer.sleep()
    with awake(trainer):
        trainer.load(saved)
        trainer.step(ragged_batch(), CLIP)


@pytest.mark.parametrize("point", ["fake.update@2", "fake.updated@1"])
def test_a_step_that_fails_on_one_rank_tears_the_state_until_a_load_succeeds(
    two_ranks: Any, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calling, "GRACE", 0.5)
    name, nth = point.split("@")
    trainer = two_ranks(faults=f"trainer-1/{name}=raise@{nth}")
    with awake(trainer):
        trainer.begin("rl")
        with pytest.raises(WorkerError, match="trainer-1 on .* failed: FaultInjected"):
            trainer.step(ragged_batch(), CLIP)
        with pytest.raises(TrainerError, match="a step failed on some ranks"):
            trainer.step(ragged_batch(), CLIP)
        with pytest.raises(TrainerError, match="cannot save the trainer: a step failed on some ranks"):
            trainer.snapshot()


def test_a_step_that_every_rank_refuses_before_it_begins_tears_nothing(two_ranks: Any) -> None:
    trainer = two_ranks()
    with awake(trainer):
        with pytest.raises(TrainerError, match="no phase has begun"):
            trainer.step(ragged_batch(), CLIP)
        trainer.begin("rl")
        trainer.step(ragged_batch(), CLIP)


def test_a_rank_killed_in_a_step_is_named_and_the_state_refused(
    two_ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calling, "GRACE", 0.5)
    trainer = two_ranks(faults="trainer-1/fake.update=kill@2")
    with awake(trainer):
        trainer.begin("rl")
        with pytest.raises(WorkerError, match="trainer-1 died"):
            trainer.step(ragged_batch(), CLIP)
        with pytest.raises(TrainerError, match="load a checkpoint or start the run again"):
            trainer.step(ragged_batch(), CLIP)


@pytest.mark.parametrize("method", ["park", "revive"])
def test_process_groups_in_no_known_state_end_the_workers_and_the_rank_is_named(
    two_ranks: Any, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calling, "GRACE", 0.5)
    trainer = two_ranks(faults=f"trainer-1/fake.{method}=raise")
    with pytest.raises(WorkerError, match=f"rank 1 of trainer could not {method} its process groups: FaultInjected"):
        for _ in range(2):
            trainer.sleep()
            trainer.wake_up(Part.ALL)
    assert trainer.resident() == Part.NONE
    with pytest.raises(WorkerError, match="cannot reach trainer any more: .*rank 1"):
        trainer.wake_up(Part.ALL)
    with pytest.raises(WorkerError, match="died"):
        trainer.group.call("changes", deadline=5)


def test_a_failed_wake_leaves_the_groups_parked_and_a_failed_sleep_leaves_them_alive(two_ranks: Any) -> None:
    trainer = two_ranks(faults="trainer-1/fake.sleep=raise,trainer-0/fake.wake_up=raise@3")
    with pytest.raises(WorkerError):
        trainer.sleep()
    stepped(trainer)
    trainer.sleep()
    with pytest.raises(WorkerError):
        trainer.wake_up(Part.ALL)
    stepped(trainer)


def test_every_rank_gets_its_own_random_state_back(two_ranks: Any) -> None:
    trainer = two_ranks()
    stepped(trainer)
    saved = state_of(trainer)
    states = [RandomState().snapshot().extra for _ in range(2)]
    states[1]["python"]["words"][0] ^= 1
    moved = dict(saved.extra) | {"rank_random": states}
    with awake(trainer):
        trainer.load(Saved(tensors=saved.tensors, extra=moved))
    assert state_of(trainer).extra["rank_random"] == states
    assert not [event for event in two_ranks.events if isinstance(event, Notice) and "ranks" in event.text]


def test_a_checkpoint_of_another_number_of_ranks_loads(two_ranks: Any, three_ranks: Any) -> None:
    two, three = two_ranks(), three_ranks()
    stepped(two)
    saved = state_of(two)
    with awake(three):
        three.load(saved)
    found = state_of(three)
    assert {name: bytes(t.data) for name, t in found.tensors.items()} == {
        name: bytes(t.data) for name, t in saved.tensors.items()
    }


def test_a_checkpoint_of_one_process_loads_and_random_states_stay(two_ranks: Any) -> None:
    trainer = two_ranks()
    stepped(trainer)
    saved = state_of(trainer)
    alone = {name: value for name, value in saved.extra.items() if name != "rank_random"}
    with awake(trainer):
        trainer.load(Saved(tensors=saved.tensors, extra=alone))
    assert state_of(trainer).extra == saved.extra


def test_a_rank_that_dies_while_a_snapshot_is_held_fails_its_shard_and_releases_in_peace(
    two_ranks: Any, tmp_path: Path
) -> None:
    trainer = two_ranks()
    trainer.sleep()
    snapshot = trainer.snapshot()
    os.kill(trainer.group.pids[1], signal.SIGKILL)
    snapshot.shards[0].write(tmp_path / "0", lambda count: None)
    with pytest.raises(WorkerError, match="trainer-1 died"):
        snapshot.shards[1].write(tmp_path / "1", lambda count: None)
    snapshot.release()


def test_neither_a_step_nor_a_sleep_waits_for_a_file_that_is_written(two_ranks: Any, tmp_path: Path) -> None:
    trainer = two_ranks(faults="trainer-0/checkpoint.write=delay:1.5")
    trainer.sleep()
    snapshot = trainer.snapshot()
    before = dict(snapshot.shards[0].specs)
    write = threading.Thread(target=snapshot.shards[0].write, args=(tmp_path / "0", lambda count: None))
    write.start()
    while trainer.group.control(0, "shard_state", 0, deadline=5).ended:
        time.sleep(0.01)
    for seed in range(3):
        stepped(trainer, seed)
        trainer.sleep()
    assert write.is_alive()
    write.join()
    assert {name: tensor.spec.shape for name, tensor in TensorFile(tmp_path / "0").tensors().items()} == {
        name: spec.shape for name, spec in before.items()
    }
    snapshot.release()


class Alone:
    """A trainer made for one process."""

    name, weight_specs, named_weights = "trainer", dict, dict


def test_a_trainer_made_for_one_process_is_refused_as_a_rank_with_what_it_lacks() -> None:
    build: Any = lambda place, emit: Alone()  # noqa: E731
    with pytest.raises(
        PluginError, match=r"test_trainer_proxy:Alone .* has no minibatches, park, revive, update, vocabulary; define"
    ):
        TrainerService(build, Place(), ignore)
    assert isinstance(InlineCluster(device="cpu", emit=ignore).trainer(build, ranks=1), Alone)


def test_a_service_hands_its_trainer_only_what_is_the_trainers() -> None:
    service = TrainerService(build_fake_rank, Place(), ignore)
    described = service.describe_trainer()
    assert (described.vocabulary, described.minibatches) == (32, 2)
    assert sorted(described.weight_specs) == ["v", "w"]
    assert service.use(Part.ALL, "begin", "rl").resident & Part.WEIGHTS
    assert service.changes() == 1
    with pytest.raises(TrainerError):
        service.use(Part.ALL, "begin", "nothing")
    assert service.changes() == 1
