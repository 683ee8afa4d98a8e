"""A folder with good settings, and the command as a child process in it."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).write_text("{}")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1 + 1 ="}\n')
    (tmp_path / "run.toml").write_text(
        'model = "model"\nsteps = 10\nrun.dir = "runs/first"\ndata.prompts = "prompts.jsonl"\n'
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def command(folder: Path) -> Command:
    """`tidemill WORDS` in the folder, as a child process."""

    def _command(*words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "tidemill", *words], cwd=folder, capture_output=True, text=True, timeout=60
        )

    return _command
