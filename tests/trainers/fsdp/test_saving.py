"""A save of the trainer costs the loop no copy that is waited for (`FsdpTrainer.snapshot`)."""

import threading

import pytest
from tests.trainers.fsdp.conftest import MakeFsdpTrainer

from tidemill.algorithms.losses.clip import ClipLoss
from tidemill.contracts.events import Event, PhaseDone
from tidemill.residency.savers.host_arena import HostArenaSaver
from tidemill.testing.suites.trainer_case import awake, copied, ragged_batch, same

CLIP = ClipLoss(low=0.2, high=0.2)


def test_a_snapshot_of_an_awake_trainer_copies_nothing_until_somebody_reads_it(
    make_fsdp_trainer: MakeFsdpTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, copies = make_fsdp_trainer(), list[object]()
    capture = HostArenaSaver.capture
    monkeypatch.setattr(HostArenaSaver, "capture", lambda self, key: (copies.append(key), capture(self, key))[1])
    with awake(trainer):
        trainer.begin("rl")
        trainer.step(ragged_batch(), CLIP)
        copies.clear()
        snapshot = trainer.snapshot()
        assert not copies
        first = copied(snapshot)
        assert len(copies) == 1
        trainer.step(ragged_batch(seed=1), CLIP)
    assert same(copied(snapshot), first)
    snapshot.release()


@pytest.mark.parametrize("change", ["step", "begin", "load"])
def test_what_was_marked_is_what_is_saved_whatever_changes_the_trainer_before_it_is_read(
    change: str, make_fsdp_trainer: MakeFsdpTrainer
) -> None:
    events: list[Event] = []
    trainer, twin = make_fsdp_trainer(emit=events.append), make_fsdp_trainer()
    for one in (trainer, twin):
        with awake(one):
            one.begin("warm_up")
            one.step(ragged_batch(), CLIP)
    with awake(twin):
        right = copied(twin.snapshot())
    other = make_fsdp_trainer()
    with awake(trainer), awake(other):
        snapshot = trainer.snapshot()
        match change:
            case "step":
                trainer.step(ragged_batch(seed=1), CLIP)
            case "begin":
                trainer.begin("rl")
            case _:
                trainer.load(copied(other.snapshot()))
    assert same(copied(snapshot), right)
    snapshot.release()


def test_a_step_that_has_to_wait_for_the_copy_of_a_save_says_so(
    make_fsdp_trainer: MakeFsdpTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Event] = []
    trainer, slow = make_fsdp_trainer(emit=events.append), threading.Event()
    capture = HostArenaSaver.capture
    monkeypatch.setattr(HostArenaSaver, "capture", lambda self, key: (slow.wait(0.05), capture(self, key))[1])
    with awake(trainer):
        trainer.begin("rl")
        trainer.step(ragged_batch(), CLIP)
        snapshot = trainer.snapshot()
        trainer.step(ragged_batch(seed=1), CLIP)
    (stall,) = [event for event in events if isinstance(event, PhaseDone) and event.name == "save_stall"]
    assert stall.owner == "trainer" and stall.seconds > 0.04
    snapshot.release()


def test_what_was_marked_is_copied_before_the_trainer_is_closed(
    make_fsdp_trainer: MakeFsdpTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, order = make_fsdp_trainer(), list[str]()
    capture, close = HostArenaSaver.capture, HostArenaSaver.close
    monkeypatch.setattr(HostArenaSaver, "capture", lambda self, key: (order.append("copy"), capture(self, key))[1])
    monkeypatch.setattr(HostArenaSaver, "close", lambda self: (order.append("close"), close(self))[1])
    with awake(trainer):
        trainer.begin("rl")
        snapshot = trainer.snapshot()
    trainer.close()
    assert order == ["copy", "close"]
    assert copied(snapshot).tensors
    snapshot.release()
