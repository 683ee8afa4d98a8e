import pytest
import torch

from tidemill.contracts.footprint import Part
from tidemill.engines.vllm.memory import EngineMemory, HostRooms
from tidemill.errors import ResidencyError
from tidemill.residency.leaks import CpuMeter

BOTH = Part.WEIGHTS | Part.KV_CACHE


def built() -> tuple[EngineMemory, dict[str, torch.Tensor]]:
    slab = torch.ones(64)
    tensors = {"a": slab[:32], "b": slab[32:], "cache": torch.zeros(100), "rope": torch.arange(5.0)}
    rooms = HostRooms({Part.WEIGHTS: [tensors["a"], tensors["b"]], Part.KV_CACHE: [tensors["cache"]]})
    return EngineMemory(rooms, {"rope": tensors["rope"]}), tensors


def held(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def test_parts_leave_and_come_back_and_their_tensors_stay_objects() -> None:
    memory, tensors = built()
    assert (memory.size(Part.WEIGHTS), memory.size(Part.KV_CACHE), memory.size(Part.ALL)) == (256, 400, 656)
    memory.sleep()
    assert memory.present == Part.NONE
    assert held(tensors["a"]) == held(tensors["cache"]) == 0
    assert memory.wake(Part.WEIGHTS | Part.OPTIMIZER) == Part.WEIGHTS
    assert (held(tensors["b"]), held(tensors["cache"])) == (256, 0)
    tensors["a"].fill_(2.0)
    assert memory.wake(Part.ALL) == Part.KV_CACHE
    assert memory.wake(Part.ALL) == Part.NONE
    assert tensors["a"].sum() == 64.0
    assert memory.present == BOTH
    assert memory.size(Part.ALL) == 656


def test_buffers_hold_what_they_held_when_weights_come_back() -> None:
    memory, tensors = built()
    assert memory.host_bytes == 20
    memory.sleep()
    tensors["rope"].fill_(float("nan"))
    memory.wake(Part.KV_CACHE)
    assert tensors["rope"].isnan().all()
    memory.wake(Part.WEIGHTS)
    assert tensors["rope"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_wake_that_finds_no_room_takes_nothing() -> None:
    memory, tensors = built()
    memory.sleep()
    rooms = memory._rooms
    take = rooms.take

    def scarce(part: Part) -> None:
        if part == Part.KV_CACHE:
            raise RuntimeError("CUDA error: out of memory")
        take(part)

    rooms.take = scarce
    with pytest.raises(ResidencyError, match=r"cannot wake engine \(weights, kv cache\): 656 bytes .* out of memory"):
        memory.wake(BOTH)
    assert memory.present == Part.NONE
    assert held(tensors["a"]) == 0
    rooms.take = take
    assert memory.wake(BOTH) == BOTH


def test_memory_that_is_lent_is_not_released() -> None:
    memory, tensors = built()
    lent = tensors["cache"].numpy()
    with pytest.raises(ResidencyError, match="cannot release the engine's kv cache"):
        memory.check_can_sleep()
    assert lent.size and memory.present == BOTH


def test_what_an_engine_keeps_is_owned() -> None:
    before = CpuMeter().unowned()
    slab, cache = torch.ones(1 << 20), torch.ones(1 << 20)
    memory = EngineMemory(HostRooms({Part.WEIGHTS: [slab], Part.KV_CACHE: [cache]}), {})
    assert CpuMeter().unowned() < before + (1 << 20)
    memory.sleep()
    memory.wake(BOTH)
    assert CpuMeter().unowned() < before + (1 << 20)
