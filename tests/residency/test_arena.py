"""Pages, references, copy-on-write and waiting for readers (`tidemill.residency.arena`)."""

import random
import threading
import time

import pytest
import torch

from tidemill.errors import ResidencyError
from tidemill.residency.arena import Arena, Claims, Reading, claims_of
from tidemill.residency.host_memory import map_plain
from tidemill.residency.pages import plan_pages


def arena(*sizes: int, page: int = 100, spares: int = 0) -> Arena:
    largest = min(page, max(sizes, default=0))
    return Arena(plan_pages(sizes, page_bytes=page, spare_bytes=spares * largest), map_plain)


def claims(page: int = 100, **ranges: tuple[int, int, int]) -> Claims:
    return claims_of(ranges, page_bytes=page)


def write(pages: Arena, slab: int, value: int, number: int = 0) -> bool:
    memory = pages.writable((slab, number))
    if memory is None:
        return False
    memory.fill_(value)
    return True


def first_byte(reading: Reading, pages: Arena, slab: int = 0, number: int = 0) -> int:
    return int(pages.run(slab).memory[reading.pages[slab, number].start])


ONE = claims(w=(0, 0, 100))


def test_a_page_that_nobody_reads_is_written_in_place() -> None:
    pages = arena(100, spares=1)
    one, other = pages.writable((0, 0)), pages.writable((0, 0))
    assert one is not None and other is not None and one.data_ptr() == other.data_ptr()
    assert pages.spare_pages == 0


def test_a_page_that_is_read_is_left_alone_and_a_spare_one_takes_its_place() -> None:
    pages = arena(100, spares=1)
    write(pages, 0, 1)
    held = pages.read(ONE, "a save")
    write(pages, 0, 2)
    assert first_byte(held, pages) == 1 and pages.run(0).view[pages.run(0).pages[0].start] == 2
    assert pages.spare_pages == 1


def test_a_place_goes_home_as_soon_as_it_can() -> None:
    pages = arena(100, spares=1)
    home = pages.run(0).pages[0]
    held = pages.read(ONE, "a save")
    write(pages, 0, 1)
    held.release()
    write(pages, 0, 2)
    assert pages.run(0).pages[0] is home and pages.spare_pages == 0


def test_several_readers_of_several_versions_each_keep_theirs() -> None:
    pages = arena(100, spares=4)
    held = []
    for version in range(4):
        write(pages, 0, version)
        held.append(pages.read(ONE, "a save"))
    assert [first_byte(reading, pages) for reading in held] == [0, 1, 2, 3]
    for reading in reversed(held):
        reading.release()
    assert pages.references == 0
    write(pages, 0, 9)
    assert pages.spare_pages == 0


def test_without_a_spare_page_what_is_read_cannot_be_written_and_the_rest_can() -> None:
    pages = arena(300, spares=1)
    held = pages.read(claims(w=(0, 0, 200)), "a save")
    assert [write(pages, 0, 7, number) for number in range(3)] == [True, False, True]
    held.release()
    assert write(pages, 0, 7, 1)


def test_a_page_is_let_go_of_with_the_last_tensor_on_it() -> None:
    pages = arena(250)
    held = pages.read(claims(a=(0, 0, 50), b=(0, 50, 150), c=(0, 150, 250)), "a save")
    can = []
    for name in ("a", "c", "b", "b", "unknown"):
        held.let_go(name)
        can.append([write(pages, 0, 1, number) for number in range(3)])
    assert can == [[False, False, False], [False, False, True], *[[True, True, True]] * 3]
    assert pages.references == 0 and not held.holds("a")


def test_who_waits_is_woken_for_a_page_and_not_for_each_of_the_many_tensors_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages = arena(100)
    held = pages.read(claims(**{f"w{number}": (0, number, number + 1) for number in range(100)}), "a save")
    woken: list[int] = []
    monkeypatch.setattr(pages._changed, "notify_all", lambda: woken.append(pages.references))
    for number in range(100):
        assert pages.references == 1
        held.let_go(f"w{number}")
    assert woken == [0]


def test_pages_on_which_no_tensor_lies_are_not_held() -> None:
    pages = arena(300)
    held = pages.read(claims(w=(0, 0, 10)), "a save")
    assert pages.references == 1 and [write(pages, 0, 1, number) for number in range(3)] == [False, True, True]
    held.release()


def test_who_waits_for_a_page_goes_on_when_its_reader_lets_go() -> None:
    pages = arena(200)
    held = pages.read(claims(a=(0, 0, 100), b=(0, 100, 200)), "a save")
    timer = threading.Timer(0.2, held.let_go, ("b",))
    timer.start()
    began = time.monotonic()
    pages.wait_for([(0, 0), (0, 1)], since=began, seconds=10)
    assert 0.15 < time.monotonic() - began < 5
    assert [write(pages, 0, 1, number) for number in range(2)] == [False, True]
    timer.join()


def test_who_waits_in_vain_is_told_who_reads_how_much_and_what_to_do() -> None:
    pages = arena(200, spares=1)
    reading = pages.read(claims(a=(0, 0, 200)), "the snapshot of version 7")
    write(pages, 0, 1)
    told = r"1 pages of the host copy \(100 B\) .* after 50 ms .* the snapshot of version 7 \(200 B\), and all 1 spare"
    with pytest.raises(ResidencyError, match=told + r".*raise residency\.spare"):
        pages.wait_for([(0, 1)], since=time.monotonic(), seconds=0.05)
    reading.release()


def test_the_wait_for_readers_counts_from_when_one_of_them_last_let_go_of_anything() -> None:
    pages = arena(300)
    slow = pages.read(claims(a=(0, 0, 100), b=(0, 50, 200), c=(0, 200, 300)), "a slow disk")
    timers = [threading.Timer(0.2 * n, slow.let_go, (name,)) for n, name in enumerate("abc", start=1)]
    for timer in timers:
        timer.start()
    began = time.monotonic()
    pages.wait_for([(0, 2)], since=began, seconds=0.35)
    assert 0.5 < time.monotonic() - began < 3
    other = pages.read(claims(a=(0, 0, 100)), "a stuck one")
    began = time.monotonic()
    with pytest.raises(ResidencyError, match="without progress they are still read by a stuck one"):
        pages.wait_for([(0, 0)], since=began - 5, seconds=0.1)
    assert time.monotonic() - began < 3
    other.release()


def test_a_deadline_beyond_all_clocks_waits_for_the_reader() -> None:
    pages = arena(100)
    held = pages.read(ONE, "a save")
    timer = threading.Timer(0.05, held.release)
    timer.start()
    pages.wait_for([(0, 0)], since=time.monotonic(), seconds=1e12)
    assert write(pages, 0, 1)


def test_pages_never_exceed_the_state_and_the_bound_whatever_happens() -> None:
    dice, pages = random.Random(0), arena(*[250] * 4, spares=3)
    names = claims(**{f"{slab}.{half}": (slab, half * 125, half * 125 + 125) for slab in range(4) for half in range(2)})
    held: list[tuple[Reading, dict[tuple[int, int], int]]] = []
    for step in range(2000):
        slab, number = dice.randrange(4), dice.randrange(3)
        match dice.randrange(4):
            case 0 if len(held) < 3:
                reading = pages.read(names, "a save")
                held.append((reading, {place: first_byte(reading, pages, *place) for place in reading.pages}))
            case 1 if held:
                held.pop(dice.randrange(len(held)))[0].release()
            case 2 if held:
                dice.choice(held)[0].let_go(dice.choice(list(names.places)))
            case _:
                write(pages, slab, step % 251, number)
        for reading, seen in held:
            assert all(first_byte(reading, pages, *place) == seen[place] for place in reading.pages), "I3"
        assert pages.bytes == 4 * 252 + 300 and pages.spare_pages <= 3, "I6"
    for reading, _ in held:
        reading.release()
    assert pages.references == 0
    assert all(write(pages, slab, 0, number) for slab in range(4) for number in range(3))
    assert pages.spare_pages == 0


def test_memory_that_is_read_after_closing_is_still_there() -> None:
    pages = arena(100)
    write(pages, 0, 5)
    held, run = pages.read(ONE, "a save"), pages.run(0)
    pages.close()
    del pages
    assert bytes(run.joined(0, 100)) == b"\5" * 100
    held.release()


def test_the_mapping_is_made_once_and_undone_once() -> None:
    made, undone = [], []

    def counted(size: int):
        made.append(size)
        return map_plain(size)[0], lambda: undone.append(size)

    pages = Arena(plan_pages([10, 20], page_bytes=16, spare_bytes=64), counted)
    held = pages.read(claims(16, w=(1, 0, 20)), "a save")
    write(pages, 1, 1)
    held.release()
    pages.close()
    pages.close()
    assert made == undone == [16 + 32 + 4 * 16]


def test_an_arena_that_cannot_be_mapped_fails_at_once() -> None:
    def broken(size: int):
        raise ResidencyError("no memory")

    with pytest.raises(ResidencyError):
        Arena(plan_pages([10], page_bytes=16, spare_bytes=0), broken)


def test_an_arena_of_nothing_holds_nothing() -> None:
    pages = arena()
    assert pages.bytes == 0 and not pages.read(claims(), "a save").pages
    pages.close()


def test_a_reader_that_is_late_may_let_go_after_the_end_more_than_once() -> None:
    pages = arena(100, spares=1)
    late = pages.read(ONE, "a save")
    write(pages, 0, 1)
    pages.close()
    for _ in range(2):
        late.let_go("w")
        late.release()
    assert pages.references == 0


def test_readers_of_many_threads_leave_no_reference() -> None:
    pages = arena(1000, spares=2)
    names = claims(**{f"w{i}": (0, i * 40, i * 40 + 40) for i in range(25)})

    def save() -> None:
        for _ in range(50):
            reading = pages.read(names, "a save")
            for name in names.places:
                reading.let_go(name)
            reading.release()

    threads = [threading.Thread(target=save) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(10):
        while pages.writable((0, number)) is None:
            pages.wait_for([(0, number)], since=time.monotonic(), seconds=10)
    for thread in threads:
        thread.join(timeout=20)
    assert pages.references == 0
    assert torch.equal(pages.run(0).memory[:0], torch.empty(0, dtype=torch.uint8))
