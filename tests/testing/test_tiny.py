import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tidemill.testing.tiny import EOS_ID, make_tiny_model, scripted_weights, sort_digits_problem


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_tiny_folder_loads_as_any_model_does(tmp_path: Path, family, tied) -> None:
    folder = make_tiny_model(tmp_path / "model", family=family, tied=tied, hidden=32, heads=2, kv_heads=1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.model_type == family
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert model.generation_config.eos_token_id == EOS_ID
    assert model.generation_config.pad_token_id == 0
    ids = tokenizer("73914082>")["input_ids"]
    assert len(ids) == 9
    assert max(ids) < model.config.vocab_size
    assert tokenizer.decode(ids) == "73914082>"
    assert torch.isfinite(model(torch.tensor([ids])).logits).all()


def test_text_comes_back_from_its_ids_character_by_character(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_tiny_model(tmp_path, hidden=32, heads=2, kv_heads=2))
    text = "What is 3 + 4?\nIt's {7}, [ok] \\ ~ . , ! n't"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.decode([*tokenizer("07")["input_ids"], EOS_ID], skip_special_tokens=True) == "07"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False)
    assert chat == text


def test_weights_depend_on_the_seed_alone_and_leave_the_callers_random_state(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = make_tiny_model(tmp_path / "a", hidden=32, heads=2, kv_heads=2)
    assert torch.equal(torch.rand(3), expected)
    again = make_tiny_model(tmp_path / "b", hidden=32, heads=2, kv_heads=2)
    other = make_tiny_model(tmp_path / "c", hidden=32, heads=2, kv_heads=2, seed=1)
    read = [(folder / "model.safetensors").read_bytes() for folder in (first, again, other)]
    assert read[0] == read[1] != read[2]


def test_the_dtype_of_the_file_is_the_one_asked_for(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, hidden=32, heads=2, kv_heads=2, dtype="bfloat16")
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16


def test_the_quick_starts_model_has_the_size_it_says(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path))
    assert 0.43e6 < sum(parameter.numel() for parameter in model.parameters()) < 0.45e6


def test_bytes_are_an_alphabet_in_which_a_character_may_take_several_ids(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, alphabet="bytes", hidden=32, heads=2, kv_heads=2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "aé≠日\n 🦀"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == len(tokenizer) == 260


def test_scripted_weights_say_what_they_are_told(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, tied=False)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for name, weight in scripted_weights(folder, {5: 9, 9: 50, 50: 5, 60: 9}).items():
            model.get_parameter(name).copy_(weight)
        said = model(torch.tensor([[60, 5, 9, 50, 5]])).logits[0].softmax(-1)
    assert said.argmax(-1).tolist() == [9, 9, 50, 5, 9]
    assert float(said.max(-1).values.min()) > 0.99


def test_digits_are_sorted() -> None:
    prompt, answer = sort_digits_problem(random.Random(0))
    assert prompt.endswith(">")
    assert answer == "".join(sorted(prompt[:-1]))
    assert sort_digits_problem(random.Random(0)) == (prompt, answer)
