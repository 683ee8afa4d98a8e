"""Copying one weight (`tidemill.weights.copying`), against PyTorch's own copy."""

import pytest
import torch

from tidemill.weights.copying import copy_weight


@pytest.mark.parametrize("shape", [(), (0,), (3,), (128, 384), (700, 700), (5, 0, 2)])
@pytest.mark.parametrize(("held", "sent"), [("float32", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16")])
def test_every_weight_arrives_as_a_plain_copy_would_bring_it(shape: tuple[int, ...], held: str, sent: str) -> None:
    source = torch.randn(shape).to(getattr(torch, sent))
    target = torch.full(shape, float("nan"), dtype=getattr(torch, held))
    wanted = torch.empty_like(target).copy_(source)
    copy_weight(target, source)
    assert torch.equal(target, wanted)


def test_strided_weights_arrive_in_order() -> None:
    source, target = torch.randn(6, 4).t(), torch.zeros(8, 6)[::2]
    copy_weight(target, source)
    assert torch.equal(target, source)


def test_a_parameter_that_wants_gradients_takes_a_copy() -> None:
    target = torch.nn.Parameter(torch.zeros(4, 4))
    copy_weight(target.data, torch.ones(4, 4, requires_grad=True))
    assert target.sum().item() == 16
