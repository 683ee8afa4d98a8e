"""A forward pass that begins while weights are on their way: whatever computes waits for its own, just before.

The backward pass needs no other weights than the forward pass, so it never waits.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from tidemill.trainers.fsdp.model import Predictor

__all__ = ["wait_at_once", "wait_by_layer"]

Arrived = Callable[[Collection[str]], None]
"""Waits for tensors, by their names in a checkpoint."""


def wait_by_layer(predictor: Predictor, arrived: Arrived) -> None:
    """Each decoder layer waits for the weights in it, and any other module for those of its own."""
    names = _names(predictor.network)
    for module, held in _waiting(predictor.network):
        _wait_before(module, dict.fromkeys(names[id(tensor)] for tensor in held), arrived)


def wait_at_once(predictor: Predictor, arrived: Arrived) -> None:
    """The whole pass waits for all weights: ranks gather them ahead of the layers, which no layer's hook would see."""
    _wait_before(predictor, _names(predictor.network).values(), arrived)


def _wait_before(module: nn.Module, names: Iterable[str], arrived: Arrived) -> None:
    wanted = tuple(names)

    def wait(module: nn.Module, inputs: Any) -> None:
        arrived(wanted)

    # Before any hook that would look at the weights.
    module.register_forward_pre_hook(wait, prepend=True)


def _names(network: nn.Module) -> dict[int, str]:
    """Of tied parameters, the one under which they are kept."""
    found = {id(tensor): f"model/{name}" for name, tensor in network.named_parameters()}
    return found | {id(tensor): f"buffer/{name}" for name, tensor in network.named_buffers()}


def _waiting(network: Any) -> Iterator[tuple[nn.Module, list[Tensor]]]:
    """Modules that wait, and all tensors that they need: of a layer everything in it."""
    layers = list(network.get_decoder().layers)
    inside = {id(module) for layer in layers for module in layer.modules()}
    for layer in layers:
        yield layer, [*layer.parameters(), *layer.buffers()]
    for module in network.modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if own and id(module) not in inside:
            yield module, own
