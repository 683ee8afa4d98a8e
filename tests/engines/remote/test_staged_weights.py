"""tidemill.engines.remote.staged_weights."""

import gc
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tidemill.engines.remote.staged_weights import StagedWeights, make_folder
from tidemill.errors import WeightSyncError
from tidemill.testing.tiny import make_tiny_model

SHAPES: dict[str, tuple[int, ...]] = {"a": (3, 5), "b": (7,), "c.weight": (2, 2, 2)}
FIRST = {name: torch.randn(shape) for name, shape in SHAPES.items()}


def staged(tmp_path: Path, dtype: torch.dtype = torch.float32, **aliases: str) -> StagedWeights:
    model = tmp_path / "model"
    if not model.exists():
        make_tiny_model(model)
    told = {"model": model, "shapes": SHAPES, "dtype": dtype, "aliases": aliases, "device": torch.device("cpu")}
    return StagedWeights(make_folder(tmp_path / "there"), **told)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_loaded_lies_in_a_file_that_others_read_and_aliases_beside_it(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    weights = staged(tmp_path, dtype, head="a")
    weights.begin()
    weights.load(FIRST.items())
    weights.flush()
    read = load_file(weights.folder / "model.safetensors")
    assert set(read) == {*SHAPES, "head"}
    for name, tensor in FIRST.items():
        assert torch.equal(read[name], tensor.to(dtype))
    assert torch.equal(read["head"], FIRST["a"].to(dtype))
    assert weights.nbytes == 30 * dtype.itemsize
    assert weights.held_bytes == (weights.folder / "model.safetensors").stat().st_size


def test_it_is_a_model_folder_without_the_models_own_weights(tmp_path: Path) -> None:
    weights = staged(tmp_path)
    weights.begin()
    assert (weights.folder / "config.json").read_bytes() == (tmp_path / "model/config.json").read_bytes()
    assert (weights.folder / "tokenizer.json").exists()
    assert set(weights.missing()) == set(SHAPES)


def test_the_next_version_is_written_into_the_same_bytes(tmp_path: Path) -> None:
    weights = staged(tmp_path)
    weights.begin()
    weights.load(FIRST.items())
    views = weights.views()
    weights.begin()
    assert set(weights.missing()) == set(SHAPES)
    weights.load((name, tensor + 1) for name, tensor in FIRST.items())
    assert weights.missing() == ()
    for name, tensor in FIRST.items():
        assert torch.equal(views[name], tensor + 1)


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    weights = staged(tmp_path)
    weights.begin()
    with pytest.raises(WeightSyncError, match=r"b into the engine: it came as \(8,\) and should be \(7,\)"):
        weights.load([("b", torch.zeros(8))])
    with pytest.raises(WeightSyncError, match="load d into"):
        weights.load([("d", torch.zeros(8))])
    weights.load([("b", FIRST["b"])])
    with pytest.raises(WeightSyncError, match="twice"):
        weights.load([("b", FIRST["b"])])


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = staged(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(WeightSyncError, match=r"cannot stage .* No space left on device; .*engine.weights_folder"):
        weights.begin()
    assert weights.held_bytes == 0
    monkeypatch.undo()
    weights.begin()
    weights.load(FIRST.items())


def test_the_folder_goes_with_its_owner_and_with_a_process_that_is_gone(tmp_path: Path) -> None:
    weights = staged(tmp_path)
    folder = weights.folder
    del weights
    gc.collect()
    assert not folder.exists()
    (tmp_path / "there" / "tidemill-weights-999999999-abc").mkdir()
    mine = make_folder(tmp_path / "there")
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == [mine.name]
