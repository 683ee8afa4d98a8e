"""What a saver prepares before step 1 (`tidemill.residency.savers.preparation`), and refuses there."""

from typing import Any

import psutil
import pytest
import torch
from tests.residency.savers.kinds import KINDS, RESIZED, Kind, of_kind

from tidemill.contracts.footprint import Part
from tidemill.errors import ResidencyError
from tidemill.residency.host_memory import map_plain
from tidemill.residency.savers import host_arena
from tidemill.residency.savers.host_arena import HostArenaSaver

MIB = 1 << 20


def test_a_host_without_room_for_the_pages_is_refused_before_anything_moves() -> None:
    tensor = torch.ones(4096)
    address = tensor.data_ptr()
    keeper = of_kind(RESIZED, page_bytes=1024, free_host_bytes=lambda: 10_000)
    keeper.add("w", tensor, Part.WEIGHTS)
    told = (
        r"18\.0 KiB are needed \(18432 bytes: 16\.0 KiB of state.*9\.8 KiB \(10000 bytes\) are there.*residency\.spare"
    )
    with pytest.raises(ResidencyError, match=told):
        keeper.freeze()
    assert tensor.data_ptr() == address and tensor.sum().item() == 4096


def test_of_ranks_that_were_promised_the_same_memory_the_second_is_refused() -> None:
    process = psutil.Process()
    limit = process.memory_info().rss + 96 * MIB
    savers = [
        of_kind(
            RESIZED, page_bytes=MIB, spare_bytes=64 * MIB, free_host_bytes=lambda: limit - process.memory_info().rss
        )
        for _ in range(2)
    ]
    for keeper in savers:
        keeper.add("w", torch.ones(MIB // 4), Part.WEIGHTS)
    savers[0].freeze()
    with pytest.raises(
        ResidencyError, match=r"65\.0 MiB are needed .* MiB \(\d+ bytes\) are there.*lower residency\.spare"
    ):
        savers[1].freeze()


def test_where_no_system_says_what_is_free_pages_are_taken() -> None:
    keeper = of_kind(RESIZED, free_host_bytes=lambda: None)
    keeper.add("w", torch.ones(4096), Part.WEIGHTS)
    keeper.freeze()
    assert keeper.host_bytes() > 0


@pytest.mark.parametrize("page_bytes", [512, 1024, 4096])
def test_what_is_counted_of_small_pages_is_what_is_mapped(monkeypatch: pytest.MonkeyPatch, page_bytes: int) -> None:
    mapped: list[int] = []

    def counted(size: int, **settings: Any) -> Any:
        mapped.append(size)
        return map_plain(size, **settings)

    monkeypatch.setattr(host_arena, "map_plain", counted)
    keeper = of_kind(RESIZED, page_bytes=page_bytes, spare_bytes=MIB)
    for i in range(40):
        keeper.add(f"w{i}", torch.ones(100 + 40 * i), Part.WEIGHTS)
    keeper.freeze()
    assert mapped == [keeper.host_bytes()]
    assert keeper.host_bytes() - MIB < 1.5 * keeper.device_bytes(Part.ALL)


@pytest.mark.parametrize("kind", KINDS)
def test_device_memory_that_runs_out_half_way_leaves_every_tensor_right(kind: Kind) -> None:
    made = 0

    def second_fails(size: int, device: torch.device) -> object:
        nonlocal made
        made += 1
        if made == 2:
            raise MemoryError("no room")
        return kind.make_memory(size, device)

    tensors = [torch.full((256,), float(i), device=kind.device) for i in range(3)]
    keeper = HostArenaSaver(
        device=kind.device,
        page_bytes=1024,
        pin=False,
        make_memory=second_fails,  # type: ignore[arg-type]
    )
    for i, tensor in enumerate(tensors):
        keeper.add(str(i), tensor, Part.WEIGHTS)
    with pytest.raises(MemoryError):
        keeper.freeze()
    assert [tensor[0].item() for tensor in tensors] == [0.0, 1.0, 2.0]


def test_pages_that_no_element_would_fit_on_are_rounded_up() -> None:
    tensors = {"turned": torch.arange(600.0).view(20, 30).t(), "w": torch.arange(1000.0)}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    keeper = of_kind(RESIZED, page_bytes=1001)
    for name, tensor in tensors.items():
        keeper.add(name, tensor, Part.WEIGHTS)
    keeper.freeze()
    for key in range(2):
        keeper.capture(key)
        held = keeper.snapshot()
        for name, tensor in before.items():
            assert bytes(held.tensors[name].data) == tensor.contiguous().numpy().tobytes()
        held.release()
        keeper.release(key)
        keeper.restore()
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_first_sleep_finds_nothing_of_the_old_storages_in_the_cache() -> None:
    tensors = [torch.ones(64 * 1024, device="cuda") for _ in range(1000)]
    keeper = HostArenaSaver(device="cuda", page_bytes=16 * MIB, pin=True)
    for i, tensor in enumerate(tensors):
        keeper.add(str(i), tensor, Part.WEIGHTS)
    keeper.freeze()
    # Blocks of the allocator are rounded up to 2 MiB.
    assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() <= 64 * MIB
    assert torch.cuda.memory_allocated() < 1.1 * keeper.device_bytes(Part.ALL) + 64 * MIB
    keeper.capture(0)
    keeper.release(0)
    keeper.restore()
    assert all(tensor.sum().item() == tensor.numel() for tensor in tensors[::100])
    keeper.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "cuda" in (kind.id or "")])
def test_on_cuda_the_bytes_leave_the_device_and_come_back_exact(kind: Kind) -> None:
    keeper = of_kind(kind, page_bytes=8 * MIB)
    tensors = {f"w{i}": torch.randn(MIB, device="cuda") for i in range(20)}
    before = {name: tensor.cpu() for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        keeper.add(name, tensor, Part.WEIGHTS)
    keeper.freeze()
    awake = torch.cuda.mem_get_info()[0]
    for key in range(3):
        keeper.capture(key)
        keeper.release(key)
        assert torch.cuda.mem_get_info()[0] - awake >= keeper.device_bytes(Part.ALL)
        keeper.restore()
    assert all(torch.equal(tensor.cpu(), before[name]) for name, tensor in tensors.items())
    held = keeper.snapshot()
    assert bytes(held.tensors["w3"].data) == before["w3"].numpy().tobytes()
    held.release()
    keeper.close()
