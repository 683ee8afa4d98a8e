"""Pages, references and copy-on-write (`tidemill.residency.arena`)."""

import pytest

from tidemill.errors import ResidencyError
from tidemill.residency.arena import Arena, map_plain


def arena(*sizes: int, idle: int = 0) -> Arena:
    return Arena(sizes=sizes, map_memory=map_plain, idle_spare_bytes=idle)


def test_every_slab_has_a_page_of_its_size_from_the_start() -> None:
    pages = arena(100, 5000, 4096)
    assert [pages.page(i).bytes for i in range(3)] == [100, 5000, 4096]
    assert all(pages.page(i).memory.data_ptr() % 4096 == 0 for i in range(3))
    assert pages.bytes == 100 + 5000 + 4096


def test_view_and_memory_are_the_same_bytes() -> None:
    page = arena(10).writable(0)
    page.memory[3] = 7
    assert page.view[3] == 7


def test_a_page_that_nobody_reads_is_written_in_place() -> None:
    pages = arena(100)
    assert pages.writable(0) is pages.writable(0) is pages.page(0)
    assert pages.spare_bytes == 0


def test_a_page_that_is_read_is_left_alone_and_its_slab_gets_a_spare_one() -> None:
    pages = arena(100)
    pages.writable(0).memory.fill_(1)
    (held,) = pages.reference()
    pages.writable(0).memory.fill_(2)
    assert pages.page(0) is not held
    assert held.memory.eq(1).all()
    assert pages.spare_bytes == 100


def test_several_readers_of_several_versions_each_keep_theirs() -> None:
    pages = arena(100)
    held = []
    for version in range(4):
        pages.writable(0).memory.fill_(version)
        held.append(pages.reference())
    assert [int(page.memory[0]) for (page,) in held] == [0, 1, 2, 3]
    for reader in reversed(held):
        pages.release(reader)
    assert pages.references == 0
    pages.writable(0)
    assert pages.spare_bytes == 0


def test_a_slab_goes_home_as_soon_as_it_can() -> None:
    pages = arena(100)
    home = pages.page(0)
    held = pages.reference()
    pages.writable(0)
    pages.release(held)
    assert pages.writable(0) is home
    assert pages.spare_bytes == 0


def test_idle_spare_pages_are_kept_up_to_the_limit_and_used_again() -> None:
    pages = arena(100, 100, idle=100)
    held = pages.reference()
    spare = pages.writable(0), pages.writable(1)
    pages.release(held)
    pages.writable(0), pages.writable(1)
    assert pages.spare_bytes == 100
    held = pages.reference()
    assert pages.writable(0) is spare[0]
    pages.release(held)


def test_bytes_never_exceed_the_state_and_what_readers_hold_and_the_idle_limit() -> None:
    pages = arena(*[100] * 8, idle=200)
    for _ in range(30):
        held = pages.reference()
        for slab in range(8):
            pages.writable(slab)
        assert pages.bytes <= 1600
        pages.release(held)
        for slab in range(8):
            pages.writable(slab)
        assert pages.bytes <= 1000


def test_memory_that_is_read_after_closing_is_still_there() -> None:
    pages = arena(100)
    pages.writable(0).memory.fill_(5)
    (held,) = pages.reference()
    pages.close()
    del pages
    assert bytes(held.view) == b"\5" * 100


def test_mappings_of_home_and_spare_pages_are_undone_once_each() -> None:
    undone: list[int] = []

    def counted(size: int):
        memory, _ = map_plain(size)
        return memory, lambda: undone.append(size)

    pages = Arena(sizes=[10, 20], map_memory=counted, idle_spare_bytes=0)
    held = pages.reference()
    pages.writable(0)
    pages.release(held)
    pages.writable(0)
    assert undone == [10]
    pages.close()
    pages.close()
    assert undone == [10, 8192]


def test_an_arena_that_cannot_be_mapped_fails_at_once() -> None:
    def broken(size: int):
        raise ResidencyError("no memory")

    with pytest.raises(ResidencyError):
        Arena(sizes=[10], map_memory=broken, idle_spare_bytes=0)


def test_an_arena_of_nothing_holds_nothing() -> None:
    pages = arena()
    assert pages.bytes == 0
    assert pages.reference() == []
    pages.close()


def test_a_reader_that_is_late_may_let_go_after_the_end() -> None:
    pages = arena(10)
    late = pages.reference()
    pages.writable(0)
    spare = pages.reference()
    pages.writable(0)
    pages.close()
    pages.release(spare)
    pages.release(late)
    pages.close()
