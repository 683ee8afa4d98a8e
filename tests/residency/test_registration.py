"""What can be registered (`tidemill.residency.registration`)."""

import pytest
import torch

from tidemill.contracts.footprint import Part
from tidemill.errors import ResidencyError
from tidemill.residency.registration import Registration


@pytest.fixture
def registration() -> Registration:
    return Registration(torch.device("cpu"))


def test_tied_tensors_become_aliases_of_the_first(registration: Registration) -> None:
    weight = torch.nn.Parameter(torch.zeros(3, 4))
    registration.add("embed", weight, Part.WEIGHTS)
    registration.add("head", weight, Part.WEIGHTS)
    registration.add("detached", weight.detach(), Part.WEIGHTS)
    (item,) = registration.items()
    assert (item.name, len(item.aliases)) == ("embed", 2)


def test_a_transposed_view_is_no_alias(registration: Registration) -> None:
    weight = torch.zeros(3, 3)
    registration.add("w", weight, Part.WEIGHTS)
    registration.add("t", weight.t(), Part.WEIGHTS)
    assert [item.name for item in registration.items()] == ["w", "t"]


def test_tensors_without_elements_are_never_aliases(registration: Registration) -> None:
    registration.add("a", torch.zeros(0), Part.WEIGHTS)
    registration.add("b", torch.zeros(0), Part.WEIGHTS)
    assert len(registration.items()) == 2


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.zeros(3).expand(2, 3), "expanded"),
        (torch.zeros(3, device="meta"), "it is on meta"),
        (torch.zeros(3, dtype=torch.complex64), "complex64"),
        (torch.eye(3).to_sparse(), "strided"),
    ],
    ids=["expanded", "elsewhere", "dtype", "sparse"],
)
def test_what_cannot_be_moved_is_refused_by_name(registration: Registration, tensor: torch.Tensor, reason: str) -> None:
    with pytest.raises(ResidencyError, match=f"{reason}"):
        registration.add("odd", tensor, Part.WEIGHTS)
    assert registration.items() == []


def test_a_name_used_twice_is_refused(registration: Registration) -> None:
    registration.add("w", torch.zeros(1), Part.WEIGHTS)
    with pytest.raises(ResidencyError, match="two tensors as 'w'"):
        registration.add("w", torch.zeros(1), Part.WEIGHTS)


@pytest.mark.parametrize("part", [Part.NONE, Part.WEIGHTS | Part.OPTIMIZER])
def test_a_tensor_belongs_to_one_part(registration: Registration, part: Part) -> None:
    with pytest.raises(ResidencyError, match="exactly one part"):
        registration.add("w", torch.zeros(1), part)


def test_one_tensor_cannot_be_two_parts(registration: Registration) -> None:
    weight = torch.zeros(3)
    registration.add("w", weight, Part.WEIGHTS)
    with pytest.raises(ResidencyError, match="registered as weights"):
        registration.add("ema", weight, Part.OPTIMIZER)
