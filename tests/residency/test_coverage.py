"""`tidemill.residency.coverage`: a tensor that was put in another's stead does not survive sleep, and is named."""

from collections.abc import Callable

import pytest
import torch

from tidemill.contracts.footprint import Part
from tidemill.errors import ResidencyError
from tidemill.residency.coverage import check_covers
from tidemill.residency.ledger import Ledger
from tidemill.residency.savers.host_arena import HostArenaSaver


def saver_of(state: dict[str, torch.Tensor]) -> HostArenaSaver:
    saver = HostArenaSaver(device="cpu", page_bytes=4096, pin=False)
    for name, tensor in state.items():
        saver.add(name, tensor, Part.WEIGHTS)
    saver.freeze()
    return saver


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    base = torch.randn(6, 4)
    return {"a": base[:3], "b": base[2:], "turned": torch.randn(5, 7).t(), "none": torch.empty(0, 3)}


def test_what_is_registered_is_covered_awake_asleep_and_woken(state: dict[str, torch.Tensor]) -> None:
    saver = saver_of(state)
    saver.check_covers(state)
    saver.capture(1)
    saver.release(1)
    saver.check_covers(state)
    saver.restore()
    saver.check_covers(state)


@pytest.mark.parametrize("name", ["a", "turned"])
def test_an_equal_tensor_in_its_stead_is_named(state: dict[str, torch.Tensor], name: str) -> None:
    saver = saver_of(state)
    with pytest.raises(ResidencyError, match=rf"1 tensors are others .*'{name}'.*change tensors in place"):
        saver.check_covers(state | {name: state[name].clone()})


def test_another_place_of_the_same_storage_is_named(state: dict[str, torch.Tensor]) -> None:
    saver = saver_of(state)
    with pytest.raises(ResidencyError, match="'a'"):
        saver.check_covers(state | {"a": state["b"][:3]})


@pytest.mark.parametrize(
    "changed", [lambda data: data.t(), lambda data: data.view(torch.int32), lambda data: data.view(8, 2)]
)
def test_another_view_of_the_same_bytes_is_named(changed: Callable[[torch.Tensor], torch.Tensor]) -> None:
    parameter = torch.nn.Parameter(torch.randn(4, 4), requires_grad=False)
    saver = saver_of({"w": parameter})
    saver.check_covers({"w": parameter})
    parameter.data = changed(parameter.data)
    with pytest.raises(ResidencyError, match="'w'"):
        saver.check_covers({"w": parameter})


def test_nothing_of_another_dtype_is_named(state: dict[str, torch.Tensor]) -> None:
    saver = saver_of(state)
    with pytest.raises(ResidencyError, match="'none'"):
        saver.check_covers(state | {"none": torch.empty(0, 3, dtype=torch.bfloat16)})


def test_strides_that_lead_nowhere_do_not_matter() -> None:
    state = {"w": torch.randn(1, 4)}
    saver = saver_of(state)
    saver.check_covers({"w": state["w"].as_strided((1, 4), (1, 1), state["w"].storage_offset())})


def test_a_parameter_whose_data_was_set_is_named() -> None:
    parameter = torch.nn.Parameter(torch.randn(3))
    saver = saver_of({"w": parameter})
    parameter.data = torch.randn(3)
    with pytest.raises(ResidencyError, match="'w'"):
        saver.check_covers({"w": parameter})


def test_names_are_compared_first() -> None:
    with pytest.raises(ResidencyError, match="1 tensors are not in it"):
        check_covers(Ledger(()), [], {"late": torch.zeros(1)})
