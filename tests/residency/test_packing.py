"""Units and slabs (`tidemill.residency.packing`)."""

import pytest
import torch

from tidemill.contracts.footprint import Part
from tidemill.errors import ResidencyError
from tidemill.residency.ledger import NO_SLAB
from tidemill.residency.packing import Registered, plan_slabs


def item(name: str, tensor: torch.Tensor, part: Part = Part.WEIGHTS) -> Registered:
    return Registered(name=name, tensor=tensor, part=part)


def test_small_tensors_share_slabs_up_to_a_page() -> None:
    plans, entries = plan_slabs([item(f"w{i}", torch.zeros(100)) for i in range(5)], page_bytes=1024)
    assert [plan.bytes for plan in plans] == [1024, 1024, 512]
    assert [(e.slab, e.offset) for e in entries] == [(0, 0), (0, 512), (1, 0), (1, 512), (2, 0)]


def test_a_tensor_larger_than_a_page_has_a_slab_of_its_own() -> None:
    items = [item("a", torch.zeros(10)), item("big", torch.zeros(1000)), item("b", torch.zeros(10))]
    plans, entries = plan_slabs(items, page_bytes=1024)
    assert [plan.bytes for plan in plans] == [512, 4096, 512]
    assert [e.slab for e in entries] == [0, 1, 2]


def test_parts_never_share_a_slab_and_entries_keep_the_order_of_registration() -> None:
    items = [
        item("w", torch.zeros(4)),
        item("m", torch.zeros(4), Part.OPTIMIZER),
        item("v", torch.zeros(4)),
        item("nothing", torch.zeros(0)),
    ]
    plans, entries = plan_slabs(items, page_bytes=1 << 20)
    assert [plan.part for plan in plans] == [Part.WEIGHTS, Part.OPTIMIZER]
    assert [(e.name, e.slab) for e in entries] == [("w", 0), ("m", 1), ("v", 0), ("nothing", NO_SLAB)]


def test_views_that_touch_move_as_one_and_views_apart_take_only_their_bytes() -> None:
    flat = torch.zeros(100_000)
    items = [item("a", flat[:10]), item("b", flat[5:20]), item("far", flat[90_000:90_010])]
    plans, entries = plan_slabs(items, page_bytes=1 << 20)
    assert sum(plan.bytes for plan in plans) == 1024
    assert entries[1].offset - entries[0].offset == 20
    assert entries[2].offset == 512


def test_views_of_different_widths_stay_aligned() -> None:
    raw = torch.zeros(256, dtype=torch.uint8)
    _, entries = plan_slabs([item("bytes", raw[5:100]), item("words", raw[8:88].view(torch.int64))], page_bytes=1024)
    by_name = {e.name: e for e in entries}
    assert by_name["words"].offset % 8 == 0
    assert by_name["words"].offset - by_name["bytes"].offset == 3


def test_tensors_of_two_parts_that_share_bytes_are_refused() -> None:
    flat = torch.zeros(100)
    with pytest.raises(ResidencyError, match="'a' as weights and 'b' as optimizer"):
        plan_slabs([item("a", flat[:60]), item("b", flat[40:], Part.OPTIMIZER)], page_bytes=1024)
