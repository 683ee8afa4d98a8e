"""What a checkpoint belongs to (`tidemill.app.identity`)."""

import json
from pathlib import Path

import pytest

from tidemill.app.identity import model_identity, tokenizer_identity
from tidemill.testing.tiny import make_tiny_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", hidden=32, layers=1, heads=2, kv_heads=2)


def test_the_same_files_are_the_same_model_wherever_they_lie(model: Path, tmp_path: Path) -> None:
    before = model_identity(model), tokenizer_identity(model)
    moved = model.rename(tmp_path / "moved")
    assert (model_identity(moved), tokenizer_identity(moved)) == before


def test_one_weight_that_differs_makes_another_model(model: Path) -> None:
    before = model_identity(model)
    weights = next(model.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert model_identity(model) != before


def test_another_configuration_makes_another_model_and_another_template_another_tokenizer(model: Path) -> None:
    before = model_identity(model), tokenizer_identity(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert model_identity(model) != before[0]
    assert tokenizer_identity(model) != before[1]
