import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tidemill.config.load import load

ROOT = Path(__file__).parents[2]


def module() -> Any:
    spec = importlib.util.spec_from_file_location("prepare", ROOT / "recipes" / "reasoning" / "prepare.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def questions(path: Path) -> set[str]:
    return {row["prompt"][0]["content"] for row in rows(path)}


def test_what_is_held_out_is_never_trained_on(tmp_path: Path) -> None:
    items = [{"question": f"{n % 50} + 1?", "answer": str(n % 50 + 1)} for n in range(500)]
    module().write_task(tmp_path / "sums", items, (40, 10))
    train, held = tmp_path / "sums" / "train.jsonl", tmp_path / "sums" / "eval.jsonl"
    assert (len(rows(train)), len(rows(held))) == (len(questions(train)), len(questions(held))) == (40, 10)
    assert not questions(train) & questions(held)
    for row in rows(train):
        assert row["label"] == int(row["prompt"][0]["content"].split()[0]) + 1
        assert [message["role"] for message in row["prompt"]] == ["user"]


def test_too_few_different_questions_are_told_of(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="51 different questions: there are 50"):
        module().distinct([{"question": str(n % 50), "answer": "1"} for n in range(500)], 51)


def test_the_tasks_are_made_whole_and_the_same_twice(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    prepare = module()
    prepare.prepare(tmp_path / "a")
    assert "made before" in prepare.prepare(tmp_path / "a")
    prepare.prepare(tmp_path / "b")
    for task, (train, held) in prepare.ROWS.items():
        files = [tmp_path / "a" / task / f"{name}.jsonl" for name in ("train", "eval")]
        assert [len(questions(path)) for path in files] == [train, held]
        assert not questions(files[0]) & questions(files[1])
        assert all(isinstance(row["label"], int) for path in files for row in rows(path))
        for path in files:
            assert path.read_bytes() == (tmp_path / "b" / task / path.name).read_bytes()


def test_a_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(SystemExit, match="holds something else"):
        module().prepare(tmp_path / "mine")


def test_the_two_recipes_differ_in_their_task_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    one, other = (
        load([ROOT / "recipes" / name], [], check_files=False).config
        for name in ("reasoning.toml", "reasoning-letters.toml")
    )
    changed = {
        "run": one.run.model_copy(update={"dir": other.run.dir}),
        "data": one.data.model_copy(update={"prompts": other.data.prompts}),
        "eval": one.eval.model_copy(update={"data": other.eval.data}),
    }
    assert one.model_copy(update=changed) == other
