"""tidemill.models.stored"""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tidemill.errors import DataError
from tidemill.models.stored import Wanted, fill, open_weights

WORDS = torch.arange(12, dtype=torch.float32).view(6, 2)


def write(folder: Path, **files: Mapping[str, torch.Tensor]) -> Path:
    for name, tensors in files.items():
        save_file(dict(tensors), folder / f"{name}.safetensors")
    return folder


def wanted(*names: str, whole: tuple[int, ...] = (6, 2), start: int = 0, rows: int = 6) -> Wanted:
    return Wanted(names=names, whole=whole, start=start, tensor=torch.full((rows, *whole[1:]), -1.0))


def read(folder: Path, *items: Wanted) -> None:
    with open_weights(folder) as reader:
        fill(folder, reader, items)


def test_the_rows_that_are_wanted_come_cast_to_what_they_are_wanted_in(tmp_path: Path) -> None:
    write(tmp_path, model={"words": WORDS.bfloat16(), "norm": torch.ones(3, dtype=torch.float16)})
    middle, norm = wanted("words", start=2, rows=3), wanted("norm", whole=(3,), rows=3)
    read(tmp_path, middle, norm)
    assert middle.tensor.equal(WORDS[2:5])
    assert norm.tensor.equal(torch.ones(3))


def test_who_wants_no_rows_gets_none(tmp_path: Path) -> None:
    write(tmp_path, model={"words": WORDS})
    read(tmp_path, wanted("words", start=6, rows=0))


def test_rows_are_views_of_the_file_and_not_of_a_copy(tmp_path: Path) -> None:
    write(tmp_path, model={"words": torch.zeros(1 << 12, 1 << 10)})
    with open_weights(tmp_path) as reader:
        before = _peak()
        rows = reader.rows("words", 5, 7)
        assert rows.shape == (2, 1 << 10)
        assert not rows.any()
    assert _peak() - before < 4 << 20  # of 16 MiB


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def test_files_named_by_an_index_are_read_and_no_others(tmp_path: Path) -> None:
    write(tmp_path, one={"words": WORDS}, two={"norm": torch.ones(3)}, consolidated={"other.name": WORDS})
    index = {"weight_map": {"words": "one.safetensors", "norm": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    words = wanted("words")
    read(tmp_path, words, wanted("norm", whole=(3,), rows=3))
    assert words.tensor.equal(WORDS)


@pytest.mark.parametrize("stored", [{"words": WORDS}, {"head": WORDS}, {"words": WORDS, "head": WORDS.clone()}])
def test_a_tied_tensor_may_be_stored_under_any_of_its_names_or_all(
    tmp_path: Path, stored: dict[str, torch.Tensor]
) -> None:
    words = wanted("words", "head")
    read(write(tmp_path, model=stored), words)
    assert words.tensor.equal(WORDS)


def test_frequencies_that_old_files_hold_are_passed_over(tmp_path: Path) -> None:
    words = wanted("words")
    read(write(tmp_path, model={"words": WORDS, "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}), words)
    assert words.tensor.equal(WORDS)


@pytest.mark.parametrize(
    ("stored", "text"),
    [
        ({"words": WORDS}, r"1 missing \(norm \.\.\.\)"),
        ({"words": WORDS, "norm": torch.ones(3), "more": WORDS.clone()}, r"1 unexpected \(more \.\.\.\)"),
        ({"words": WORDS[:5].clone(), "norm": torch.ones(3)}, r"1 mismatched \(words \.\.\.\)"),
    ],
)
def test_what_does_not_fit_both_ways_is_refused_before_anything_is_read(
    tmp_path: Path, stored: dict[str, torch.Tensor], text: str
) -> None:
    words = wanted("words")
    with pytest.raises(DataError, match=text):
        read(write(tmp_path, model=stored), words, wanted("norm", whole=(3,), rows=3))
    assert (words.tensor == -1).all()


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="stored as I8"):
        read(write(tmp_path, model={"words": WORDS.to(torch.int8)}), wanted("words"))


@pytest.mark.parametrize("index", ["{", "{}", '{"weight_map": ["a"]}', '{"weight_map": {"words": "nowhere"}}'])
def test_a_damaged_index_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(DataError, match="cannot load a model"):
        read(tmp_path, wanted("words"))
