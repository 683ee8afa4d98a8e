"""How every rollout engine sleeps, wakes and takes weights. Subclass with the fixture `make_engine` overridden."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tidemill.contracts.engine import RolloutEngine, Sampling
from tidemill.contracts.footprint import Part
from tidemill.contracts.state import PolicyVersion
from tidemill.errors import ResidencyError, WeightSyncError
from tidemill.testing.suites.engine_case import (
    EngineCase,
    MakeEngine,
    close_asleep,
    hand_over,
    open_awake,
    reference_logprobs,
    requests_of,
    weights_of,
)

__all__ = ["EngineWeightsSuite"]


class EngineWeightsSuite(EngineCase):
    """Life cycle and weight methods, as `tidemill.contracts` promises them."""

    def test_after_an_update_answers_come_from_the_new_weights(self, engine: RolloutEngine, model: Any) -> None:
        before = engine.weight_checksums()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
        hand_over(engine, weights_of(model), PolicyVersion(1, 1))
        after = engine.weight_checksums()
        assert all(before[name] != after[name] for name in before)
        for request, answer in self.answers(engine, Sampling(max_new_tokens=8)):
            expected = reference_logprobs(model, request.token_ids, answer.token_ids, 1.0)
            assert answer.logprobs == pytest.approx(expected, abs=self.tolerance)
            assert answer.version == PolicyVersion(1, 1)

    def test_the_folders_own_weights_are_a_whole_update(
        self, make_engine: MakeEngine, folder: Path, model: Any
    ) -> None:
        engine = make_engine(folder)
        open_awake(engine)
        engine.load_pretrained(self.version)
        assert engine.version == self.version
        for request, answer in self.answers(engine, Sampling(max_new_tokens=8)):
            expected = reference_logprobs(model, request.token_ids, answer.token_ids, 1.0)
            assert answer.logprobs == pytest.approx(expected, abs=self.tolerance)
        hand_over(engine, weights_of(model), PolicyVersion(2, 5))
        with pytest.raises(WeightSyncError, match="never go back"):
            engine.load_pretrained(self.version)
        self.refuses(engine, WeightSyncError)

    def test_an_engine_without_a_lease_refuses_everything(self, make_engine: MakeEngine, folder: Path) -> None:
        engine = make_engine(folder)
        calls: list[Callable[[], object]] = [
            lambda: engine.generate(requests_of(self.prompts), Sampling(max_new_tokens=2)),
            engine.begin_update,
            lambda: engine.load_weights([]),
            engine.weight_checksums,
            lambda: engine.publish(self.version),
            lambda: engine.load_pretrained(self.version),
        ]
        for call in calls:
            with pytest.raises(ResidencyError, match="engine"):
                call()

    def test_an_engine_woken_without_weights_refuses_to_generate(self, engine: RolloutEngine, model: Any) -> None:
        close_asleep(engine)
        assert engine.version is None
        open_awake(engine)
        self.refuses(engine, WeightSyncError)
        hand_over(engine, weights_of(model), self.version)
        assert self.answers(engine, Sampling(max_new_tokens=2))

    def test_an_engine_woken_in_part_refuses_to_generate(self, engine: RolloutEngine, model: Any) -> None:
        close_asleep(engine)
        open_awake(engine, Part.WEIGHTS)
        hand_over(engine, weights_of(model), self.version)
        self.refuses(engine, ResidencyError)
        open_awake(engine, Part.KV_CACHE)
        assert self.answers(engine, Sampling(max_new_tokens=2))
        close_asleep(engine)
        open_awake(engine, Part.KV_CACHE)
        self.refuses(engine, ResidencyError)

    def test_an_update_that_ends_half_way_leaves_the_engine_dirty_until_a_whole_one(
        self, engine: RolloutEngine, model: Any
    ) -> None:
        def broken() -> Any:
            yield next(iter(weights_of(model).items()))
            raise ConnectionError("the sender is gone")

        engine.begin_update()
        self.refuses(engine, WeightSyncError)
        with pytest.raises(ConnectionError):
            engine.load_weights(broken())
        self.refuses(engine, WeightSyncError)
        with pytest.raises(WeightSyncError, match="whole set"):
            engine.publish(PolicyVersion(1, 1))
        hand_over(engine, weights_of(model), PolicyVersion(1, 1))
        assert engine.version == PolicyVersion(1, 1)
        assert self.answers(engine, Sampling(max_new_tokens=2))

    @pytest.mark.parametrize("fault", ["missing", "unexpected", "twice", "shape"])
    def test_weights_that_do_not_fit_are_refused_by_name_and_leave_the_engine_dirty(
        self, engine: RolloutEngine, model: Any, fault: str
    ) -> None:
        weights = list(weights_of(model).items())
        name, tensor = weights.pop()
        match fault:
            case "unexpected":
                weights += [(name, tensor), ("module." + name, tensor)]
            case "twice":
                weights += [(name, tensor), (name, tensor)]
            case "shape":
                # One number would fill the tensor if it were broadcast.
                weights.append((name, torch.zeros(1)))
        engine.begin_update()
        with pytest.raises(WeightSyncError, match=name):
            engine.load_weights(weights)
            engine.publish(PolicyVersion(1, 1))
        self.refuses(engine, WeightSyncError)
        with pytest.raises(WeightSyncError, match="whole set"):
            engine.publish(PolicyVersion(1, 1))
        hand_over(engine, weights_of(model), self.version)
        assert self.answers(engine, Sampling(max_new_tokens=2))

    def test_weights_may_come_in_several_calls_and_none_of_them_twice(self, engine: RolloutEngine, model: Any) -> None:
        weights = {name: tensor + 0.01 for name, tensor in weights_of(model).items()}
        items = list(weights.items())
        engine.begin_update()
        engine.load_weights(items[:3])
        engine.load_weights([])
        with pytest.raises(WeightSyncError, match="whole set"):
            engine.publish(PolicyVersion(1, 1))
        engine.load_weights(items[3:])
        engine.publish(PolicyVersion(1, 1))
        in_parts = engine.weight_checksums()
        hand_over(engine, weights, PolicyVersion(1, 2))
        assert engine.weight_checksums() == in_parts
        engine.begin_update()
        engine.load_weights(items[:3])
        with pytest.raises(WeightSyncError, match=items[1][0]):
            engine.load_weights(items[1:])
        self.refuses(engine, WeightSyncError)

    def test_an_update_begun_again_wants_every_weight_again(self, engine: RolloutEngine, model: Any) -> None:
        items = list(weights_of(model).items())
        engine.begin_update()
        engine.load_weights(items[:-1])
        engine.begin_update()
        engine.load_weights(items[-1:])
        with pytest.raises(WeightSyncError, match="whole set"):
            engine.publish(PolicyVersion(1, 1))
        self.refuses(engine, WeightSyncError)

    def test_no_weight_comes_outside_an_update(self, engine: RolloutEngine, model: Any) -> None:
        with pytest.raises(WeightSyncError, match="begin_update"):
            engine.load_weights(weights_of(model).items())
        with pytest.raises(WeightSyncError, match="whole set"):
            engine.publish(PolicyVersion(1, 1))

    def test_versions_never_go_back(self, engine: RolloutEngine, model: Any) -> None:
        hand_over(engine, weights_of(model), PolicyVersion(2, 5))
        close_asleep(engine)
        open_awake(engine)
        with pytest.raises(WeightSyncError, match="never go back"):
            hand_over(engine, weights_of(model), PolicyVersion(1, 9))
        self.refuses(engine, WeightSyncError)
        hand_over(engine, weights_of(model), PolicyVersion(2, 5))
        assert engine.version == PolicyVersion(2, 5)

    def test_waking_what_is_awake_keeps_the_version_and_sleeping_twice_is_one_sleep(
        self, engine: RolloutEngine
    ) -> None:
        engine.wake_up(Part.ALL)
        engine.wake_up(Part.WEIGHTS)
        assert engine.version == self.version
        full = engine.footprint(Part.ALL)
        close_asleep(engine)
        close_asleep(engine)
        assert engine.resident() == Part.NONE
        assert engine.footprint(Part.ALL) == full > 0
        assert engine.footprint(Part.OPTIMIZER) == 0
