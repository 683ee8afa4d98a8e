"""The tokenizer of the cases, and a way to make folders that differ from it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tidemill.data.jsonl import JsonlData
from tidemill.data.tokenizer import Tokenizer

CASES = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="session")
def tiny() -> Tokenizer:
    """278 tokens, adds a start token by itself, has a chat template."""
    return Tokenizer(CASES / "tiny_tokenizer")


@pytest.fixture
def tokenizer_with(tmp_path: Path) -> Callable[..., Tokenizer]:
    """The tiny tokenizer with another chat template (None for none) and further files."""

    def make(template: str | None, *, allow_special_tokens: bool = False, **files: Any) -> Tokenizer:
        folder = tmp_path / "tokenizer"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(CASES / "tiny_tokenizer", folder)
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config.pop("chat_template")
        if template is not None:
            config["chat_template"] = template
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        for name, value in files.items():
            (folder / f"{name}.json").write_text(json.dumps(value))
        return Tokenizer(folder, allow_special_tokens=allow_special_tokens)

    return make


@pytest.fixture
def load(tiny: Tokenizer) -> Callable[..., JsonlData]:
    """JsonlData of a path with plain defaults."""

    def make(path: Path, **changes: Any) -> JsonlData:
        values: dict[str, Any] = {
            "tokenizer": tiny,
            "seed": 0,
            "shuffle": False,
            "max_prompt_tokens": 10_000,
            "skip_bad_lines": False,
            "emit": lambda event: None,
        }
        return JsonlData(path=path, **{**values, **changes})

    return make
