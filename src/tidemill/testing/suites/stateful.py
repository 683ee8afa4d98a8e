"""What everything that is saved and restored must do. Subclass `StatefulSuite` and give it a part and a change."""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tidemill.contracts.checkpoint import Saved, Snapshot, Stateful, TensorBytes
from tidemill.errors import CheckpointError

__all__ = ["StatefulCase", "StatefulSuite", "as_saved"]


@dataclass(frozen=True)
class StatefulCase:
    """`make` builds a fresh part, always alike; `change` brings one to another state."""

    make: Callable[[], Stateful]
    change: Callable[[Stateful], None]


def as_saved(snapshot: Snapshot) -> Saved:
    """What a checkpoint would give back for `snapshot`: bytes of its own, read-only, and `extra` through JSON."""
    tensors = {
        name: TensorBytes(dtype=tensor.dtype, shape=tuple(tensor.shape), data=memoryview(tensor.data.tobytes()))
        for name, tensor in snapshot.tensors.items()
    }
    return Saved(tensors=tensors, extra=json.loads(json.dumps(dict(snapshot.extra))))


def _state(part: Stateful) -> tuple[dict[str, tuple[str, tuple[int, ...], bytes]], str]:
    snapshot = part.snapshot()
    saved = as_saved(snapshot)
    snapshot.release()
    tensors = {name: (t.dtype, t.shape, bytes(t.data)) for name, t in saved.tensors.items()}
    return tensors, json.dumps(saved.extra, sort_keys=True)


class StatefulSuite:
    """Override the fixture `case`."""

    @pytest.fixture
    def case(self) -> StatefulCase:
        """How to build the part, and how to change it."""
        raise NotImplementedError("override the fixture `case`")

    def test_its_name_can_be_a_file_name(self, case: StatefulCase) -> None:
        name = case.make().name
        assert name.isascii() and name.isidentifier()

    def test_a_fresh_part_that_loads_a_state_has_that_state(self, case: StatefulCase) -> None:
        part = case.make()
        case.change(part)
        wanted, saved = _state(part), as_saved(part.snapshot())
        fresh = case.make()
        fresh.load(saved)
        assert _state(fresh) == wanted

    def test_a_loaded_part_changes_as_the_saved_one_would(self, case: StatefulCase) -> None:
        part = case.make()
        saved = as_saved(part.snapshot())
        case.change(part)
        wanted = _state(part)
        other = case.make()
        case.change(other)
        other.load(saved)
        case.change(other)
        assert _state(other) == wanted

    def test_a_snapshot_does_not_change_until_it_is_released(self, case: StatefulCase) -> None:
        part = case.make()
        snapshot = part.snapshot()
        before = as_saved(snapshot)
        case.change(part)
        after = as_saved(snapshot)
        assert after.extra == before.extra
        assert {n: bytes(t.data) for n, t in after.tensors.items()} == {
            n: bytes(t.data) for n, t in before.tensors.items()
        }
        snapshot.release()

    def test_a_snapshot_is_released_from_any_thread_and_more_than_once(self, case: StatefulCase) -> None:
        part = case.make()
        snapshot = part.snapshot()
        failures: list[BaseException] = []

        def release() -> None:
            try:
                snapshot.release()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=release)
        thread.start()
        thread.join(10)
        snapshot.release()
        assert failures == [] and not thread.is_alive()
        case.change(part)
        part.snapshot().release()

    def test_an_unexpected_tensor_is_refused_and_changes_nothing(self, case: StatefulCase) -> None:
        saved, part = self._changed(case), case.make()
        before = _state(part)
        more = TensorBytes(dtype="U8", shape=(1,), data=memoryview(b"x"))
        self._refuses(part, Saved(tensors={**saved.tensors, "no/such.tensor": more}, extra=saved.extra))
        assert _state(part) == before

    def test_a_missing_tensor_is_refused_and_changes_nothing(self, case: StatefulCase) -> None:
        saved, part = self._changed(case), case.make()
        before = _state(part)
        for name in list(saved.tensors)[-1:]:
            rest = {other: tensor for other, tensor in saved.tensors.items() if other != name}
            self._refuses(part, Saved(tensors=rest, extra=saved.extra))
        assert _state(part) == before

    def test_a_tensor_of_another_shape_or_dtype_is_refused_and_changes_nothing(self, case: StatefulCase) -> None:
        saved, part = self._changed(case), case.make()
        before = _state(part)
        for name, tensor in list(saved.tensors.items())[-1:]:
            shape = TensorBytes(dtype=tensor.dtype, shape=(*tensor.shape, 1), data=tensor.data)
            dtype = TensorBytes(dtype="U8", shape=(tensor.data.nbytes,), data=tensor.data)
            for wrong in (shape, dtype):
                self._refuses(part, Saved(tensors={**saved.tensors, name: wrong}, extra=saved.extra))
        assert _state(part) == before

    @staticmethod
    def _changed(case: StatefulCase) -> Saved:
        other = case.make()
        case.change(other)
        return as_saved(other.snapshot())

    @staticmethod
    def _refuses(part: Stateful, saved: Saved) -> None:
        with pytest.raises(CheckpointError):
            part.load(saved)
