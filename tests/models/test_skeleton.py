"""tidemill.models.skeleton"""

import json
from pathlib import Path
from typing import get_args

import pytest
import torch
from transformers import AutoModelForCausalLM

from tidemill.errors import DataError
from tidemill.models.skeleton import computed_buffers, model_skeleton
from tidemill.testing.tiny import Family, make_tiny_model


@pytest.mark.parametrize("family", get_args(Family))
@pytest.mark.parametrize("tied", [True, False])
def test_a_skeleton_takes_no_memory_and_its_buffers_are_those_of_a_loaded_model(tmp_path: Path, family, tied) -> None:
    folder = make_tiny_model(tmp_path, family=family, tied=tied, hidden=32, heads=2, kv_heads=1)
    skeleton = model_skeleton(folder, torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert not skeleton.training
    assert all(parameter.is_meta for parameter in skeleton.parameters())
    assert [name for name, _ in skeleton.named_parameters()] == [name for name, _ in loaded.named_parameters()]
    buffers = computed_buffers(skeleton)
    assert buffers.keys() == dict(loaded.named_buffers()).keys()
    assert all(torch.equal(buffers[name], buffer) for name, buffer in loaded.named_buffers())


@pytest.mark.parametrize("content", [None, "{", "{}", '{"model_type": "no_such_model"}'])
def test_a_folder_without_a_usable_config_is_refused(tmp_path: Path, content) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(DataError, match=r"config\.json"):
        model_skeleton(tmp_path, torch.float32)


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass Config: pass\n")
    auto = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Config"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto}))
    with pytest.raises(DataError):
        model_skeleton(tmp_path, torch.float32)
    assert not mark.exists()
