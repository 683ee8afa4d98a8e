import importlib.util
import json
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def prepare():
    return load(RECIPES / "quickstart" / "prepare.py")


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_prepared_data_is_what_the_recipe_says_and_no_prompt_occurs_twice(tmp_path: Path, prepare, capsys) -> None:
    assert prepare.main(["--out", str(tmp_path / "quickstart")]) == 0
    assert "12,800 rows" in capsys.readouterr().out
    files = {name: rows(tmp_path / "quickstart" / f"{name}.jsonl") for name in ("train", "warm_up", "eval")}
    assert {name: len(found) for name, found in files.items()} == {"train": 2400, "warm_up": 12_800, "eval": 256}
    every = [row for found in files.values() for row in found]
    assert len({row["prompt"] for row in every}) == len({row["id"] for row in every}) == len(every)
    for row in every:
        assert len(row["prompt"]) == 9
        assert row["label"] == "".join(sorted(row["prompt"][:8]))


def test_preparing_twice_makes_nothing_new_and_another_folder_the_same(tmp_path: Path, prepare) -> None:
    prepare.prepare(tmp_path / "a")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*")}
    assert "made before" in prepare.prepare(tmp_path / "a")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*")} == before
    prepare.prepare(tmp_path / "b")
    for path in (tmp_path / "a").rglob("*"):
        other = tmp_path / "b" / path.relative_to(tmp_path / "a")
        assert path.is_dir() or path.read_bytes() == other.read_bytes(), path


def test_what_an_interrupted_preparation_left_is_replaced_and_a_foreign_folder_is_not(tmp_path: Path, prepare) -> None:
    (tmp_path / "a.partial").mkdir()
    (tmp_path / "a.partial" / "train.jsonl").write_text("cut sho")
    prepare.prepare(tmp_path / "a")
    assert not (tmp_path / "a.partial").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(SystemExit, match="holds something else"):
        prepare.prepare(tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"
