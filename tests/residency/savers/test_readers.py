"""Sleep while a snapshot is read, with few spare pages: nothing that is read changes, and only what must wait waits.

`tidemill.residency.savers.host_arena` and `tidemill.residency.savers.crossing`.
"""

import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.residency.savers.kinds import RESIZED, of_kind

from tidemill import faults
from tidemill.checkpoint.safetensors_file import TensorFile
from tidemill.checkpoint.shard import write_shard
from tidemill.contracts.checkpoint import Snapshot
from tidemill.contracts.footprint import Part
from tidemill.errors import CheckpointError, ResidencyError
from tidemill.residency.savers.crossing import Captured

PAGE = 512
FLOATS = PAGE // 4


class Flat:
    """One buffer of ten pages, as Megatron makes: two tensors in it that lie on several pages each, and moments."""

    def __init__(self, **changes: Any) -> None:
        self.flat = torch.zeros(10 * FLOATS)
        self.first, self.second = self.flat[: 5 * FLOATS].view(5, -1), self.flat[5 * FLOATS :].view(5, -1)
        self.moment = torch.zeros(FLOATS)
        self.saver = of_kind(RESIZED, **{"page_bytes": PAGE, **changes})
        self.saver.add("first", self.first, Part.WEIGHTS)
        self.saver.add("second", self.second, Part.WEIGHTS)
        self.saver.add("moment", self.moment, Part.OPTIMIZER)
        self.saver.freeze()
        self.version = 0

    def step(self) -> None:
        self.version += 1
        self.flat.fill_(self.version)
        self.moment.fill_(-self.version)

    def capture(self) -> Captured:
        return self.saver.capture(self.version)

    def snapshot(self) -> Snapshot:
        self.capture()
        return self.saver.snapshot()


def values(snapshot: Snapshot, name: str) -> set[float]:
    return set(np.frombuffer(snapshot.tensors[name].data, np.float32).tolist())


def test_with_room_for_it_a_sleep_waits_for_no_reader_and_the_host_pages_do_not_grow() -> None:
    run = Flat(spare_bytes=11 * PAGE)
    run.step()
    held, before = run.snapshot(), run.saver.host_bytes()
    run.step()
    captured = run.capture()
    assert captured == Captured(copied=11 * PAGE, waited=0.0)
    assert values(held, "first") == values(held, "second") == {1.0} and values(held, "moment") == {-1.0}
    assert values(run.saver.snapshot(), "second") == {2.0}
    assert run.saver.host_bytes() == before == 22 * PAGE


def test_a_tensor_whose_pages_lie_apart_is_written_to_a_file_in_pieces(tmp_path: Path) -> None:
    run = Flat(spare_bytes=3 * PAGE)
    run.step()
    held = run.snapshot()
    held.written("first")
    held.written("moment")
    run.step()
    late = threading.Timer(0.1, held.release)
    late.start()
    run.capture()  # `second` gets the three spare pages, and waits for the other two
    late.join()
    snapshot = run.saver.snapshot()
    assert len(list(snapshot.tensors["second"].pieces())) > 1
    write_shard(tmp_path / "a", snapshot.tensors, lambda count: None, written=snapshot.written)
    read = TensorFile(tmp_path / "a").tensors()
    assert set(np.frombuffer(read["second"].data, np.float32).tolist()) == {2.0}
    assert run.saver.references() == 0


def test_a_sleep_waits_for_single_pages_until_their_tensors_are_written() -> None:
    run = Flat(spare_bytes=0)
    run.step()
    held = run.snapshot()
    run.step()
    order: list[str] = []

    def write() -> None:
        for name in ("first", "moment", "second"):
            time.sleep(0.1)
            assert values(held, name) == {-1.0 if name == "moment" else 1.0}
            order.append(name)
            held.written(name)

    writer = threading.Thread(target=write)
    writer.start()
    captured = run.capture()
    assert order == ["first", "moment", "second"]
    assert captured.copied == 11 * PAGE and 0.2 < captured.waited < 5
    writer.join(5)
    run.saver.release(run.version)
    run.saver.restore()
    assert set(run.flat.tolist()) == {2.0} and set(run.moment.tolist()) == {-2.0}


def test_what_was_written_is_not_read_again() -> None:
    run = Flat()
    held = run.snapshot()
    held.written("first")
    held.written("first")
    with pytest.raises(CheckpointError, match="let go of"):
        held.tensors["first"].pieces()
    assert values(held, "second") == {0.0}
    held.release()
    with pytest.raises(CheckpointError, match="let go of"):
        _ = held.tensors["second"].data


def test_a_reader_that_does_not_let_go_is_named_and_all_stays_awake_and_whole() -> None:
    run = Flat(spare_bytes=PAGE, deadline=0.1)
    run.step()
    held = run.snapshot()
    run.step()
    with pytest.raises(ResidencyError, match=r"the snapshot of version 1 \(5\.5 KiB\).*raise residency\.spare"):
        run.capture()
    assert run.saver.resident_part() == Part.WEIGHTS | Part.OPTIMIZER
    assert set(run.flat.tolist()) == {2.0}
    assert values(held, "first") == {1.0}
    with pytest.raises(ResidencyError, match="no whole version"):
        run.saver.release(run.version)
    held.release()
    assert run.capture().waited == 0.0
    run.saver.release(run.version)
    run.saver.restore()
    assert set(run.flat.tolist()) == {2.0}


@pytest.mark.parametrize("writes", ["capture", "leave", "load"])
def test_a_reader_may_be_slow_as_long_as_it_lets_go_of_one_tensor_after_another(writes: str) -> None:
    run = Flat(spare_bytes=0, deadline=0.3)
    run.step()
    held = run.snapshot()
    kept: Any = {name: _copy(tensor) for name, tensor in held.tensors.items()}
    run.step()

    def slow_disk() -> None:
        for name in ("first", "moment", "second"):
            time.sleep(0.2)
            held.written(name)

    writer = threading.Thread(target=slow_disk)
    writer.start()
    began = time.monotonic()
    match writes:
        case "capture":
            assert run.capture().waited > 0.4
        case "leave":
            for _ in run.saver.leave(run.version):
                pass
            run.saver.restore()
        case "load":
            run.saver.load(kept)
    assert time.monotonic() - began > 0.5
    writer.join(5)
    assert set(run.flat.tolist()) == {1.0 if writes == "load" else 2.0}


def test_nothing_stands_behind_a_sleep_that_waits() -> None:
    run = Flat(spare_bytes=0)
    run.step()
    run.capture()
    run.saver.release(run.version)
    run.saver.restore(Part.WEIGHTS)
    run.version += 1
    run.flat.fill_(2.0)
    held = run.saver.snapshot()
    found: list[Captured] = []
    sleeping = threading.Thread(target=lambda: found.append(run.capture()))
    sleeping.start()
    time.sleep(0.1)
    assert sleeping.is_alive()
    began = time.monotonic()
    assert run.saver.resident_part() == Part.WEIGHTS
    run.saver.restore(Part.OPTIMIZER)
    assert set(run.moment.tolist()) == {-1.0}
    assert values(held, "first") == {1.0}
    with pytest.raises(ResidencyError, match="no whole version"):
        run.saver.snapshot()
    assert sleeping.is_alive() and time.monotonic() - began < 1
    held.release()
    sleeping.join(5)
    assert found[0].waited > 0.1
    assert values(run.saver.snapshot(), "first") == {2.0}


def test_a_capture_that_fails_with_copies_of_a_reader_at_stake_changes_no_page_that_is_read() -> None:
    run = Flat(spare_bytes=4 * PAGE)
    run.step()
    held = run.snapshot()
    run.step()
    with faults.armed("residency.capture.slab=raise@2"), pytest.raises(faults.FaultInjected):
        run.capture()
    assert values(held, "first") == values(held, "second") == {1.0} and values(held, "moment") == {-1.0}
    held.release()
    run.capture()
    assert values(run.saver.snapshot(), "second") == {2.0}


def test_a_load_waits_for_readers_too() -> None:
    run = Flat(spare_bytes=0)
    run.step()
    run.capture()
    held = run.saver.snapshot()
    kept: Any = {name: _copy(tensor) for name, tensor in held.tensors.items()}
    run.step()
    timer = threading.Timer(0.1, held.release)
    timer.start()
    run.saver.load(kept)
    timer.join()
    assert set(run.flat.tolist()) == {1.0} and set(run.moment.tolist()) == {-1.0}


def _copy(tensor: Any) -> Any:
    kind, arguments = tensor.__reduce__()
    return kind(*arguments)


def test_random_walks_of_steps_sleeps_and_writers_of_their_own_threads_keep_every_version() -> None:
    dice, run = random.Random(0), Flat(spare_bytes=3 * PAGE)
    bound = run.saver.host_bytes()
    problems: list[str] = []

    def write(snapshot: Snapshot, version: int, seed: int) -> None:
        order = ["first", "second", "moment"]
        random.Random(seed).shuffle(order)
        for name in order:
            time.sleep(random.Random(seed).random() * 0.003)
            if {abs(value) for value in values(snapshot, name)} != {float(version)}:
                problems.append(f"I3 {name} of version {version} changed")
            snapshot.written(name)
        snapshot.release()

    writers: list[threading.Thread] = []
    for seed in range(150):
        run.step()
        run.capture()
        if dice.random() < 0.6:
            writers.append(threading.Thread(target=write, args=(run.saver.snapshot(), run.version, seed)))
            writers[-1].start()
        run.saver.release(run.version)
        run.saver.restore()
        assert set(run.flat.tolist()) == {float(run.version)}, "I11"
        assert run.saver.host_bytes() == bound == 14 * PAGE, "I6"
    for writer in writers:
        writer.join(10)
    assert not problems
    assert run.saver.references() == 0, "I5"
