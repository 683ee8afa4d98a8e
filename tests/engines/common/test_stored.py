from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tidemill.engines.common.stored import stored_weights
from tidemill.errors import DataError
from tidemill.models.naming import model_naming
from tidemill.models.skeleton import model_skeleton
from tidemill.testing.tiny import make_tiny_model


@pytest.mark.parametrize("under", [("model.embed_tokens.weight",), ("lm_head.weight",), ("lm_head.weight", "both")])
def test_a_tied_weight_comes_once_whatever_name_it_is_stored_under(tmp_path: Path, under) -> None:
    folder = make_tiny_model(tmp_path, hidden=32, heads=2, kv_heads=1)
    naming = model_naming(model_skeleton(folder, torch.float32))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"].clone()
    if "lm_head.weight" in under:
        tensors["lm_head.weight"] = embedding.clone()
    if len(under) == 1 and under[0] == "lm_head.weight":
        del tensors["model.embed_tokens.weight"]
    save_file(tensors, file)
    found = dict(stored_weights(folder, naming))
    assert len([name for name in found if name in ("lm_head.weight", "model.embed_tokens.weight")]) == 1
    file.unlink()
    with pytest.raises(DataError, match="no safetensors file"):
        list(stored_weights(folder, naming))
