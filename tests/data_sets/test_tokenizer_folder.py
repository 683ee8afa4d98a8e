"""tidemill.data.tokenizer_folder: one way to load a tokenizer, one rule for the ids that end an answer."""

import json
from pathlib import Path

import pytest

from tidemill.data.tokenizer import Tokenizer
from tidemill.data.tokenizer_folder import load_tokenizer, stored_end_ids
from tidemill.engines.transformers.engine import TransformersEngine
from tidemill.errors import DataError
from tidemill.testing.tiny import make_tiny_model, make_tiny_tokenizer

DATA = Path(__file__).parents[1] / "data"


def engine(folder: Path) -> TransformersEngine:
    return TransformersEngine(model=folder, device="cpu", dtype="float32", max_batch=1, emit=lambda event: None)


@pytest.mark.parametrize("fault", ["missing", "damaged"])
def test_a_folder_without_a_usable_tokenizer_is_refused_alike_for_prompts_and_engine(
    tmp_path: Path, fault: str
) -> None:
    make_tiny_model(tmp_path, hidden=32, heads=2, kv_heads=1)
    assert len(load_tokenizer(tmp_path)) > 90
    (tmp_path / "tokenizer.json").unlink()
    if fault == "damaged":
        (tmp_path / "tokenizer.json").write_text("{")
    messages = set()
    for load in (load_tokenizer, Tokenizer, engine):
        with pytest.raises(DataError, match="tokenizer") as caught:
            load(tmp_path)
        messages.add(str(caught.value))
    assert len(messages) == 1


def test_prompts_and_engine_end_answers_at_the_same_ids(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, hidden=32, heads=2, kv_heads=1)
    (tmp_path / "generation_config.json").write_bytes((DATA / "generation_config_two_eos.json").read_bytes())
    assert Tokenizer(tmp_path).eos_token_ids == engine(tmp_path)._end_ids == (2, 7)


def test_the_end_ids_of_all_three_places_are_known(tmp_path: Path) -> None:
    tokenizer = make_tiny_tokenizer()
    assert stored_end_ids(tmp_path, tokenizer) == (2,)
    (tmp_path / "generation_config.json").write_bytes((DATA / "generation_config_two_eos.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert stored_end_ids(tmp_path, tokenizer) == (2, 7, 9)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None}))
    assert stored_end_ids(tmp_path, tokenizer) == (2, 7)


@pytest.mark.parametrize(
    "content", ['{"eos_token_id": "</s>"}', '{"eos_token_id": [2, -1]}', '{"eos_token_id": true}', "{", "[]"]
)
def test_what_is_no_id_is_refused_with_the_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(DataError, match=r"cannot .*generation_config\.json"):
        stored_end_ids(tmp_path, make_tiny_tokenizer())
