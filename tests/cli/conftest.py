"""A folder with good settings, the command as a child process in it, and run folders with checkpoints."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.pieces import shards_of

from tidemill.checkpoint.commit import Committer
from tidemill.checkpoint.staged import stage
from tidemill.cli.main import main
from tidemill.contracts.checkpoint import Snapshot
from tidemill.contracts.state import Cursor, RunState

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


@dataclass(frozen=True)
class SavedRun:
    """A run folder whose checkpoints a test makes."""

    folder: Path
    base: Path

    def path(self, step: int) -> Path:
        """Of the checkpoint of a step."""
        return self.folder / "checkpoints" / f"step-{step:08d}"

    def save(self, step: int, arrays: Mapping[str, Any], *, ranks: int = 1, attempt: int = 1, **settings: Any) -> None:
        """A whole checkpoint of float32 arrays by name."""
        (self.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        committer = Committer(
            folder=self.folder / "checkpoints",
            attempt=attempt,
            identity={"model": "abc", "seed": "0"},
            settings={
                "settings": {"model": str(self.base), "checkpoint": {"every": 2}, **settings},
                "origins": {"checkpoint.every": "run.toml"},
            },
            retention={"keep_last": 1, "keep_every": 4},
        )
        state = RunState(step=step, attempt=attempt, seed=0, cursor=Cursor(position=step), warm_up_cursor=Cursor())
        snapshot = Snapshot(shards=shards_of(dict(arrays), ranks), extra={"ranks": ranks, "replicas": 1})
        committer.commit(stage(state, {"trainer": snapshot}), lambda count: None)

    def damage(self, step: int) -> None:
        """Flip the last bit of its first file."""
        path = next(self.path(step).glob("trainer-00000-of-*.safetensors"))
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)


@pytest.fixture
def saved(tmp_path: Path) -> SavedRun:
    """A run without checkpoints, in a folder whose name has spaces and letters of all scripts."""
    return SavedRun(tmp_path / "ein run ü", tmp_path / "base")


class Ckpt:
    """`tidemill ckpt WORDS` in this process: exit code; what was printed, as text or as JSON."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = self.err = ""

    def __call__(self, *words: object) -> int:
        code = main(["ckpt", *map(str, words)])
        self.out, self.err = self._capsys.readouterr()
        return code

    @property
    def told(self) -> Any:
        """What was printed, which must be one JSON object on one line."""
        (line,) = self.out.splitlines()
        return json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.fixture
def ckpt(capsys: pytest.CaptureFixture[str]) -> Ckpt:
    return Ckpt(capsys)
