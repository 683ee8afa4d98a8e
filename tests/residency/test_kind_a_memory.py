"""Faults of kind A that are of memory: A11, A13, A14 and A15, with the real trainer, engine, saver and leases."""

import threading
from pathlib import Path

import psutil
import pytest
import torch
from tests.residency.kind_a_pair import Pair

from tidemill import faults
from tidemill.contracts.events import Notice, ignore
from tidemill.contracts.footprint import Part
from tidemill.contracts.residency import Moved
from tidemill.contracts.state import PolicyVersion
from tidemill.engines.transformers.engine import TransformersEngine
from tidemill.errors import ResidencyError
from tidemill.residency.manager import LeaseManager
from tidemill.testing.suites.trainer import copied, same
from tidemill.testing.tiny import make_tiny_model

ROUNDS = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, heads=2, kv_heads=2)


# A11: a wake that runs out of memory


def moves_on_wake(pair: Pair) -> int:
    """How many pieces a whole wake of the trainer brings."""
    pair.sleep_trainer()
    with faults.passed() as points, pair.residency.awake(pair.trainer):
        pass
    return points.count("residency.restore.slab")


def allocated(pair: Pair) -> int:
    """Bytes that are really there behind the trainer's tensors, whatever it says itself."""
    tensors = [tensor for tensor, _ in pair.trainer._memory._state().values()]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_a11_a_wake_that_fails_at_any_piece_gives_all_back_and_the_next_one_is_exact(folder: Path) -> None:
    """A11: memory at the asleep level, the state asleep, nothing leased; then the wake works, with exact bits."""
    pair, twin = Pair(folder), Pair(folder)
    for one in (pair, twin):
        one.step()
    assert allocated(pair) > 0
    pieces = moves_on_wake(pair)
    assert pieces > 3
    for failing in range(1, pieces + 1):
        pair.sleep_trainer()
        host = pair.trainer.host_bytes()
        with (
            faults.armed(f"residency.restore.slab=raise@{failing}"),
            pytest.raises(ResidencyError, match="trainer|restore"),
            pair.residency.awake(pair.trainer),
        ):
            raise AssertionError("a lease was granted")
        assert pair.trainer.resident() == Part.NONE
        assert pair.held(pair.trainer) == 0
        assert allocated(pair) == 0
        assert pair.trainer.host_bytes() == host
        with pytest.raises(ResidencyError):
            pair.trainer.begin("rl")
        assert pair.weights() == twin.weights()
    for one in (pair, twin):
        one.step()
    assert same(state(pair), state(twin))


def state(pair: Pair):
    pair.sleep_trainer()
    snapshot = pair.trainer.snapshot()
    try:
        return copied(snapshot)
    finally:
        snapshot.release()


def test_a11_an_engine_whose_wake_breaks_off_has_no_room_that_is_half_ready(folder: Path) -> None:
    """A11 for the engine: what it computes is written anew at a wake, and a wake that did not write it has not been."""
    pair = Pair(folder)
    pair.step()
    before = [answer.token_ids for answer in pair.generate()]
    with pair.residency.awake(pair.trainer):
        pass
    assert pair.held(pair.engine) == 0
    buffers = pair.engine._weights._buffers
    name, right = buffers.popitem()
    buffers[name] = torch.empty(3, 5)  # fits nowhere
    with pytest.raises(ResidencyError), pair.residency.awake(pair.engine):
        raise AssertionError("a lease was granted")
    assert pair.engine.resident() == Part.NONE
    assert pair.engine.gate.allowed == Part.NONE
    buffers[name] = right
    with pair.residency.awake(pair.trainer):
        pair.sync.update_weights(pair.trainer, pair.engine, PolicyVersion(1, 1))
    assert [answer.token_ids for answer in pair.generate()] == before


# A13: host memory


def test_a13_thirty_rounds_use_one_host_copy_and_resident_bytes_stay_flat(tmp_path: Path) -> None:
    """A13: the copies are one fixed buffer, used again, awake and asleep."""
    folder = make_tiny_model(tmp_path, hidden=256, intermediate=1024, heads=4, kv_heads=4)
    pair = Pair(folder, kv_tokens=1 << 14)
    process, host, resident = psutil.Process(), [], []
    for _ in range(ROUNDS):
        pair.step()
        host.append(pair.trainer.host_bytes())
        pair.generate(1)
        host.append(pair.trainer.host_bytes())
        resident.append(process.memory_info().rss)
    one_copy = pair.trainer.footprint(Part.WEIGHTS | Part.OPTIMIZER)
    assert one_copy > 20 << 20
    assert set(host) == {host[0]}
    assert one_copy <= host[0] < 1.11 * one_copy  # a tenth of it in spare pages, and alignment
    assert resident[-1] - resident[9] < one_copy / 4, resident
    assert pair.residency.transitions()["trainer"][0] == ROUNDS


# A14: a sleep that frees nothing


class Insomniac(TransformersEngine):
    """Says that it slept."""

    def sleep(self) -> Moved:
        return Moved()


class HalfAsleep(TransformersEngine):
    """Gives its cache back and keeps its weights."""

    def sleep(self) -> Moved:
        self._kv_awake = False
        return Moved()


def test_a14_an_engine_that_frees_nothing_fails_its_sleep_with_the_reason_and_the_asker_waits_outside(
    folder: Path,
) -> None:
    """A14: how much was freed is looked at, and what to do is said."""
    pair = Pair(folder, kind=Insomniac)
    pair.step()
    pair.generate()
    with (
        pytest.raises(ResidencyError, match=r"engine went to sleep and still holds .*residency\.offload=never"),
        pair.residency.awake(pair.trainer),
    ):
        raise AssertionError("a lease was granted")
    assert pair.trainer.gate.allowed == Part.NONE
    assert pair.held(pair.trainer) == 0
    assert pair.most_held() <= pair.budget
    assert pair.generate(), "who is awake goes on"


def test_a14_an_engine_that_frees_too_little_is_no_room_either(folder: Path) -> None:
    """A14, by half: what is still held counts, so that the trainer beside it is refused with the ledger."""
    pair = Pair(folder, kind=HalfAsleep)
    pair.step()
    pair.generate()
    residency = LeaseManager(budget=pair.trainer.footprint(Part.ALL), emit=ignore, deadline=1.0)
    residency.admit(pair.engine)
    with pytest.raises(ResidencyError, match="cannot wake trainer"), residency.awake(pair.trainer):
        raise AssertionError("a lease was granted")
    assert pair.held(pair.trainer) == 0


# A15: what others allocate


def test_a15_what_another_thread_allocates_meanwhile_and_keeps_stops_no_sleep(folder: Path) -> None:
    """A15: a tenant is asked for its own account; nobody looks at how much of the device is free.

    Its gate looks for leaks at sleeps 1, 2, 4 and 16 on a CPU: more than it tolerates is a warning, unless it grows on.
    """
    pair = Pair(folder)
    for _ in range(2):
        pair.step()
        pair.generate()
    stop, ready, kept = threading.Event(), threading.Event(), list[torch.Tensor]()

    def allocate() -> None:
        kept.append(torch.ones(150 << 18))
        while not stop.wait(0.001):
            kept[1:] = [torch.ones(20 << 18)]
            ready.set()

    thread = threading.Thread(target=allocate)
    thread.start()
    try:
        assert ready.wait(timeout=10)
        for _ in range(16):
            pair.step()
            assert len(pair.generate()) == 3
            assert pair.held(pair.trainer) == 0
    finally:
        stop.set()
        thread.join(timeout=10)
    warnings = [event.text for event in pair.events if isinstance(event, Notice) and event.level == "warning"]
    assert sum("have no owner" in text for text in warnings) == 1
