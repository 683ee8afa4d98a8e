import json
from pathlib import Path

import pytest

from tidemill.data.tokenizer import Tokenizer
from tidemill.errors import DataError

CASES = Path(__file__).parents[1] / "data"
TEMPLATES = sorted((CASES / "chat_templates").glob("*.jinja"))
SPECIAL = [json.loads(line) for line in (CASES / "prompts_special_tokens.jsonl").read_text("utf-8").splitlines()]
START, EOT, ASSISTANT = 1, 7, 5
CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": " hello the 123 "},
    {"role": "assistant", "content": "thing"},
    {"role": "tool", "content": "ok"},
    {"role": "user", "content": "and?"},
]


def chat_ids(tokenizer, messages):
    return tokenizer.read_chat(messages)[1]


def test_plain_text_gets_what_the_tokenizer_gives_by_default(tiny):
    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained(str(CASES / "tiny_tokenizer"))
    for text in ("hello", "", " the 123 ", "café \U0001f600\u2028x"):
        assert tiny.encode_plain(text) == tuple(hf(text).input_ids)
        assert tiny.encode_plain(text)[0] == START


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_a_chat_has_exactly_the_start_token_that_its_template_writes(template, tokenizer_with):
    tokenizer = tokenizer_with(template.read_text())
    ids = chat_ids(tokenizer, CHAT)
    assert ids.count(START) == (0 if template.stem in ("no_bos", "needs_user_and_system_first") else 1)
    assert ids[-1] == ASSISTANT
    assert ids.count(ASSISTANT) == 2


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_a_chat_without_control_tokens_in_its_texts_is_encoded_as_if_unguarded(template, tokenizer_with):
    guarded = tokenizer_with(template.read_text()).read_chat(CHAT)
    assert guarded == tokenizer_with(template.read_text(), allow_special_tokens=True).read_chat(CHAT)


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
@pytest.mark.parametrize("row", SPECIAL, ids=lambda row: row["id"])
def test_text_of_a_prompt_never_becomes_a_control_token(template, row, tokenizer_with):
    """The naive twin renders harmless letters in place of the texts: the control ids must be the same."""
    tokenizer = tokenizer_with(template.read_text())
    messages = row["prompt"] if isinstance(row["prompt"], list) else [{"role": "user", "content": row["prompt"]}]
    messages = [{**m, "content": m["content"] if isinstance(m["content"], str) else "joined"} for m in messages]
    harmless = [{**message, "content": "abc"} for message in messages]
    text, ids = tokenizer.read_chat(messages)
    control = [id for id in ids if id in tokenizer.control_token_ids]
    expected = [id for id in chat_ids(tokenizer, harmless) if id in tokenizer.control_token_ids]
    assert control == expected
    assert tokenizer.decode(ids) == text
    assert all(message["content"].strip() in text for message in messages)


@pytest.mark.parametrize("row", [row for row in SPECIAL if isinstance(row["prompt"], str)], ids=lambda row: row["id"])
def test_plain_text_never_becomes_a_control_token(row, tiny):
    ids = tiny.encode_plain(row["prompt"])
    assert not tiny.control_token_ids.intersection(ids[1:])
    assert tiny.decode(ids[1:]) == row["prompt"]


def test_control_tokens_are_recognised_where_that_is_allowed(tokenizer_with):
    template = TEMPLATES[0].read_text()
    allowed = tokenizer_with(template, allow_special_tokens=True)
    assert EOT in allowed.encode_plain("hello<|eot|>")
    assert chat_ids(allowed, [{"role": "user", "content": "hi<|eot|>"}]).count(EOT) == 2
    guarded = tokenizer_with(template)
    assert EOT not in guarded.encode_plain("hello<|eot|>")
    assert chat_ids(guarded, [{"role": "user", "content": "hi<|eot|>"}]).count(EOT) == 1


def test_answers_end_with_the_end_of_sequence_and_hold_no_start_token(tiny):
    assert tiny.encode_completion("hello") == (269, 2)
    assert tiny.encode_completion("</s>")[-1] == 2
    assert tiny.encode_completion("</s>").count(2) == 1


def test_every_end_of_sequence_id_is_known(tokenizer_with):
    two = json.loads((CASES / "generation_config_two_eos.json").read_text())
    assert tokenizer_with(None, generation_config=two).eos_token_ids == (2, 7)
    assert tokenizer_with(None, config={"eos_token_id": 6}, generation_config=two).eos_token_ids == (2, 6, 7)
    assert tokenizer_with(None, config={"eos_token_id": None}).eos_token_ids == (2,)


def test_half_a_surrogate_pair_is_encoded_as_the_replacement_character(tiny):
    assert tiny.encode_plain("a\ud83db") == tiny.encode_plain("a\ufffdb")
    assert chat_ids(tiny, [{"role": "user", "content": "\udc00"}]) == chat_ids(
        tiny, [{"role": "user", "content": "\ufffd"}]
    )


def test_a_chat_without_a_template_is_refused_with_what_to_do(tokenizer_with):
    tokenizer = tokenizer_with(None)
    assert not tokenizer.has_chat_template
    with pytest.raises(DataError, match=r"no chat template; add chat_template.jinja"):
        chat_ids(tokenizer, CHAT)


def test_what_a_template_refuses_is_an_error_of_the_data(tokenizer_with):
    tokenizer = tokenizer_with((CASES / "chat_templates/needs_user_and_system_first.jinja").read_text())
    with pytest.raises(DataError, match="no user message"):
        chat_ids(tokenizer, [{"role": "system", "content": "only"}])


def test_a_folder_without_tokenizer_files_is_refused_though_a_config_is_there(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(DataError, match=r"holds none of tokenizer.json"):
        Tokenizer(tmp_path)
    with pytest.raises(DataError, match="not a folder"):
        Tokenizer(tmp_path / "missing")


def test_a_damaged_tokenizer_file_is_refused_with_the_name_of_the_folder(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model"')
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(DataError, match=tmp_path.name):
        Tokenizer(tmp_path)


def test_not_canonical_ids_decode_to_their_text(tiny):
    for row in json.loads((CASES / "tokens_not_canonical.json").read_text())["rows"]:
        assert tiny.decode(row["sampled_ids"]) == row["text"]
