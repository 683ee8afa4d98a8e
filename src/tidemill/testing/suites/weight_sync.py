"""What every weight sync must do. Subclass `WeightSyncSuite` and build the sync under test.

The suite brings a trainer and an engine of its own, a handful of tensors each, that fail where they are told to.
"""

from collections.abc import Iterable, Iterator, Mapping

import pytest
import torch

from tidemill.contracts.events import ignore
from tidemill.contracts.footprint import Part
from tidemill.contracts.residency import Residency
from tidemill.contracts.state import PolicyVersion
from tidemill.contracts.weights import EVERY_WEIGHT, Sample, WeightSync
from tidemill.errors import WeightSyncError
from tidemill.residency.manager import LeaseManager
from tidemill.testing.fakes.device import FakeTenant
from tidemill.weights.checksum import checksums

__all__ = ["TensorEngine", "TensorTrainer", "WeightSyncSuite"]


class TensorTrainer:
    """Hands out tensors; `fail_at` is the number of the tensor before which it raises."""

    def __init__(self) -> None:
        make = torch.Generator().manual_seed(0)
        shapes = {"embed": (11, 4), "norm": (4,), "scale": (), "nothing": (0, 3), "head": (4, 5)}
        self.weights = {name: torch.randn(shape, generator=make) for name, shape in shapes.items()}
        self.fail_at = -1

    def weight_specs(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """All are float32."""
        return {name: ("F32", tuple(tensor.shape)) for name, tensor in self.weights.items()}

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """In order; raises OSError at `fail_at`."""
        for index, item in enumerate(self.weights.items()):
            if index == self.fail_at:
                raise OSError("the link went down")
            yield item


class TensorEngine(FakeTenant):
    """Holds tensors of the same names; `skips` are names that it passes over in silence, as real engines have."""

    def __init__(self, names: Mapping[str, torch.Tensor], dtype: str) -> None:
        super().__init__("engine", {Part.WEIGHTS: 100, Part.KV_CACHE: 50}, keeps=Part.NONE)
        self.dtype = dtype
        self.live = {name: torch.zeros(t.shape, dtype=getattr(torch, dtype)) for name, t in names.items()}
        self.skips: set[str] = set()
        self.arrived: set[str] = set()
        self.version: PolicyVersion | None = None
        self.newest = PolicyVersion(-1, -1)
        self.calls: list[str] = []

    def begin_update(self) -> None:
        """Closed."""
        self.gate.check(Part.WEIGHTS, "begin_update")
        self.calls.append("begin")
        self.arrived.clear()
        self.version = None

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Strict, tensor after tensor."""
        self.gate.check(Part.WEIGHTS, "load_weights")
        for name, tensor in tensors:
            if name not in self.live or name in self.arrived:
                raise WeightSyncError(f"unexpected weight {name!r}")
            self.arrived.add(name)
            if name not in self.skips:
                self.live[name].copy_(tensor)
        self.calls.append("loaded")

    def weight_checksums(self, sample: Sample = EVERY_WEIGHT) -> Mapping[str, int]:
        """As the tensors lie here."""
        self.gate.check(Part.WEIGHTS, "weight_checksums")
        chosen = sample.chosen(self.live)
        return checksums(((name, self.live[name]) for name in chosen), words=sample.words)

    def publish(self, version: PolicyVersion) -> None:
        """Never backwards, and nothing missing."""
        self.gate.check(Part.WEIGHTS, "publish")
        missing = set(self.live) - self.arrived
        if missing:
            raise WeightSyncError(f"missing weights {sorted(missing)}")
        if version < self.newest:
            raise WeightSyncError(f"cannot publish {version}: {self.newest} was published before")
        self.calls.append("publish")
        self.version = self.newest = version


class WeightSyncSuite:
    """Override `make_sync`."""

    def make_sync(self, residency: Residency) -> WeightSync:
        """The sync under test, taking its leases from `residency`."""
        raise NotImplementedError("override `make_sync`")

    @pytest.fixture
    def residency(self) -> LeaseManager:
        """Room for everything."""
        return LeaseManager(budget=1000, emit=ignore, deadline=1.0)

    @pytest.fixture
    def sync(self, residency: LeaseManager) -> WeightSync:
        """The sync under test."""
        return self.make_sync(residency)

    @pytest.fixture
    def trainer(self) -> TensorTrainer:
        """Five tensors, one of no dimension and one without elements."""
        return TensorTrainer()

    @pytest.fixture(params=["float32", "bfloat16"])
    def engine(self, trainer: TensorTrainer, request: pytest.FixtureRequest) -> TensorEngine:
        """Holds zeros."""
        return TensorEngine(trainer.weights, request.param)

    def test_every_weight_arrives_cast_to_the_engines_dtype(
        self, sync: WeightSync, trainer: TensorTrainer, engine: TensorEngine
    ) -> None:
        for step in (3, 4):
            sync.update_weights(trainer, engine, PolicyVersion(1, step))
            assert engine.version == PolicyVersion(1, step)
            for name, weight in trainer.weights.items():
                assert torch.equal(engine.live[name], weight.to(engine.live[name].dtype)), name
                weight += 1.0

    def test_the_version_is_published_after_the_last_tensor(
        self, sync: WeightSync, trainer: TensorTrainer, engine: TensorEngine
    ) -> None:
        sync.update_weights(trainer, engine, PolicyVersion(1, 0))
        assert engine.calls == ["begin", "loaded", "publish"]

    def test_only_the_engines_weights_are_woken_and_the_lease_ends(
        self, sync: WeightSync, trainer: TensorTrainer, engine: TensorEngine
    ) -> None:
        sync.update_weights(trainer, engine, PolicyVersion(1, 0))
        assert engine.resident() == Part.WEIGHTS
        assert engine.gate.allowed == Part.NONE

    def test_nan_weights_are_handed_over_as_they_are(
        self, sync: WeightSync, trainer: TensorTrainer, engine: TensorEngine
    ) -> None:
        trainer.weights["norm"][1] = float("nan")
        sync.update_weights(trainer, engine, PolicyVersion(1, 0))
        assert engine.live["norm"].isnan().tolist() == [False, True, False, False]

    def test_a_failure_at_any_tensor_leaves_the_version_unknown_and_a_later_sync_repairs_it(
        self, sync: WeightSync, trainer: TensorTrainer, engine: TensorEngine
    ) -> None:
        sync.update_weights(trainer, engine, PolicyVersion(1, 0))
        for index in range(len(trainer.weights)):
            trainer.weights["embed"] += 1.0
            trainer.fail_at = index
            with pytest.raises(WeightSyncError, match="the link went down") as caught:
                sync.update_weights(trainer, engine, PolicyVersion(1, index + 1))
            assert isinstance(caught.value.__cause__, OSError)
            assert engine.version is None
            trainer.fail_at = -1
            sync.update_weights(trainer, engine, PolicyVersion(1, index + 1))
            assert engine.version == PolicyVersion(1, index + 1)

    def test_a_weight_that_the_engine_passes_over_is_found(
        self, sync: WeightSync, trainer: TensorTrainer, engine: TensorEngine
    ) -> None:
        engine.skips = {"norm"}
        with pytest.raises(WeightSyncError, match="norm"):
            sync.update_weights(trainer, engine, PolicyVersion(1, 0))
        assert engine.version is None

    @pytest.mark.parametrize("side", ["trainer", "engine"])
    def test_a_name_without_a_partner_is_an_error(
        self, sync: WeightSync, trainer: TensorTrainer, engine: TensorEngine, side: str
    ) -> None:
        (trainer.weights if side == "trainer" else engine.live)["adapter"] = torch.zeros(2)
        with pytest.raises(WeightSyncError, match="adapter"):
            sync.update_weights(trainer, engine, PolicyVersion(1, 0))
        assert engine.version is None

    def test_a_restarted_trainer_cannot_take_the_version_back(
        self, sync: WeightSync, trainer: TensorTrainer, engine: TensorEngine
    ) -> None:
        sync.update_weights(trainer, engine, PolicyVersion(1, 5))
        with pytest.raises(WeightSyncError):
            sync.update_weights(trainer, engine, PolicyVersion(1, 0))
        assert engine.version is None
        sync.update_weights(trainer, engine, PolicyVersion(2, 0))
        assert engine.version == PolicyVersion(2, 0)

    def test_an_engine_that_finds_no_room_is_a_failed_sync(self, trainer: TensorTrainer, engine: TensorEngine) -> None:
        sync = self.make_sync(LeaseManager(budget=99, emit=ignore, deadline=1.0))
        with pytest.raises(WeightSyncError, match="budget"):
            sync.update_weights(trainer, engine, PolicyVersion(1, 0))
        assert engine.version is None
