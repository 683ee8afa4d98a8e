"""A folder with a model, prompts and run.toml: the smallest settings that make a run."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tidemill.config.load import Loaded, SettingsError, load

RUN = """\
model = "model"
steps = 10
run.dir = "runs/first"
data.prompts = "prompts.jsonl"
"""

Load = Callable[..., Loaded]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (model / name).write_text("{}")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1 + 1 ="}\n')
    (tmp_path / "run.toml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def loaded(folder: Path) -> Load:
    """Loads run.toml with words on top."""

    def _load(*words: str, **options: bool) -> Loaded:
        return load([Path("run.toml")], words, **options)

    return _load


@pytest.fixture
def problems(loaded: Load) -> Callable[..., list[str]]:
    """The problems of run.toml with words on top, as lines; empty when it is good."""

    def _problems(*words: str, **options: bool) -> list[str]:
        try:
            loaded(*words, **options)
        except SettingsError as error:
            return [str(problem) for problem in error.problems]
        return []

    return _problems
