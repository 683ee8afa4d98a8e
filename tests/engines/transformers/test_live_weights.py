from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tidemill.engines.transformers.live_weights import LiveWeights
from tidemill.models.skeleton import model_skeleton
from tidemill.testing.tiny import make_tiny_model


def built(folder: Path, dtype: torch.dtype) -> tuple[LiveWeights, object]:
    model = model_skeleton(folder, dtype)
    return LiveWeights(model=model, device=torch.device("cpu"), dtype=dtype), model


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_filled_slab_computes_what_a_loaded_model_computes_after_any_number_of_sleeps(
    tmp_path: Path, family, tied, dtype
) -> None:
    folder = make_tiny_model(tmp_path, family=family, tied=tied, hidden=32, heads=2, kv_heads=1)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    weights, model = built(folder, dtype)
    ids = torch.tensor([[5, 9, 30, 7]])
    for _ in range(3):
        assert not weights.resident
        weights.allocate()
        weights.begin()
        weights.load((name, parameter.detach()) for name, parameter in loaded.named_parameters())
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
