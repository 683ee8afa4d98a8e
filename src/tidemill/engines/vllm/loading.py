"""How vLLM is told to load: nothing at all. The plan by which weights will come is made instead.

vLLM calls a model loader between making a model and preparing it for its kernels. Ours asks the model's own
`load_weights` where everything belongs, and puts a pattern there; if the preparation leaves memory and pattern alone,
plain copies into the running engine are right. If it does not, the engine would compute with weights other than those
that it was given, and is refused.
"""

from collections.abc import Mapping
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from tidemill.errors import EngineError
from tidemill.weights.checksum import checksums
from tidemill.weights.copy_plan import CopyPlan, bake

__all__ = ["LOAD_FORMAT", "Baked", "expecting"]

LOAD_FORMAT = "tidemill"
_SHOWN = 3
_expected: dict[str, "Baked"] = {}


class Baked:
    """The plan for weights of `shapes`, once a model was made in this process while this was expected."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes
        self.parameters: dict[str, torch.Tensor] = {}
        self._before: dict[str, tuple[int, int]] = {}
        self._plan: CopyPlan | None = None

    def bake(self, model: torch.nn.Module) -> None:
        """Find the plan, and leave small numbers in the model that say whether anybody changes them."""
        load: Any = model.load_weights
        self.parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        dtype = torch.get_default_dtype()
        self._plan = bake(self.parameters, load, self._shapes, dtype)
        pattern = torch.Generator(device=next(iter(self.parameters.values())).device)
        for number, parameter in enumerate(self.parameters.values()):
            pattern.manual_seed(number)
            parameter.uniform_(-1e-3, 1e-3, generator=pattern)
        self._before = _state(self.parameters)

    def checked(self, model: torch.nn.Module) -> CopyPlan:
        """The plan, if the model that was made for running holds its weights as they were loaded.

        Raises EngineError when it does not.
        """
        if self._plan is None:
            raise EngineError(
                "cannot plan how weights come into vLLM: it made its model without the loader it was told"
            )
        now = _state({name: parameter.detach() for name, parameter in model.named_parameters()})
        changed = sorted(name for name in {*now, *self._before} if now.get(name) != self._before.get(name))
        if changed:
            raise EngineError(
                f"cannot use vLLM for this model: it rewrites {len(changed)} of its parameters for its kernels "
                f"({', '.join(changed[:_SHOWN])}), so that new weights cannot be copied into them; use another "
                "vLLM back end for them (engine.options), or engine.use = transformers"
            )
        return self._plan


def _state(parameters: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    """Address and checksum of each."""
    sums = checksums(parameters.items())
    return {name: (parameter.data_ptr(), sums[name]) for name, parameter in parameters.items()}


def expecting(baked: Baked) -> None:
    """The next model that is made in this process is for `baked`."""
    _expected["next"] = baked


@register_model_loader(LOAD_FORMAT)
class _PlanLoader(BaseModelLoader):  # type: ignore[misc]
    """Stands in where vLLM would read files."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)

    def download_model(self, model_config: ModelConfig) -> None:
        """There is nothing to download."""

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Bake instead."""
        _expected.pop("next").bake(model)
