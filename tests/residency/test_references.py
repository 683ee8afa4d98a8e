"""Where torch holds process groups as objects (`tidemill.residency.references`)."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tidemill.errors import ResidencyError
from tidemill.residency.references import ParkedGroup, References


class Owner:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.by_name = {"one": group}
        self.size = 1


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield c10d._get_default_group()
    dist.destroy_process_group()


def test_attributes_and_dicts_are_emptied_and_filled_again(group: dist.ProcessGroup) -> None:
    owner, references = Owner(group), References()
    references.take_out([owner, owner])
    assert (type(owner.group), type(owner.by_name["one"]), owner.size) == (ParkedGroup, ParkedGroup, 1)
    assert references.names == {group.group_name}
    references.put_back({group.group_name: group})
    assert owner.group is owner.by_name["one"] is group
    assert references.names == set()


def test_a_parked_group_says_so_when_it_is_used(group: dist.ProcessGroup) -> None:
    owner = Owner(group)
    References().take_out([owner])
    with pytest.raises(ResidencyError, match=r"group '0' \(size\): it is parked"):
        owner.group.size()


def test_a_group_that_did_not_come_back_is_named(group: dist.ProcessGroup) -> None:
    references = References()
    references.take_out([Owner(group)])
    with pytest.raises(ResidencyError, match="needs group '0'"):
        references.put_back({})
