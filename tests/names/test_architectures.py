"""tidemill.names.architectures and tidemill.names.experts: the names of each type, written out by hand."""

import subprocess
import sys

import pytest

from tidemill.errors import DataError
from tidemill.names.architectures import ARCHITECTURES, naming_of
from tidemill.names.naming import Naming


def layer(mixture: str = "mlp") -> dict[str, tuple[int, ...]]:
    return {
        "model.layers.0.self_attn.q_proj.weight": (8, 4),
        f"model.layers.0.{mixture}.experts.gate_up_proj": (2, 6, 4),
        f"model.layers.0.{mixture}.experts.down_proj": (2, 4, 3),
        f"model.layers.0.{mixture}.gate.weight": (2, 4),
        f"model.layers.0.{mixture}.shared_expert.gate_proj.weight": (3, 4),
    }


def naming(kind: str, shapes: dict[str, tuple[int, ...]] | None = None) -> Naming:
    return naming_of(ARCHITECTURES[kind], layer() if shapes is None else shapes, {})


def plain(naming: Naming) -> bool:
    """Whether every tensor is whole and has one name on both sides."""
    return {name: cut.shape for name, cut in naming.names.items()} == naming.shapes


@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_moe", "olmoe"])
def test_experts_are_three_matrices_each(kind: str) -> None:
    found = {cut.name: (cut.tensor, cut.start, cut.shape) for cut in naming(kind).names.values()}
    joined, down = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"
    assert found == {
        "model.layers.0.self_attn.q_proj.weight": ("model.layers.0.self_attn.q_proj.weight", (0, 0), (8, 4)),
        "model.layers.0.mlp.experts.0.gate_proj.weight": (joined, (0, 0, 0), (3, 4)),
        "model.layers.0.mlp.experts.0.up_proj.weight": (joined, (0, 3, 0), (3, 4)),
        "model.layers.0.mlp.experts.1.gate_proj.weight": (joined, (1, 0, 0), (3, 4)),
        "model.layers.0.mlp.experts.1.up_proj.weight": (joined, (1, 3, 0), (3, 4)),
        "model.layers.0.mlp.experts.0.down_proj.weight": (down, (0, 0, 0), (4, 3)),
        "model.layers.0.mlp.experts.1.down_proj.weight": (down, (1, 0, 0), (4, 3)),
        "model.layers.0.mlp.gate.weight": ("model.layers.0.mlp.gate.weight", (0, 0), (2, 4)),
        "model.layers.0.mlp.shared_expert.gate_proj.weight": (
            "model.layers.0.mlp.shared_expert.gate_proj.weight",
            (0, 0),
            (3, 4),
        ),
    }


def test_mixtral_calls_its_experts_otherwise() -> None:
    names = naming("mixtral").names
    assert names["model.layers.0.block_sparse_moe.experts.1.w3.weight"].start == (1, 3, 0)
    assert names["model.layers.0.block_sparse_moe.experts.1.w2.weight"].start == (1, 0, 0)
    assert names["model.layers.0.block_sparse_moe.gate.weight"].tensor == "model.layers.0.mlp.gate.weight"


@pytest.mark.parametrize("kind", [name for name, rules in ARCHITECTURES.items() if not rules])
def test_dense_types_have_one_name_on_both_sides(kind: str) -> None:
    shapes = {"model.embed_tokens.weight": (9, 4), "model.layers.0.mlp.gate_proj.weight": (3, 4)}
    assert plain(naming(kind, shapes))


def test_a_layer_without_experts_in_a_model_that_has_some_is_left_as_it_is() -> None:
    assert plain(naming("qwen3_moe", {"model.layers.0.mlp.gate_proj.weight": (3, 4)}))


def test_experts_that_are_apart_already_are_left_apart() -> None:
    """What a version of transformers that joins nothing would hold."""
    assert plain(naming("qwen3_moe", {"model.layers.0.mlp.experts.0.gate_proj.weight": (3, 4)}))


@pytest.mark.parametrize("shape", [(2, 5, 4), (2, 6)], ids=["gate and up of unlike height", "no experts"])
def test_experts_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match=r"experts.gate_up_proj has shape"):
        naming("qwen3_moe", layer() | {"model.layers.0.mlp.experts.gate_up_proj": shape})


def test_names_need_no_torch() -> None:
    asked = "import sys, tidemill.names.architectures; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asked], check=False).returncode == 0
