"""Snapshots whose copy is still under way (`tidemill.residency.savers.promised`)."""

import threading
import time

import pytest
import torch
from tests.residency.savers.late import LateTransfer
from tests.residency.savers.test_beginning import contents, saver_of

from tidemill import faults
from tidemill.contracts.checkpoint import Snapshot
from tidemill.errors import CheckpointError
from tidemill.residency.contents import PagedTensor
from tidemill.residency.savers import host_arena
from tidemill.residency.savers.promised import Promises


@pytest.fixture
def tensors() -> list[torch.Tensor]:
    return [torch.randn(100 + 50 * n) for n in range(8)]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateTransfer:
    transfer = LateTransfer()
    monkeypatch.setattr(host_arena, "transfer_for", lambda device: transfer)
    return transfer


def bytes_of(snapshot: Snapshot) -> list[bytes]:
    return [b"".join(map(bytes, tensor.pieces())) for tensor in snapshot.tensors.values()]


def test_it_is_taken_at_once_and_reading_waits_for_the_copy(tensors: list[torch.Tensor], late: LateTransfer) -> None:
    saver, right = saver_of(tensors), contents(tensors)
    late.seconds = 0.02
    promises = Promises(saver)
    saver.begin_capture(1)
    began = time.monotonic()
    snapshot = promises.snapshot(1)
    assert [tensor.spec.shape for tensor in snapshot.tensors.values()] == [tuple(t.shape) for t in tensors]
    assert time.monotonic() - began < 0.05 and saver.sealed_key is None
    assert bytes_of(snapshot) == right
    assert saver.sealed_key == 1
    snapshot.release()
    assert saver.references() == 0


def test_once_it_is_copied_its_tensors_are_those_of_the_pages_and_no_others(tensors: list[torch.Tensor]) -> None:
    saver = saver_of(tensors)
    first, *others = saver.ledger.by_name
    snapshot = Promises(saver, wanted=lambda entry: entry.name == first).snapshot(1)
    assert not isinstance(snapshot.tensors[first], PagedTensor)
    assert next(iter(snapshot.tensors[first].pieces())) == contents(tensors)[0]
    assert isinstance(snapshot.tensors[first], PagedTensor)
    assert list(snapshot.tensors) == [first] and others[0] not in snapshot.tensors
    with pytest.raises(KeyError):
        snapshot.tensors[others[0]]
    snapshot.written(first)
    assert saver.references() == 0
    with pytest.raises(CheckpointError, match="it was let go of"):
        snapshot.tensors[first].pieces()
    snapshot.release()


def test_a_sleep_that_follows_takes_the_copy_over(tensors: list[torch.Tensor], late: LateTransfer) -> None:
    saver, right = saver_of(tensors), contents(tensors)
    promises = Promises(saver)
    saver.begin_capture(1)
    once = late.copies
    snapshot = promises.snapshot(1)
    saver.begin_capture(1)
    saver.capture(1)
    saver.release(1)
    assert bytes_of(snapshot) == right
    assert late.copies == once
    saver.restore()
    assert contents(tensors) == right


def test_who_is_about_to_change_something_waits_for_the_copy_and_the_snapshot_stays_what_it_was(
    tensors: list[torch.Tensor], late: LateTransfer
) -> None:
    saver, right = saver_of(tensors, spare_bytes=1 << 16), contents(tensors)
    late.seconds = 0.005
    promises = Promises(saver)
    saver.begin_capture(1)
    snapshot = promises.snapshot(1)
    promises.settle()
    for tensor in tensors:
        tensor.mul_(3.0)
    saver.capture(2)
    assert bytes_of(snapshot) == right
    snapshot.release()
    assert saver.references() == 0


def test_a_thread_that_writes_waits_while_the_owner_goes_on(tensors: list[torch.Tensor], late: LateTransfer) -> None:
    saver, right = saver_of(tensors), contents(tensors)
    late.seconds = 0.02
    promises, found = Promises(saver), list[list[bytes]]()
    snapshot = promises.snapshot(1)
    writer = threading.Thread(target=lambda: found.append(bytes_of(snapshot)))
    writer.start()
    promises.settle()
    writer.join(10)
    assert found == [right]
    for name in snapshot.tensors:
        snapshot.written(name)
    assert saver.references() == 0


def test_what_is_let_go_of_before_it_is_copied_is_not_held_and_not_waited_for(tensors: list[torch.Tensor]) -> None:
    saver = saver_of(tensors)
    promises = Promises(saver)
    some, none = promises.snapshot(1), promises.snapshot(1)
    none.release()
    for name in list(some.tensors)[1:]:
        some.written(name)
    promises.settle()
    assert bytes(some.tensors["0"].data) == contents(tensors)[0]
    with pytest.raises(CheckpointError, match="cannot read '3' from the host copy"):
        bytes(some.tensors["3"].data)
    with pytest.raises(CheckpointError, match="it was let go of"):
        bytes(none.tensors["0"].data)
    assert saver.references() == 1
    some.release()
    assert saver.references() == 0


@pytest.mark.parametrize("on_its_way", ["leave", "arrive"])
def test_a_thread_that_writes_waits_for_a_sleep_or_a_wake_that_is_half_done(
    tensors: list[torch.Tensor], on_its_way: str
) -> None:
    saver, right, read = saver_of(tensors), contents(tensors), list[list[bytes]]()
    promises = Promises(saver)
    snapshot = promises.snapshot(1)
    if on_its_way == "arrive":
        saver.capture(1)
        saver.release(1)
    pieces = saver.leave(1) if on_its_way == "leave" else saver.arrive()
    next(pieces)
    writer = threading.Thread(target=lambda: read.append(bytes_of(snapshot)))
    writer.start()
    writer.join(0.1)
    for _ in pieces:
        pass
    writer.join(5)
    assert read == [right]
    snapshot.release()
    assert saver.references() == 0


def test_a_copy_that_fails_is_the_readers_failure_and_nobody_elses(tensors: list[torch.Tensor]) -> None:
    saver = saver_of(tensors)
    promises = Promises(saver)
    snapshot = promises.snapshot(1)
    with faults.armed("residency.capture.slab=raise@3"):
        promises.settle()
    with pytest.raises(CheckpointError, match="the copy to the host failed"):
        bytes(snapshot.tensors["0"].data)
    snapshot.release()
    again = promises.snapshot(1)
    assert bytes_of(again) == contents(tensors)
    again.release()
    assert saver.references() == 0


def test_contents_that_changed_without_a_word_are_never_handed_out_as_those_before(tensors: list[torch.Tensor]) -> None:
    saver = saver_of(tensors)
    promises = Promises(saver)
    snapshot = promises.snapshot(1)

    class Changed:
        ledger, snapshot = saver.ledger, saver.snapshot
        sealed_key = 2

        def capture(self, key: object) -> None:
            saver.capture(2)

    other = Promises(Changed())
    wrong = other.snapshot(1)
    with pytest.raises(CheckpointError, match="the contents changed before they were copied"):
        bytes(wrong.tensors["0"].data)
    assert bytes_of(snapshot)
