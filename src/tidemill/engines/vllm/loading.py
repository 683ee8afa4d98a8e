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
from tidemill.weights.copy_plan import CopyPlan, bake

__all__ = ["LOAD_FORMAT", "Baked", "expecting"]

LOAD_FORMAT = "tidemill"
_SHOWN = 3
_expected: dict[str, "Baked"] = {}


class Baked:
    """The plan for weights of `shapes`, once a model was made in this process while this was expected."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes
        self._addresses: dict[str, int] = {}
        self._plan: CopyPlan | None = None

    def bake(self, model: torch.nn.Module) -> None:
        """Find the plan, and leave small numbers in the model that say whether anybody changes them.

        Called where whatever is allocated lies among the weights, and leaves with them: so nothing is.
        """
        load: Any = model.load_weights
        parameters = _parameters(model)
        self._plan = bake(parameters, load, self._shapes, torch.get_default_dtype())
        for number, (name, parameter) in enumerate(parameters.items()):
            _write_pattern(parameter, number)
            self._addresses[name] = parameter.data_ptr()

    def checked(self, model: torch.nn.Module) -> CopyPlan:
        """The plan, if the model that was made for running holds its weights as they were loaded.

        Raises EngineError when it does not.
        """
        if self._plan is None:
            raise EngineError(
                "cannot plan how weights come into vLLM: it made its model without the loader it was told"
            )
        now = _parameters(model)
        changed = sorted({*now} ^ {*self._addresses})
        for number, (name, address) in enumerate(self._addresses.items()):
            if name in now and not (now[name].data_ptr() == address and _holds_pattern(now[name], number)):
                changed.append(name)
        if changed:
            raise EngineError(
                f"cannot use vLLM for this model: it rewrites {len(changed)} of its parameters for its kernels "
                f"({', '.join(changed[:_SHOWN])}), so that new weights cannot be copied into them; use another "
                "vLLM back end for them (engine.options), or engine.use = transformers"
            )
        return self._plan


def _parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _write_pattern(tensor: torch.Tensor, number: int) -> None:
    tensor.uniform_(-1e-3, 1e-3, generator=torch.Generator(device=tensor.device).manual_seed(number))


def _holds_pattern(tensor: torch.Tensor, number: int) -> bool:
    expected = torch.empty_like(tensor)
    _write_pattern(expected, number)
    return torch.equal(tensor, expected)


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
