"""tidemill.trainers.fsdp.optimizer"""

import torch
from torch import Tensor

from tidemill.trainers.common.schedule import PhaseSettings
from tidemill.trainers.fsdp.optimizer import AdamW

SETTINGS = PhaseSettings(
    lr=1e-2,
    betas=(0.9, 0.95),
    eps=1e-8,
    weight_decay=0.1,
    schedule="constant",
    warm_up_steps=0,
    min_ratio=0.0,
    total_steps=1,
)


def parameters() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {"matrix": torch.randn(7, 5, generator=draw), "norm": torch.randn(5, generator=draw)}


def gradients(step: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(step)
    return [torch.randn(7, 5, generator=draw), torch.randn(5, generator=draw)]


def run_torch(steps: int, *, fused: bool) -> list[Tensor]:
    tensors = [tensor.requires_grad_() for tensor in parameters().values()]
    optimizer = torch.optim.AdamW(
        tensors, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=fused, foreach=False
    )
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
        for tensor, gradient in zip(tensors, gradients(step), strict=True):
            tensor.grad = gradient
        optimizer.step()
    return [tensor.detach() for tensor in tensors]


def run_ours(optimizer: AdamW, steps: range) -> list[Tensor]:
    for step in steps:
        optimizer.apply(gradients(step), SETTINGS, lr=1e-2 / (step + 1))
    return list(optimizer.parameters.values())


def test_updates_equal_those_of_torch_bit_by_bit() -> None:
    found = run_ours(AdamW(parameters()), range(6))
    assert all(one.equal(other) for one, other in zip(found, run_torch(6, fused=True), strict=True))


def test_updates_are_near_those_of_the_naive_implementation() -> None:
    found = run_ours(AdamW(parameters()), range(6))
    torch.testing.assert_close(found, run_torch(6, fused=False), rtol=1e-5, atol=1e-6)


def test_state_is_there_before_the_first_update_and_no_other_comes_later() -> None:
    optimizer = AdamW(parameters())
    before = {name: id(tensor) for name, tensor in optimizer.state().items()}
    assert set(before) == {
        f"optimizer/{moment}/{name}" for moment in ("exp_avg", "exp_avg_sq") for name in parameters()
    }
    run_ours(optimizer, range(2))
    assert {name: id(tensor) for name, tensor in optimizer.state().items()} == before


def test_going_on_from_copied_state_changes_no_bit() -> None:
    first = AdamW(parameters())
    run_ours(first, range(3))
    second = AdamW({name: tensor.clone() for name, tensor in first.parameters.items()})
    for name, tensor in first.state().items():
        second.state()[name].copy_(tensor)
    second.steps = first.steps
    whole, resumed = run_ours(first, range(3, 6)), run_ours(second, range(3, 6))
    assert all(one.equal(other) for one, other in zip(whole, resumed, strict=True))


def test_a_reset_optimizer_is_as_a_new_one() -> None:
    optimizer = AdamW(parameters())
    run_ours(optimizer, range(3))
    optimizer.reset()
    assert optimizer.steps == 0
    assert not any(tensor.any() for tensor in optimizer.state().values())


def test_a_rank_without_elements_of_some_parameters_updates_the_others_alike() -> None:
    whole, part = AdamW(parameters()), AdamW(parameters() | {"norm": torch.zeros(0)})
    run_ours(whole, range(3))
    for step in range(3):
        part.apply([gradients(step)[0], torch.zeros(0)], SETTINGS, lr=1e-2 / (step + 1))
    nothing = AdamW({"norm": torch.zeros(0, 4)})
    nothing.apply([torch.zeros(0, 4)], SETTINGS, lr=1.0)
    assert part.parameters["matrix"].equal(whole.parameters["matrix"])
    assert (part.steps, nothing.steps) == (3, 1)
