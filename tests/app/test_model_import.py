import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tidemill.app.model_import import import_model
from tidemill.errors import DataError, PluginError
from tidemill.testing.tiny import make_tiny_model, make_tiny_tokenizer

DATA = Path(__file__).parents[1] / "data"
IDS = torch.tensor([[5, 20, 9, 33]])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "source", hidden=64, heads=2, kv_heads=1)


def logits(folder: Path) -> torch.Tensor:
    with torch.inference_mode():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(IDS).logits


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_is_imported_with_equal_logits_and_its_own_tokenizer(tmp_path: Path, tied: bool) -> None:
    source = make_tiny_model(tmp_path / "source", tied=tied, hidden=64, heads=2, kv_heads=1)
    model = import_model(source, tmp_path / "deep" / "out")
    assert torch.equal(logits(model.folder), logits(source))
    assert (model.tied, model.dtype, model.vocabulary, model.chat_template) == (tied, "float32", 100, True)
    assert model.notices == ()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (model.folder / name).read_bytes() == (source / name).read_bytes()
    assert leftovers(tmp_path / "deep") == ["out"]
    assert model.bytes == sum(path.stat().st_size for path in model.folder.iterdir())


def test_another_dtype_is_written_when_asked_for(tmp_path: Path, source: Path) -> None:
    model = import_model(source, tmp_path / "out", dtype="bfloat16")
    assert model.dtype == "bfloat16"
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["generation_config_two_eos.json", "generation_config_contradictory.json"])
def test_a_generation_config_is_kept_as_it_is_even_a_contradictory_one(tmp_path: Path, source: Path, name) -> None:
    shutil.copyfile(DATA / name, source / "generation_config.json")
    import_model(source, tmp_path / "out")
    assert (tmp_path / "out" / "generation_config.json").read_bytes() == (DATA / name).read_bytes()


def test_a_missing_chat_template_is_said(tmp_path: Path, source: Path) -> None:
    (source / "chat_template.jinja").unlink()
    model = import_model(source, tmp_path / "out")
    assert not model.chat_template
    assert "no chat template" in model.notices[0]


def test_an_occupied_target_is_refused_and_left_alone(tmp_path: Path, source: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    with pytest.raises(DataError, match="exists already"):
        import_model(source, tmp_path / "out")
    assert leftovers(tmp_path / "out") == ["mine"]


def break_nothing_there(source: Path) -> None:
    shutil.rmtree(source)


def break_no_config(source: Path) -> None:
    (source / "config.json").unlink()


def break_pickle(source: Path) -> None:
    (source / "model.safetensors").rename(source / "pytorch_model.bin")


def break_no_weights(source: Path) -> None:
    (source / "model.safetensors").unlink()


def break_no_tokenizer(source: Path) -> None:
    (source / "tokenizer.json").unlink()


def break_cut_short(source: Path) -> None:
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def edit(source: Path, change) -> None:
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})


def break_missing_weight(source: Path) -> None:
    edit(source, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))


def break_not_finite(source: Path) -> None:
    edit(source, lambda tensors: tensors["model.norm.weight"].fill_(float("nan")))


def break_vocabulary(source: Path) -> None:
    edit(source, lambda tensors: tensors.update({"model.embed_tokens.weight": torch.randn(10, 64)}))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "vocab_size": 10}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (break_nothing_there, "nothing there"),
        (break_no_config, r"no config\.json"),
        (break_pickle, r"pickle \(pytorch_model\.bin\)"),
        (break_no_weights, "no safetensors file"),
        (break_no_tokenizer, "tokenizer"),
        (break_cut_short, "cannot read it"),
        (break_missing_weight, r"1 weights are missing.*layers\.1\.mlp\.up_proj"),
        (break_not_finite, "not finite"),
        (break_vocabulary, "its model knows 10"),
    ],
)
def test_a_source_that_is_not_whole_is_refused_and_leaves_nothing(tmp_path: Path, source, damage, words) -> None:
    damage(source)
    (tmp_path / "models").mkdir()
    with pytest.raises(DataError, match=words):
        import_model(source, tmp_path / "models" / "out")
    assert leftovers(tmp_path / "models") == []


def test_tensors_that_belong_nowhere_are_said(tmp_path: Path, source: Path) -> None:
    edit(source, lambda tensors: tensors.update({"value_head.weight": torch.zeros(3)}))
    assert "value_head.weight" in import_model(source, tmp_path / "out").notices[0]


def write_gguf(path: Path, folder: Path) -> None:
    """A llama as its authors' converter lays it out: rows of q and k in pairs, as the format's rotary wants them."""
    import gguf

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config, weights = model.config, dict(model.named_parameters())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
    names |= {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
    names |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    names |= {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
    for name, parameter in weights.items():
        words = name.split(".")
        array = parameter.detach()
        if words[-2] in ("q_proj", "k_proj"):
            heads = config.num_attention_heads if words[-2] == "q_proj" else config.num_key_value_heads
            array = array.view(heads, 2, config.head_dim // 2, -1).transpose(1, 2).reshape(array.shape)
        block = f"blk.{words[2]}." if "layers" in words else ""
        writer.add_tensor(f"{block}{names[words[-2]]}.weight", array.contiguous().numpy())
    tokenizer = make_tiny_tokenizer("bytes")
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    # The reader wants merges, more than one, and their products: here of letters which the test's text does not hold.
    vocabulary[-2:] = [("ab", len(vocabulary) - 2), ("cd", len(vocabulary) - 1)]
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([3 if token in tokenizer.all_special_tokens else 1 for token, _ in vocabulary])
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(3)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_is_imported_with_equal_logits_tokenizer_and_template(tmp_path: Path, tied: bool) -> None:
    folder = make_tiny_model(
        tmp_path / "llama", family="llama", tied=tied, hidden=64, heads=2, kv_heads=1, alphabet="bytes"
    )
    write_gguf(tmp_path / "tiny.gguf", folder)
    model = import_model(tmp_path / "tiny.gguf", tmp_path / "out", dtype="float32")
    assert torch.allclose(logits(model.folder), logits(folder), atol=1e-5)
    assert (model.architecture, model.tied, model.chat_template) == ("LlamaForCausalLM", tied, True)
    tokenizer = AutoTokenizer.from_pretrained(model.folder)
    assert tokenizer("é 12")["input_ids"] == AutoTokenizer.from_pretrained(folder)("é 12")["input_ids"]
    assert tokenizer.eos_token_id == 2
    assert json.loads((model.folder / "generation_config.json").read_text())["eos_token_id"] == 2
    assert "quantization_config" not in json.loads((model.folder / "config.json").read_text())
    assert import_model(tmp_path / "tiny.gguf", tmp_path / "half").dtype == "bfloat16"


def test_a_file_that_is_no_gguf_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file.gguf").write_bytes(b"PK\x03\x04")
    with pytest.raises(DataError, match="no GGUF file"):
        import_model(tmp_path / "file.gguf", tmp_path / "out")
    (tmp_path / "file.gguf").write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 40)
    with pytest.raises(DataError, match="cannot read it"):
        import_model(tmp_path / "file.gguf", tmp_path / "out")
    assert leftovers(tmp_path) == ["file.gguf"]


def test_without_the_library_the_install_command_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PluginError, match=r"pip install 'tidemill\[gguf\]'"):
        import_model(tmp_path / "file.gguf", tmp_path / "out")


def test_a_folder_without_a_tokenizer_is_named_itself(tmp_path: Path, source: Path) -> None:
    for file in source.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(DataError, match=f"cannot import {source}: there is no tokenizer in it"):
        import_model(source, tmp_path / "out")
