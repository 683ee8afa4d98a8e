"""The model folders of a run: when they are due, kept, refused, cleared (tidemill.checkpoint.exports).

Their layout: tidemill.checkpoint.export_layout.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.checkpoint.pieces import in_rows, piece

from tidemill.checkpoint.base_model import read_base_model
from tidemill.checkpoint.export import export_pieces, layout_of
from tidemill.checkpoint.export_layout import INDEX
from tidemill.checkpoint.exports import NoExports, RunExports
from tidemill.checkpoint.shard import LocalShard
from tidemill.contracts.checkpoint import Places, Shard, Snapshot
from tidemill.contracts.events import Event, Notice, ignore
from tidemill.errors import CheckpointError, WorkerError
from tidemill.faults import armed
from tidemill.testing.tiny import make_tiny_model

Arrays = dict[str, Any]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("base") / "a model ü", hidden=32, heads=4, kv_heads=2)


@pytest.fixture(scope="module")
def arrays(base: Path) -> Arrays:
    return {name: array + 1 for name, array in load_file(base / "model.safetensors").items()}


def snapshot_of(arrays: Arrays, ranks: int) -> Snapshot:
    """With moments, which nobody exports."""
    named = {f"model/{name}": array for name, array in arrays.items()} | {"optimizer/m": np.zeros(3, np.float32)}
    cut = {name: in_rows(array, ranks) for name, array in named.items()}
    shards: list[Shard] = [LocalShard({name: pieces[rank] for name, pieces in cut.items()}) for rank in range(ranks)]
    return Snapshot(shards=shards)


def exports(folder: Path, base: Path, **options: Any) -> RunExports:
    defaults: dict[str, Any] = {
        "folder": folder,
        "base": base,
        "dtype": "auto",
        "every": 4,
        "at_end": True,
        "last_step": 20,
        "emit": ignore,
    }
    return RunExports(**defaults | options)


def test_multiples_of_every_are_due_but_the_last_step_that_the_end_exports(tmp_path: Path, base: Path) -> None:
    due = [step for step in range(25) if exports(tmp_path, base).due(step)]
    assert due == [4, 8, 12, 16, 24]
    assert exports(tmp_path, base, at_end=False).due(20)
    assert not any(exports(tmp_path, base, every=0).due(step) for step in range(25))
    none = NoExports()
    assert not none.due(4) and not none.has(4)


def test_ranks_cut_by_columns_and_by_rows_make_the_files_that_one_makes(
    tmp_path: Path, base: Path, arrays: Arrays
) -> None:
    def quarter(array: Any, row: int, column: int) -> Any:
        half = [(-(-side // 2)) for side in array.shape]
        low = [half[0] * row, *(half[1:2] and [half[1] * column])]
        high = [array.shape[0] if row else half[0], *(half[1:2] and [array.shape[1] if column else half[1]])]
        if array.ndim == 1 and column:
            low, high = [array.shape[0]], [array.shape[0]]
        return piece(array, low, [top - bottom for bottom, top in zip(low, high, strict=True)])

    grid = [
        LocalShard({f"model/{name}": quarter(array, row, column) for name, array in arrays.items()})
        for row in (0, 1)
        for column in (0, 1)
    ]
    model = read_base_model(base)
    for name, pieces in {"one": snapshot_of(arrays, 1).shards, "grid": grid}.items():
        export_pieces(
            pieces=pieces, model=model, target=tmp_path / name, dtype="bfloat16", emit=ignore, shard_bytes=9000
        )
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert INDEX in names and len([name for name in names if name.endswith(".safetensors")]) > 3
    assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "grid" / name).read_bytes() for name in names)
    layout = layout_of(grid, model, dtype="bfloat16", shard_bytes=9000)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "grid").iterdir()}
    assert sum(sizes.values()) == layout.total_bytes
    places = layout.places(tmp_path)
    assert json.loads(layout.texts[INDEX])["weight_map"] == {name: place.path.name for name, place in places.items()}
    assert layout.tensor_bytes == sum(2 * array.size for array in arrays.values())


@pytest.mark.parametrize("ranks", [1, 3])
def test_one_that_is_there_is_kept_if_it_is_the_same_and_refused_if_not(
    tmp_path: Path, base: Path, arrays: Arrays, ranks: int
) -> None:
    events: list[Event] = []
    run = exports(tmp_path, base, emit=events.append)
    target = run.write(4, [snapshot_of(arrays, 2)])
    assert run.has(4) and target == run.path(4) == tmp_path / "step-00000004"
    before = (target / "model.safetensors").stat().st_mtime_ns
    assert run.write(4, [snapshot_of(arrays, ranks)]) == target
    assert (target / "model.safetensors").stat().st_mtime_ns == before
    assert "holds this very model already" in [event.text for event in events if isinstance(event, Notice)][-1]
    other = {name: array.copy() for name, array in arrays.items()}
    other["model.norm.weight"][-1] += 1
    with pytest.raises(CheckpointError, match="holds another model or dtype than this run's; move it away"):
        run.write(4, [snapshot_of(other, ranks)])
    with pytest.raises(CheckpointError, match="holds another model"):
        exports(tmp_path, base, dtype="bfloat16").write(4, [snapshot_of(arrays, ranks)])


class Odd(LocalShard):
    """A rank that does something else when it is to place its pieces."""

    def __init__(self, shard: Any, place: Callable[..., int]) -> None:
        super().__init__(shard._tensors)
        self._place = place

    def place(self, places: Any, advance: Callable[[int], None], *, last: bool = False) -> int:
        return self._place(super().place, places, advance)


def dies(place: Callable[..., int], places: Places, advance: Callable[[int], None]) -> int:
    advance(10)
    raise WorkerError("trainer-1 died (exit code -9)")


def sees_nothing(place: Callable[..., int], places: Places, advance: Callable[[int], None]) -> int:
    path = next(iter(places.values()))[0].path
    raise FileNotFoundError(2, "trainer-1 on b: No such file or directory", str(path))


def forgets_one(place: Callable[..., int], places: Places, advance: Callable[[int], None]) -> int:
    return place({name: where for name, where in places.items() if "norm" not in name}, advance)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (dies, r"cannot export to .*step-00000004: trainer-1 died"),
        (sees_nothing, r"does not see .*trainer-1 on b.*a file system that every host of the run shares"),
        (forgets_one, r"of 1\d+ bytes were written; is a rank missing"),
    ],
)
def test_a_rank_that_fails_is_named_and_nothing_is_left(
    tmp_path: Path, base: Path, arrays: Arrays, fault: Callable[..., int], said: str
) -> None:
    shards = list(snapshot_of(arrays, 3).shards)
    shards[1] = Odd(shards[1], fault)
    run = exports(tmp_path, base)
    with pytest.raises(CheckpointError, match=said):
        run.write(4, [Snapshot(shards=shards)])
    assert list(tmp_path.iterdir()) == [] and not run.has(4)
    run.write(4, [snapshot_of(arrays, 3)])


def test_a_rank_that_is_not_there_is_found_before_anything_is_written(
    tmp_path: Path, base: Path, arrays: Arrays
) -> None:
    shards = snapshot_of(arrays, 3).shards
    with pytest.raises(CheckpointError, match=r"the pieces do not make whole tensors: .*elements, the first missing"):
        exports(tmp_path, base).write(4, [Snapshot(shards=[shards[0], shards[2]])])
    assert list(tmp_path.iterdir()) == []


def test_who_waits_no_more_ends_the_export_and_nothing_is_left(tmp_path: Path, base: Path, arrays: Arrays) -> None:
    def stop(count: int) -> None:
        raise RuntimeError("nobody waits")

    with pytest.raises(RuntimeError, match="nobody waits"):
        exports(tmp_path, base).write(4, [snapshot_of(arrays, 2)], stop)
    assert list(tmp_path.iterdir()) == []


def test_what_a_kill_left_is_cleared_and_nothing_else(tmp_path: Path, base: Path) -> None:
    run = exports(tmp_path / "export", base)
    run.clear()  # there is no folder yet
    for name in (".step-00000004.tidemill-export", ".trial.tidemill-export", "step-00000008", "mine"):
        (tmp_path / "export" / name).mkdir(parents=True)
    run.clear()
    assert sorted(path.name for path in (tmp_path / "export").iterdir()) == ["mine", "step-00000008"]


def test_room_is_counted_for_an_export_and_a_save_beside_it(tmp_path: Path, base: Path, arrays: Arrays) -> None:
    snapshots = [snapshot_of(arrays, 2)]
    size = layout_of(snapshots[0].shards, read_base_model(base), dtype="auto").total_bytes
    saves = tmp_path / "checkpoints"

    def rehearse(free: int, save_bytes: int = 10**7) -> None:
        run = exports(tmp_path / "export", base, free=lambda folder: free)
        run.rehearse(snapshots, saves=saves, save_bytes=save_bytes)

    rehearse(size + 10**7 + (1 << 20))
    with pytest.raises(CheckpointError, match=r"a checkpoint beside it .* are free there; free some.*export_every = 0"):
        rehearse(size + 10**7)
    assert list(tmp_path.iterdir()) == []


def test_a_trial_leaves_nothing_and_finds_what_an_export_would(tmp_path: Path, base: Path, arrays: Arrays) -> None:
    snapshots = [snapshot_of(arrays, 2)]
    parent = tmp_path / "export"
    run = exports(parent, base)
    for _ in range(2):
        run.attempt(snapshots)
        assert list(parent.iterdir()) == []
    with armed("export.text=disk-full"), pytest.raises(CheckpointError, match=r"cannot export to .*No space left"):
        run.attempt(snapshots)
    assert list(parent.iterdir()) == []
    (parent / ".trial-renamed.tidemill-export").mkdir()  # left by a kill
    run.attempt(snapshots)
    with pytest.raises(CheckpointError, match="1 missing"):
        fewer = {name: array for name, array in arrays.items() if name != "model.norm.weight"}
        run.rehearse([snapshot_of(fewer, 2)], saves=tmp_path, save_bytes=0)
    with pytest.raises(CheckpointError, match="not a readable model folder"):
        exports(parent, tmp_path / "gone").attempt(snapshots)
    with pytest.raises(CheckpointError, match="use auto"):
        exports(parent, base, dtype="int4").attempt(snapshots)
    parent.rmdir()
    parent.write_text("in the way")
    with pytest.raises(CheckpointError, match=r"cannot export to .*choose another run.dir, or set checkpoint.export ="):
        run.attempt(snapshots)


def copy_of(base: Path, target: Path) -> Path:
    shutil.copytree(base, target)
    return target


def test_a_base_without_a_tokenizer_is_refused_with_what_to_do(tmp_path: Path, base: Path, arrays: Arrays) -> None:
    bare = copy_of(base, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer to go with the weights \(tokenizer.json, .*put it"):
        exports(tmp_path / "export", bare).attempt([snapshot_of(arrays, 1)])


def test_a_generation_config_that_contradicts_itself_is_told_of_and_exported_as_it_is(
    tmp_path: Path, base: Path, arrays: Arrays
) -> None:
    odd, events = copy_of(base, tmp_path / "odd"), list[Event]()
    text = (Path(__file__).parents[1] / "data" / "generation_config_contradictory.json").read_bytes()
    (odd / "generation_config.json").write_bytes(text)
    run = exports(tmp_path / "export", odd, emit=events.append)
    run.attempt([snapshot_of(arrays, 1)])
    (warning,) = [event for event in events if isinstance(event, Notice)]
    assert warning.level == "warning" and "contradicts itself: `temperature`" in warning.text
    assert "`top_p`" in warning.text and "mend it in the base model" in warning.text
    assert (run.write(4, [snapshot_of(arrays, 1)]) / "generation_config.json").read_bytes() == text
    for broken in ("{", "[]"):
        (odd / "generation_config.json").write_text(broken)
        with pytest.raises(CheckpointError, match=r"transformers does not read .*generation_config.json"):
            run.attempt([snapshot_of(arrays, 1)])
