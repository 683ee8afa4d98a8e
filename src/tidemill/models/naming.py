"""The names of a model of transformers: `tidemill.names` for its type, compared with what transformers itself would do.

Files are written and read, and engines fed, without transformers' own conversion: should it have one that we do not
know of, weights would go astray in silence. So a type without rules is taken as it is only while transformers has
none either.
"""

from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping

from tidemill.errors import DataError
from tidemill.names.architectures import ARCHITECTURES, naming_of
from tidemill.names.naming import Naming

__all__ = ["model_naming"]


def model_naming(network: Any) -> Naming:
    """Of a causal language model, on the meta device too, cut over ranks or whole.

    Raises DataError for a type whose files transformers converts in a way that is not known here.
    """
    kind = str(network.config.model_type)
    rules = ARCHITECTURES.get(kind, ())
    if not rules and get_model_conversion_mapping(network, add_legacy=False):
        joined = [name for name, known in ARCHITECTURES.items() if known]
        raise DataError(
            f"cannot name the weights of a model of type {kind!r}: transformers holds them otherwise than files do, "
            f"and the way is known for {', '.join(joined)} only; choose a model of one of these types, or one whose "
            "weights lie in memory as in files"
        )
    kept: dict[int, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    tied: dict[str, str] = {}
    for name, tensor in network.state_dict(keep_vars=True).items():
        if id(tensor) in kept:
            tied[name] = kept[id(tensor)]
            continue
        kept[id(tensor)] = name
        shapes[name] = tuple(tensor.shape)
    return naming_of(rules, shapes, tied)
