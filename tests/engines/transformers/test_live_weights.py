from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tidemill.engines.transformers.live_weights import LiveWeights
from tidemill.errors import WeightSyncError
from tidemill.models.skeleton import model_skeleton
from tidemill.testing.tiny import Family, make_tiny_model


def built(folder: Path, dtype: torch.dtype) -> tuple[LiveWeights, object]:
    model = model_skeleton(folder, dtype)
    return LiveWeights(model=model, device=torch.device("cpu"), dtype=dtype), model


@pytest.mark.parametrize("family", get_args(Family))
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_filled_slab_computes_what_a_loaded_model_computes_after_any_number_of_sleeps(
    tmp_path: Path, family, tied, dtype
) -> None:
    folder = make_tiny_model(tmp_path, family=family, tied=tied, hidden=32, heads=2, kv_heads=1)
    weights, model = built(folder, dtype)
    # transformers 5.17 computes Gemma 2 without its caps unless it is told how.
    attention = model.config._attn_implementation
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
    ids = torch.tensor([[5, 9, 30, 7]])
    for _ in range(3):
        assert not weights.resident
        weights.allocate()
        weights.begin()
        weights.load(weights.stored(folder))
        with torch.inference_mode():
            assert torch.equal(model(ids).logits, loaded(ids).logits)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        weights.release()


def test_nothing_is_allocated_before_it_is_asked_for(tmp_path: Path) -> None:
    weights, model = built(make_tiny_model(tmp_path, hidden=32, heads=2, kv_heads=1), torch.float32)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not weights.resident
    assert weights.nbytes > 0
    weights.release()
    assert not weights.resident


def test_every_byte_lies_in_the_slab_aligned_and_sleep_frees_it(tmp_path: Path) -> None:
    weights, model = built(make_tiny_model(tmp_path, hidden=32, heads=2, kv_heads=1), torch.bfloat16)
    weights.allocate()
    storages = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    assert len(storages) == 1
    assert all(tensor.storage_offset() * tensor.itemsize % 256 == 0 for tensor in model.parameters())
    held = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    assert held <= weights.nbytes == next(model.parameters()).untyped_storage().nbytes() < held + 256 * 40
    weights.release()
    assert next(model.parameters()).untyped_storage().nbytes() == 0


def test_allocating_what_is_allocated_keeps_the_contents(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, hidden=32, heads=2, kv_heads=1)
    weights, _ = built(folder, torch.float32)
    weights.allocate()
    for view in weights.views().values():
        view.fill_(3.0)
    weights.allocate()
    assert all(bool((view == 3.0).all()) for view in weights.views().values())


def test_a_source_may_make_each_tensor_as_it_is_asked_for_it(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, hidden=32, heads=2, kv_heads=1)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    weights, _ = built(folder, torch.bfloat16)
    weights.allocate()
    scratch = torch.empty(max(parameter.numel() for parameter in loaded.parameters()))

    def reused():
        for name, parameter in loaded.named_parameters():
            yield name, scratch[: parameter.numel()].view(parameter.shape).copy_(parameter.detach())

    weights.load(reused())
    for name, parameter in loaded.named_parameters():
        assert torch.equal(weights.views()[name], parameter.bfloat16())


def test_what_has_not_come_is_told_by_name_until_an_update_begins_anew(tmp_path: Path) -> None:
    weights, _ = built(make_tiny_model(tmp_path, hidden=32, heads=2, kv_heads=1), torch.float32)
    weights.allocate()
    assert weights.missing() == weights.names
    first, *others = weights.names
    weights.load([(first, torch.zeros(weights.views()[first].shape))])
    assert weights.missing() == tuple(others)
    weights.begin()
    assert weights.missing() == weights.names


def mixture(folder: Path) -> Path:
    return make_tiny_model(folder, family="qwen3_moe", tied=False, hidden=32, heads=2, kv_heads=1)


def filled(folder: Path) -> dict[str, torch.Tensor]:
    weights, _ = built(folder, torch.float32)
    weights.allocate()
    weights.begin()
    weights.load(weights.stored(folder))
    assert not weights.missing()
    return {name: view.clone() for name, view in weights.views().items()}


def test_a_folder_may_hold_what_memory_joins_joined_and_what_the_model_computes(tmp_path: Path) -> None:
    apart, joined = mixture(tmp_path / "apart"), mixture(tmp_path / "joined")
    network = AutoModelForCausalLM.from_pretrained(apart)
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    held = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    assert any(name.endswith("experts.gate_up_proj") for name in held)
    save_file(held | frequencies, joined / "model.safetensors", metadata={"format": "pt"})
    wanted, found = load_file(apart / "model.safetensors"), filled(joined)
    assert found.keys() == wanted.keys() == filled(apart).keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("model.layers.1.mlp.experts.4.up_proj.weight", (96, 32), "it has no weight of that name"),
        ("model.layers.1.mlp.experts.gate_up_proj", (4, 192, 32), "it has no weight of that name"),
        ("model.layers.1.mlp.experts.3.up_proj.weight", (32, 96), r"came as \(32, 96\) and should be \(96, 32\)"),
    ],
)
def test_experts_that_the_model_does_not_have_are_refused_by_name(
    tmp_path: Path, name: str, shape: tuple[int, ...], said: str
) -> None:
    weights, _ = built(mixture(tmp_path), torch.float32)
    weights.allocate()
    weights.begin()
    with pytest.raises(WeightSyncError, match=rf"cannot load {name} into the engine: .*{said}"):
        weights.load([(name, torch.zeros(shape))])
