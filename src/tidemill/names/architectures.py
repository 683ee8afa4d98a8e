"""Which architectures there are names for, by `model_type`, and the rules of each."""

from collections.abc import Mapping, Sequence

from tidemill.names.experts import JoinedExperts
from tidemill.names.naming import Cut, Naming, Shape, whole

__all__ = ["ARCHITECTURES", "naming_of"]

_QWEN_EXPERTS = JoinedExperts(here=".mlp.", there=".mlp.", gate="gate_proj", up="up_proj", down="down_proj")
_MIXTRAL_EXPERTS = JoinedExperts(here=".mlp.", there=".block_sparse_moe.", gate="w1", up="w3", down="w2")

ARCHITECTURES: Mapping[str, Sequence[JoinedExperts]] = {
    "gemma": (),
    "gemma2": (),
    "gemma3_text": (),
    "llama": (),
    "mistral": (),
    "mixtral": (_MIXTRAL_EXPERTS,),
    "olmoe": (_QWEN_EXPERTS,),
    "qwen2": (),
    "qwen2_moe": (_QWEN_EXPERTS,),
    "qwen3": (),
    "qwen3_moe": (_QWEN_EXPERTS,),
    "smollm3": (),
}
"""Rules by type; a tensor that no rule speaks of has one name on both sides, as all have of the types without rules."""


def naming_of(rules: Sequence[JoinedExperts], shapes: Mapping[str, Shape], tied: Mapping[str, str]) -> Naming:
    """Of a model whose tensors have these names and shapes, tied ones once; `tied` are the further names of those.

    Raises DataError when the shapes are not what the rules are about.
    """
    return Naming({name: _cuts(rules, name, shape) for name, shape in shapes.items()}, shapes, tied)


def _cuts(rules: Sequence[JoinedExperts], name: str, shape: Shape) -> Sequence[Cut]:
    return next((cuts for rule in rules if (cuts := rule.cuts(name, shape))), (whole(name, shape),))
