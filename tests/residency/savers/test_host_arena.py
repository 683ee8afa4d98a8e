"""The host copy saver (`tidemill.residency.savers.host_arena`): sleep that really releases, wake that is exact."""

import re
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from tests.residency.savers.kinds import KINDS, RESIZED, Kind, of_kind
from torch import nn

from tidemill import faults
from tidemill.contracts.checkpoint import HeldTensor, TensorBytes
from tidemill.contracts.footprint import Part
from tidemill.errors import CheckpointError, ResidencyError
from tidemill.residency.savers.host_arena import HostArenaSaver
from tidemill.units import format_bytes


def saver(page_bytes: int = 1024, **changes: Any) -> HostArenaSaver:
    return of_kind(RESIZED, page_bytes=page_bytes, **changes)


class Tied(nn.Module):
    """Embedding tied to the head, a buffer, a transposed parameter: what real models have."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.hidden = nn.Linear(8, 8)
        self.turned = nn.Parameter(torch.randn(8, 8).t())
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(self.embed(ids)) @ self.turned) * self.scale)


class Run:
    """A model, AdamW with its state created at once, and a saver over all of it."""

    def __init__(self, page_bytes: int, kind: Kind = RESIZED, **changes: Any) -> None:
        torch.manual_seed(0)
        self.kind, self.page_bytes = kind, page_bytes
        self.model = Tied().to(kind.device)
        # `capturable` keeps its counters on the device, where this saver keeps all of it.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05, capturable=kind.device == "cuda")
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.saver = of_kind(kind, page_bytes=page_bytes, **changes)
        self.version = 0

    def freeze(self) -> "Run":
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            self.saver.add(name, parameter, Part.WEIGHTS)
        self.saver.add("scale", self.model.scale, Part.WEIGHTS)
        for name, parameter in self.model.named_parameters():
            for key, state in self.optimizer.state[parameter].items():
                self.saver.add(f"{name}.{key}", state, Part.OPTIMIZER)
        self.saver.freeze()
        return self

    def step(self, seed: int) -> float:
        ids = torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(seed)).to(self.kind.device)
        loss = nn.functional.cross_entropy(self.model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.version += 1
        return loss.item()

    def sleep(self) -> None:
        self.saver.capture(self.version)
        self.saver.release(self.version)

    def state(self) -> dict[str, torch.Tensor]:
        tensors = {name: tensor.detach().cpu().clone() for name, tensor in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"{name}.{key}"] = value.cpu().clone()
        return tensors


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


ROOM = 1 << 18  # spare pages for several whole versions


@pytest.fixture(params=[512, 1024, 1 << 20])
def run(request: pytest.FixtureRequest, kind: Kind) -> Run:
    return Run(request.param, kind, spare_bytes=ROOM).freeze()


@pytest.fixture
def small(kind: Kind) -> Run:
    """Of many slabs."""
    return Run(512, kind).freeze()


def test_training_with_a_sleep_between_all_steps_is_bit_identical_to_a_twin_that_never_slept(run: Run) -> None:
    twin = Run(1024, run.kind)
    for seed in range(6):
        assert run.step(seed) == twin.step(seed)
        run.sleep()
        run.saver.restore()
        assert same(run.state(), twin.state())


def test_asleep_no_registered_tensor_has_a_byte(run: Run) -> None:
    tensors = [*run.model.parameters(), run.model.scale, *run.optimizer.state[run.model.turned].values()]
    run.sleep()
    assert run.saver.resident_part() == Part.NONE
    assert all(run.kind.is_away(tensor, run.saver) for tensor in tensors)
    run.saver.restore()
    assert not any(run.kind.is_away(tensor, run.saver) for tensor in tensors)


def test_freezing_changes_no_value_no_stride_and_no_object(kind: Kind) -> None:
    run = Run(1024, kind)
    before, turned = run.state(), run.model.turned
    run.freeze()
    assert same(run.state(), before)
    assert run.model.turned is turned
    assert turned.stride() == (1, 8)
    assert turned in run.optimizer.state


def test_tied_tensors_stay_tied_and_have_one_entry(run: Run) -> None:
    assert "head.weight" not in run.saver.ledger.names()
    run.sleep()
    run.saver.restore()
    with torch.no_grad():
        run.model.embed.weight[3, 3] = 77.0
    assert run.model.head.weight[3, 3] == 77.0
    assert run.model.head.weight is run.model.embed.weight


def test_separate_tensor_objects_of_one_storage_stay_tied() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    other = weight.detach()
    keeper = saver()
    keeper.add("w", weight, Part.WEIGHTS)
    keeper.add("other", other, Part.WEIGHTS)
    keeper.freeze()
    keeper.capture(1)
    keeper.release(1)
    keeper.restore()
    other[2] = 5.0
    assert weight.tolist() == [1.0, 1.0, 5.0, 1.0]


def test_views_of_one_flat_buffer_stay_views_of_it() -> None:
    flat = torch.arange(12.0)
    matrix, turned, tail = flat[:6].view(2, 3), flat[:6].view(2, 3).t(), flat[9:]
    keeper = saver()
    for name, tensor in {"flat": flat, "matrix": matrix, "turned": turned, "tail": tail}.items():
        keeper.add(name, tensor, Part.WEIGHTS)
    keeper.freeze()
    keeper.capture(1)
    keeper.release(1)
    assert flat.untyped_storage().nbytes() == 0
    keeper.restore()
    flat.mul_(2.0)
    assert matrix.tolist() == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]
    assert turned.tolist() == [[0.0, 6.0], [2.0, 8.0], [4.0, 10.0]]
    assert tail.tolist() == [18.0, 20.0, 22.0]
    keeper.capture(2)
    assert as_list(keeper.snapshot().tensors["turned"]) == [0.0, 6.0, 2.0, 8.0, 4.0, 10.0]


def as_list(tensor: HeldTensor) -> list[float]:
    return np.frombuffer(tensor.data, dtype=np.float32).tolist()


def test_old_storages_are_freed_at_the_freeze() -> None:
    array = np.ones(1 << 16, dtype=np.float32)
    gone = weakref.ref(array)
    weight = torch.from_numpy(array)
    del array
    keeper = saver()
    keeper.add("w", weight, Part.WEIGHTS)
    keeper.freeze()
    assert gone() is None
    assert weight.sum().item() == 1 << 16


def test_odd_shapes_and_types_survive() -> None:
    tensors = {
        "scalar": torch.tensor(3.5),
        "nothing": torch.zeros(0, 4),
        "half": torch.randn(7).bfloat16(),
        "flags": torch.tensor([True, False, True]),
        "count": torch.tensor([1 << 40]),
        "gappy": torch.arange(20.0)[::3],
        "turned": torch.randn(3, 5, 2).permute(2, 0, 1),
    }
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    keeper = saver(512)
    for name, tensor in tensors.items():
        keeper.add(name, tensor, Part.WEIGHTS)
    keeper.freeze()
    for key in range(3):
        keeper.capture(key)
        keeper.release(key)
        keeper.restore()
    assert same(tensors, before)


def test_waking_by_part_leaves_the_other_part_asleep(run: Run) -> None:
    run.sleep()
    run.saver.restore(Part.WEIGHTS)
    assert run.saver.resident_part() == Part.WEIGHTS
    assert run.kind.is_away(run.optimizer.state[run.model.turned]["exp_avg"], run.saver)
    run.saver.release(run.version)
    assert run.saver.resident_part() == Part.NONE


def test_weights_changed_while_the_optimizer_sleeps_are_captured_with_it(run: Run) -> None:
    run.step(0)
    run.sleep()
    run.saver.restore(Part.WEIGHTS)
    with torch.no_grad():
        run.model.turned.mul_(2.0)
    run.version += 1
    run.sleep()
    run.saver.restore()
    twin = Run(1024, run.kind)
    twin.step(0)
    with torch.no_grad():
        twin.model.turned.mul_(2.0)
    assert same(run.state(), twin.state())


def test_sizes_are_reported_awake_and_asleep(run: Run) -> None:
    awake = [run.saver.device_bytes(part) for part in (Part.WEIGHTS, Part.OPTIMIZER, Part.ALL, Part.KV_CACHE)]
    run.sleep()
    assert [run.saver.device_bytes(p) for p in (Part.WEIGHTS, Part.OPTIMIZER, Part.ALL, Part.KV_CACHE)] == awake
    spare = run.saver.host_bytes() - awake[2]
    assert awake[0] + awake[1] == awake[2] and 0 < spare <= ROOM + 2 * 4096
    assert awake[3] == 0


# Seals


def test_a_second_sleep_without_a_change_copies_nothing(run: Run) -> None:
    run.sleep()
    run.saver.restore()
    with faults.passed() as points:
        run.sleep()
    assert "residency.capture.slab" not in points
    assert run.saver.resident_part() == Part.NONE


def test_release_is_refused_unless_the_present_contents_are_sealed(run: Run) -> None:
    with pytest.raises(ResidencyError, match="no whole version"):
        run.saver.release(0)
    run.saver.capture(1)
    with pytest.raises(ResidencyError, match="version 2 and the host pages hold 1"):
        run.saver.release(2)
    assert run.saver.resident_part() == Part.WEIGHTS | Part.OPTIMIZER


def test_a_snapshot_needs_a_seal(run: Run) -> None:
    with pytest.raises(ResidencyError, match="capture"):
        run.saver.snapshot()


def test_none_is_no_key(run: Run) -> None:
    with pytest.raises(ResidencyError, match="counter"):
        run.saver.capture(None)


def test_transitions_may_be_repeated(run: Run) -> None:
    before = run.state()
    for _ in range(2):
        run.sleep()
    for _ in range(2):
        run.saver.restore()
    assert same(run.state(), before)


def test_before_the_freeze_and_after_it_the_wrong_calls_are_refused() -> None:
    run = Run(1024)
    for call in (lambda: run.saver.capture(1), lambda: run.saver.release(1), run.saver.restore, run.saver.snapshot):
        with pytest.raises(ResidencyError, match="freeze"):
            call()
    run.freeze()
    with pytest.raises(ResidencyError, match="ledger is frozen"):
        run.saver.add("late", torch.zeros(1), Part.OPTIMIZER)
    with pytest.raises(ResidencyError, match="twice"):
        run.saver.freeze()


# Failures


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_wake_that_fails_half_way_leaves_all_asleep_and_the_next_one_is_exact(nth: int, small: Run) -> None:
    run = small
    run.step(0)
    before = run.state()
    run.sleep()
    with faults.armed(f"residency.restore.slab=raise@{nth}"), pytest.raises(ResidencyError, match="all is as before"):
        run.saver.restore()
    assert run.saver.resident_part() == Part.NONE
    assert all(run.kind.is_away(parameter, run.saver) for parameter in run.model.parameters())
    run.saver.restore()
    assert same(run.state(), before)


def test_a_part_that_is_awake_survives_the_failed_wake_of_another(small: Run) -> None:
    run = small
    run.sleep()
    run.saver.restore(Part.WEIGHTS)
    moments = f"{format_bytes(run.saver.device_bytes(Part.OPTIMIZER))} of it are not on {run.kind.device}"
    told = rf"{re.escape(moments)}\S* .* all is as before"
    with faults.armed("residency.restore.slab=raise@2"), pytest.raises(ResidencyError, match=told):
        run.saver.restore()
    assert run.saver.resident_part() == Part.WEIGHTS


def test_a_capture_that_fails_seals_nothing_and_can_be_repeated(run: Run) -> None:
    run.saver.capture(0)
    run.step(0)
    before = run.state()
    with faults.armed("residency.capture.slab=raise"), pytest.raises(faults.FaultInjected):
        run.saver.capture(run.version)
    assert run.saver.sealed_key is None
    with pytest.raises(ResidencyError):
        run.saver.release(run.version)
    run.sleep()
    run.saver.restore()
    assert same(run.state(), before)


def test_a_release_that_fails_half_way_leaves_all_awake(small: Run) -> None:
    run = small
    before = run.state()
    with faults.armed("residency.release.slab=raise@3"), pytest.raises(ResidencyError, match="awake as before"):
        run.sleep()
    assert run.saver.resident_part() == Part.WEIGHTS | Part.OPTIMIZER
    assert same(run.state(), before)


def test_memory_lent_to_numpy_is_not_released_under_it(run: Run) -> None:
    if run.kind is not RESIZED:
        pytest.skip("numpy knows an address, which this kind keeps")
    array = run.model.scale.numpy()
    with pytest.raises(ResidencyError, match=r"clone\(\)\.numpy"):
        run.sleep()
    assert run.saver.resident_part() == Part.WEIGHTS | Part.OPTIMIZER
    assert array == 2.0


# Snapshots


def contents(tensors: dict[str, HeldTensor]) -> dict[str, bytes]:
    return {name: bytes(tensor.data) for name, tensor in tensors.items()}


def test_a_snapshot_never_changes_though_training_goes_on_and_the_tenant_sleeps_again(run: Run) -> None:
    run.step(0)
    run.sleep()
    state, snapshot = run.saver.checksums(), run.saver.snapshot()
    held = contents(snapshot.tensors)
    for seed in range(1, 4):
        run.saver.restore()
        run.step(seed)
        run.sleep()
        assert contents(snapshot.tensors) == held
        assert run.saver.checksums() != state
    assert run.saver.references() > 0
    snapshot.release()
    assert run.saver.references() == 0


def test_spare_pages_are_given_back_when_the_writer_is_done() -> None:
    run = Run(512, spare_bytes=ROOM).freeze()
    usual = run.saver.host_bytes()
    run.saver.capture(0)
    snapshot = run.saver.snapshot()
    run.step(0)
    run.saver.capture(run.version)
    assert run.saver._arena.spare_pages > 0
    snapshot.release()
    run.step(1)
    run.saver.capture(run.version)
    assert (run.saver._arena.spare_pages, run.saver.host_bytes()) == (0, usual)


def test_a_snapshot_may_be_released_twice_and_from_any_thread(run: Run) -> None:
    run.saver.capture(0)
    first, second = run.saver.snapshot(), run.saver.snapshot()
    threads = [threading.Thread(target=first.release) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert run.saver.references() == len(run.saver._claims.readers)
    second.release()
    assert run.saver.references() == 0


def test_a_snapshot_cannot_be_written_to_and_holds_what_torch_holds(run: Run) -> None:
    run.step(0)
    run.sleep()
    tensors = run.saver.snapshot().tensors
    assert all(tensor.data.readonly for tensor in tensors.values())
    run.saver.restore()
    for name, value in run.state().items():
        if name != "head.weight":
            assert bytes(tensors[name].data) == b"".join(tensors[name].pieces()) == value.contiguous().numpy().tobytes()
            assert tensors[name].shape == tuple(value.shape)


# Loading


def test_loading_a_snapshot_brings_back_the_state_of_its_moment(run: Run) -> None:
    run.step(0)
    run.saver.capture(run.version)
    snapshot, then = run.saver.snapshot(), run.state()
    expected = [run.step(seed) for seed in (1, 2)]
    run.saver.load(snapshot.tensors)
    assert same(run.state(), then)
    assert run.saver.sealed_key is None
    assert [run.step(seed) for seed in (1, 2)] == expected


def test_what_is_loaded_under_a_key_is_in_the_pages_too_and_sleeps_without_a_copy(run: Run) -> None:
    run.step(0)
    run.saver.capture(run.version)
    snapshot, then = run.saver.snapshot(), run.state()
    run.step(1)
    run.saver.load(snapshot.tensors, key="loaded")
    snapshot.release()
    assert run.saver.sealed_key == "loaded" and run.saver.capture("loaded").copied == 0
    run.saver.release("loaded")
    run.saver.restore()
    assert same(run.state(), then)


def test_loading_writes_no_page_that_a_snapshot_holds(run: Run) -> None:
    run.saver.capture(0)
    old = run.saver.snapshot()
    run.step(0)
    run.saver.capture(1)
    new, held = run.saver.snapshot(), contents(run.saver.snapshot().tensors)
    run.saver.load(old.tensors)
    assert contents(new.tensors) == held


def test_a_load_that_does_not_fit_changes_nothing(run: Run) -> None:
    run.step(0)
    run.saver.capture(run.version)
    tensors = dict(run.saver.snapshot().tensors)
    before = run.state()
    broken = [
        {name: tensor for name, tensor in tensors.items() if name != "scale"},
        tensors | {"ghost": tensors["scale"]},
        tensors | {"turned": tensors["scale"]},
    ]
    for attempt in broken:
        with pytest.raises(CheckpointError):
            run.saver.load(attempt)
        assert same(run.state(), before)
        assert run.saver.sealed_key == run.version


def test_a_load_whose_bytes_run_short_changes_no_tensor_and_the_next_snapshot_is_of_these(run: Run) -> None:
    run.step(0)
    run.saver.capture(run.version)
    then = run.saver.snapshot()
    run.step(1)
    before = run.state()
    last = list(then.tensors)[-1]
    short = TensorBytes(dtype="F32", shape=then.tensors[last].shape, data=memoryview(b""))
    with pytest.raises(CheckpointError, match=f"cannot load '{last}': 0 bytes were read where"):
        run.saver.load({**then.tensors, last: short})
    assert same(run.state(), before)
    run.saver.capture(run.version)
    run.saver.load(run.saver.snapshot().tensors)
    assert same(run.state(), before)


def test_loading_while_asleep_is_refused(run: Run) -> None:
    run.sleep()
    with pytest.raises(ResidencyError, match="asleep"):
        run.saver.load(run.saver.snapshot().tensors)


def test_checksums_are_the_same_awake_and_asleep_and_notice_a_change(run: Run) -> None:
    run.saver.capture(0)
    awake = run.saver.checksums()
    run.sleep()
    assert run.saver.checksums() == awake
    run.saver.restore()
    assert run.saver.checksums() == awake
    with torch.no_grad():
        run.model.turned[0, 0] += 1.0
    changed = run.saver.checksums()
    assert [name for name in awake if awake[name] != changed[name]] == ["turned"]


def test_a_snapshot_is_readable_after_the_saver_is_closed() -> None:
    run = Run(1024).freeze()
    run.saver.capture(0)
    snapshot = run.saver.snapshot()
    held = contents(snapshot.tensors)
    run.saver.close()
    del run
    assert contents(snapshot.tensors) == held
    snapshot.release()


def test_a_saver_of_nothing_works() -> None:
    keeper = saver()
    keeper.freeze()
    keeper.capture(1)
    keeper.release(1)
    keeper.restore()
    assert keeper.snapshot().tensors == {}
    assert keeper.resident_part() == Part.NONE


def test_thirty_rounds_leave_host_and_device_bytes_flat(run: Run) -> None:
    sizes = set()
    for seed in range(30):
        run.step(seed)
        run.sleep()
        run.saver.restore()
        sizes.add((run.saver.host_bytes(), run.saver.device_bytes(Part.ALL)))
    assert len(sizes) == 1
