"""`tidemill.residency.leaks` and `residue`: tensors that nobody owns, and what no sleep gives back."""

import gc
from collections.abc import Iterable

import pytest
import torch

from tidemill.errors import ResidencyError
from tidemill.residency.leaks import CpuMeter, CudaMeter, Kept, LeakGate, meter_of, own, uncounted_bytes
from tidemill.residency.residue import GROUPS, NoResidue, residue_of
from tidemill.units import MIB

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


class Readings:
    """A meter that says what it is told, and counts how often it is asked."""

    def __init__(self) -> None:
        self.bytes = 0
        self.asked = 0

    def unowned(self) -> int:
        self.asked += 1
        return self.bytes

    def largest(self) -> list[str]:
        return ["3 MiB (float32 [3, 4], with a graph behind it)"]


class Keeper:
    """Owns what it is given."""

    def __init__(self, *tensors: Kept) -> None:
        self.tensors = tensors
        own(self)

    def kept(self) -> Iterable[Kept]:
        return self.tensors


def gate(meter: Readings, warnings: list[str], *, stop: bool = True, slow: bool = False) -> LeakGate:
    return LeakGate("trainer", meter, stop=stop, warn=warnings.append, slow=slow, tolerance=10)


def test_what_was_there_at_the_first_two_sleeps_is_usual_and_growth_beyond_is_refused_with_the_largest() -> None:
    meter, warnings = Readings(), list[str]()
    looked_at = gate(meter, warnings)
    for meter.bytes in (100, 500, 505, 510, 300, 510):
        looked_at.check()
    assert not warnings
    meter.bytes = 511
    looked_at.check()
    assert len(warnings) == 1
    for meter.bytes in (511, 521):
        looked_at.check()
    meter.bytes = 522
    for _ in range(2):
        with pytest.raises(
            ResidencyError, match=r"cannot put trainer to sleep: 522 B .* no owner, 22 B more .*float32"
        ):
            looked_at.check()
    for meter.bytes in (515, 400):
        looked_at.check()
    assert len(warnings) == 1


def test_what_appears_once_and_never_grows_is_warned_of_once_and_stops_nothing() -> None:
    for slow in (False, True):
        meter, warnings = Readings(), list[str]()
        looked_at = gate(meter, warnings, slow=slow)
        for meter.bytes in (1, 1, *[500] * 100):
            looked_at.check()
        assert len(warnings) == 1


def test_a_leak_slower_than_the_tolerance_is_refused_when_it_has_added_up_to_it_twice() -> None:
    meter, warnings = Readings(), list[str]()
    looked_at = gate(meter, warnings)
    with pytest.raises(ResidencyError, match="they had grown before, to 12 B"):
        for meter.bytes in range(100):
            looked_at.check()
    assert (meter.bytes, len(warnings)) == (23, 1)


def test_what_another_thread_holds_at_one_sleep_is_warned_of_and_no_reason_to_stop() -> None:
    meter, warnings = Readings(), list[str]()
    looked_at = gate(meter, warnings)
    for meter.bytes in (1, 1, 50, 1, 50, 1):
        looked_at.check()
    assert len(warnings) == 2


def test_growth_is_warned_of_once_by_setting() -> None:
    meter, warnings = Readings(), list[str]()
    looked_at = gate(meter, warnings, stop=False)
    for meter.bytes in (1, 1, 50, 50, 55, 70):
        looked_at.check()
    assert len(warnings) == 2
    assert "trainer sleeps all the same" in warnings[0]


def test_a_slow_meter_is_asked_less_and_less_often_and_finds_what_grows_at_every_step() -> None:
    meter = Readings()
    looked_at = gate(meter, [], slow=True)
    for _ in range(1000):
        looked_at.check()
    assert meter.asked == 2 + 3  # 8, 64, 512
    leaking = gate(meter, [], slow=True)
    with pytest.raises(ResidencyError):
        for meter.bytes in range(0, 1000, 2):
            leaking.check()
    assert meter.bytes <= 128


def test_a_cycle_of_references_is_no_leak() -> None:
    looked_at = LeakGate("trainer", CpuMeter(), stop=True, warn=lambda text: None, slow=False, tolerance=MIB)
    gc.collect()
    for _ in range(2):
        looked_at.check()
    gc.disable()
    try:
        ring: list[object] = [torch.zeros(3 * MIB, dtype=torch.uint8)]
        ring.append(ring)
        del ring
        looked_at.check()
    finally:
        gc.enable()


def test_on_a_cpu_a_tensor_that_is_kept_beyond_its_step_is_named_and_one_with_an_owner_is_not() -> None:
    gc.collect()
    looked_at = LeakGate("trainer", meter_of(CPU), stop=True, warn=lambda text: None, slow=False)
    for _ in range(2):
        looked_at.check()
    mine = torch.zeros(65 * MIB, dtype=torch.uint8)
    keeper = Keeper(Kept(mine))
    looked_at.check()
    del keeper
    for _ in range(2):
        looked_at.check()  # it may have been taken for good
    more = torch.zeros(66 * MIB, dtype=torch.uint8)
    with pytest.raises(ResidencyError, match=r"66.0 MiB \(uint8 \[69206016\]\); 65.0 MiB \(uint8 \[68157440\]\)"):
        looked_at.check()
    assert more.numel() > mine.numel()


def test_views_of_one_storage_count_once() -> None:
    gc.collect()
    meter = meter_of(CPU)
    before = meter.unowned()
    whole = torch.zeros(MIB, dtype=torch.uint8)
    views = [whole[:10], whole[5:], whole.view(2, -1)]
    assert meter.unowned() - before == MIB
    assert len(views) == 3


def test_an_owner_that_is_gone_owns_nothing_and_what_the_allocator_does_not_count_is_told_apart() -> None:
    before = uncounted_bytes(CPU)
    keeper = Keeper(Kept(torch.zeros(7, dtype=torch.uint8), counted=False), Kept(torch.zeros(9, dtype=torch.uint8)))
    assert uncounted_bytes(CPU) - before == 7
    del keeper
    gc.collect()
    assert uncounted_bytes(CPU) == before


def test_a_cpu_has_no_residue() -> None:
    residue = residue_of(CPU)
    assert isinstance(residue, NoResidue)
    with residue.holding(GROUPS):
        assert residue.left() == {}


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_what_only_a_graph_of_autograd_holds_is_seen_too() -> None:
    device = torch.device("cuda", 0)
    meter = CudaMeter(device)
    before = meter.unowned()
    weights = torch.randn(1024, 1024, device=device, requires_grad=True)
    loss = (weights.exp() * weights).sum()
    assert meter.unowned() - before >= 2 * weights.nbytes
    keeper = Keeper(Kept(weights))
    assert meter.unowned() - before >= weights.nbytes
    del loss
    assert meter.unowned() - before < MIB
    assert keeper.tensors


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_what_is_left_has_holders() -> None:
    residue = residue_of(torch.device("cuda", 0))
    left = residue.left()
    assert 200 * MIB < left["context"] < 2048 * MIB
    hog = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    del hog
    assert residue.left()["cache"] >= 256 * MIB
    torch.cuda.empty_cache()
    assert residue.left()["cache"] < 64 * MIB
