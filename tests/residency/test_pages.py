"""Pages of slabs in one mapping (`tidemill.residency.pages`)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tidemill.residency.arena import Arena
from tidemill.residency.host_memory import map_plain
from tidemill.residency.pages import PageRun, plan_pages


def test_a_slab_has_pages_of_one_size_but_for_the_last() -> None:
    plan = plan_pages([250, 100, 5000], page_bytes=100, spare_bytes=0)
    assert [[page.bytes for page in pages] for pages in plan.home] == [[100, 100, 50], [100], [100] * 50]
    assert [pages[0].start for pages in plan.home] == [0, 252, 352]
    assert plan.bytes == 5352 and plan.spares == ()


@pytest.mark.parametrize(
    ("page_bytes", "expected"),
    [(512, 512), (1536, 512), (1024, 1024), (4096, 4096), (12288, 4096), (1 << 16, 4096), (3 << 20, 4096)],
)
def test_pages_lie_where_dma_is_at_ease_or_as_well_as_those_within_a_slab(page_bytes: int, expected: int) -> None:
    plan = plan_pages([512, 9728, 512, 1 << 20], page_bytes=page_bytes, spare_bytes=None)
    starts = [page.start for page in [*(pages[0] for pages in plan.home), *plan.spares]]
    assert all(start % expected == 0 for start in starts)
    assert starts == sorted(starts) and plan.bytes >= starts[-1] + plan.spares[-1].bytes


@pytest.mark.parametrize("page_bytes", [512, 1024, 4096, 5120, 1 << 16, 1 << 26])
@pytest.mark.parametrize("sizes", [[512] * 40, [1536], [9728, 512, 5120], [1 << 20, 512]])
def test_spare_pages_and_their_alignment_take_what_is_set_but_for_less_than_a_page(
    sizes: list[int], page_bytes: int
) -> None:
    state = plan_pages(sizes, page_bytes=page_bytes, spare_bytes=0).bytes
    for spare_bytes in (100_000, 1 << 20):
        taken = plan_pages(sizes, page_bytes=page_bytes, spare_bytes=spare_bytes).bytes - state
        assert 0 <= spare_bytes - taken < page_bytes
    assert state - sum(sizes) <= len(sizes) * min(page_bytes, 4096)


@pytest.mark.parametrize(
    ("sizes", "spare_bytes", "count"),
    [
        ([250], None, 2),
        ([100] * 50, None, 5),
        ([30], None, 2),
        ([], None, 0),
        ([250], 0, 0),
        ([250], 399, 3),
    ],
)
def test_spare_pages_are_a_tenth_of_the_state_and_two_at_least_unless_said(
    sizes: list[int], spare_bytes: int | None, count: int
) -> None:
    plan = plan_pages(sizes, page_bytes=100, spare_bytes=spare_bytes)
    assert len(plan.spares) == count
    assert all(page.spare and page.bytes == min(100, max(sizes)) for page in plan.spares)


def scattered(order: list[int], *, page: int = 8, last: int = 5) -> tuple[PageRun, bytearray]:
    """A slab whose pages lie in the mapping in this order; the last is shorter. With its bytes."""
    size = page * (len(order) - 1) + last
    plan = plan_pages([page * len(order)], page_bytes=page, spare_bytes=0)
    whole = Arena(plan, map_plain).run(0)
    run = PageRun(
        memory=whole.memory, view=whole.view, pages=tuple(whole.pages[n] for n in order), page_bytes=page, bytes=size
    )
    content = bytearray(range(1, size + 1))
    run.put(0, memoryview(content))
    return run, content


@given(st.permutations(range(5)), st.data())
def test_bytes_are_found_wherever_the_pages_lie(order: list[int], data: st.DataObject) -> None:
    run, content = scattered(order)
    start = data.draw(st.integers(0, run.bytes))
    end = data.draw(st.integers(start, run.bytes))
    assert b"".join(run.views(start, end)) == bytes(run.joined(start, end)) == content[start:end]
    run.put(start, memoryview(bytes(end - start)))
    content[start:end] = bytes(end - start)
    assert bytes(run.joined(0, run.bytes)) == content


def test_pages_at_home_are_one_piece_and_no_copy() -> None:
    run, content = scattered([0, 1, 2])
    assert run.spans(3, 20) == [(3, 20)]
    assert [(start, len(piece)) for start, piece in run.stretches()] == [(0, len(content))]
    view = run.joined(3, 20)
    run.memory[3] = 99
    assert view[0] == 99


def test_what_is_not_adjacent_comes_in_pieces_behind_each_other() -> None:
    run, content = scattered([2, 0, 1])
    assert [(start, len(piece)) for start, piece in run.stretches()] == [(0, 8), (8, 13)]
    assert torch.equal(torch.cat([piece for _, piece in run.stretches()]), torch.tensor(list(content)).byte())
