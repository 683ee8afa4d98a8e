"""The recorded `new_group` (`tidemill.compat.recorded_groups`)."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d

from tidemill.compat.recorded_groups import RecordedGroups
from tidemill.errors import ResidencyError

OURS = timedelta(seconds=7)


def begin() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.fixture
def world() -> Iterator[None]:
    begin()
    yield
    dist.destroy_process_group()


@pytest.fixture
def recorded() -> Iterator[RecordedGroups]:
    made = RecordedGroups(timeout=OURS)
    yield made
    made.remove()


def test_calls_through_every_module_are_made_again_under_their_names(world: None, recorded: RecordedGroups) -> None:
    recorded.install()
    names = [module.new_group([0]).group_name for module in (c10d, dist, device_mesh)]
    names.append(dist.new_group([0], use_local_synchronization=True).group_name)
    assert recorded.names == set(names)
    dist.destroy_process_group()
    begin()
    recorded.replay(alive=set(names[1:]))
    assert set(c10d._world.pg_names.values()) == {"0", *names[1:]}


def test_a_name_that_moved_is_an_error(world: None, recorded: RecordedGroups) -> None:
    recorded.install()
    name = dist.new_group([0]).group_name
    dist.destroy_process_group()
    begin()
    c10d._new_group_with_tag([0])
    with pytest.raises(ResidencyError, match=f"group '{name}' came back as"):
        recorded.replay(alive={name})


def test_installing_twice_wraps_once_and_removing_twice_is_once(recorded: RecordedGroups) -> None:
    plain = dist.new_group
    recorded.install()
    wrapper = dist.new_group
    recorded.install()
    assert dist.new_group is wrapper
    for _ in range(2):
        recorded.remove()
        assert {dist.new_group, c10d.new_group, device_mesh.new_group} == {plain}


def test_a_torch_that_keeps_the_function_elsewhere_is_refused(
    recorded: RecordedGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_mesh, "new_group", lambda: None)
    plain = dist.new_group
    with pytest.raises(ResidencyError, match=r"device_mesh\.new_group is not torch's own"):
        recorded.install()
    assert dist.new_group is plain


def test_a_wrapper_around_ours_is_left_to_those_who_laid_it_and_ours_within_records_no_more(
    world: None, recorded: RecordedGroups
) -> None:
    plain = dist.new_group
    recorded.install()
    ours: Any = dist.new_group

    def theirs(*positional: Any, **keyword: Any) -> Any:
        return ours(*positional, **keyword)

    dist.new_group = theirs
    try:
        recorded.remove()
        assert dist.new_group is theirs
        assert c10d.new_group is plain
        dist.new_group([0])
        assert recorded.names == set()
    finally:
        # Not by monkeypatch, which would put back ours.
        dist.new_group = plain


def timeout_of(group: Any) -> timedelta:
    found: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return found


def test_a_group_made_without_a_timeout_has_ours_and_one_made_with_keeps_its_own(
    world: None, recorded: RecordedGroups
) -> None:
    recorded.install()
    theirs = timedelta(seconds=3)
    groups = [dist.new_group(), dist.new_group([0]), dist.new_group([0], None, "gloo"), dist.new_group(timeout=None)]
    kept = [dist.new_group([0], theirs), dist.new_group([0], timeout=theirs)]
    assert {timeout_of(group) for group in groups} == {OURS}
    assert {timeout_of(group) for group in kept} == {theirs}
    del groups, kept
    dist.destroy_process_group()
    begin()
    recorded.replay(alive=recorded.names)
    made = sorted(str(name) for name in recorded.names)
    assert sorted({timeout_of(c10d._resolve_process_group(name)) for name in made}) == [theirs, OURS]
