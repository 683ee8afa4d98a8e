"""Engines that take weights wrongly: none is believed, and the next whole hand-over puts it right.

By `tidemill.weights.direct`; parcels between processes have their own in `tests/cluster/test_parcel_failures.py`.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping

import pytest
import torch

from tidemill.contracts.events import ignore
from tidemill.contracts.state import PolicyVersion
from tidemill.contracts.weights import EVERY_WEIGHT, Sample, Samples
from tidemill.errors import WeightSyncError
from tidemill.residency.manager import LeaseManager
from tidemill.testing.suites.weight_sync import TensorEngine, TensorTrainer
from tidemill.weights.direct import DirectWeightSync
from tidemill.weights.samples import WeightsInTurn, every_weight, no_weight

Weights = Iterable[tuple[str, torch.Tensor]]
NAMES = [f"layer.{number}" for number in range(6)]


class Trainer(TensorTrainer):
    """Tensors of one shape, which any of them would fit; `scratch` hands out one buffer again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = {name: torch.randn(4, 8) for name in NAMES}
        self.scratch = False

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        buffer = torch.empty(4, 8)
        for name, weight in self.weights.items():
            yield name, buffer.copy_(weight) if self.scratch else weight

    def step(self) -> None:
        for weight in self.weights.values():
            weight += 1.0


class Faulty(TensorEngine):
    """Takes weights as `fault` says, as long as there is one."""

    def __init__(self, names: Mapping[str, torch.Tensor]) -> None:
        super().__init__(names, "bfloat16")
        self.fault: Callable[[Faulty, Weights], None] = TensorEngine.load_weights
        self.later: list[tuple[str, torch.Tensor]] = []

    def load_weights(self, tensors: Weights) -> None:
        self.fault(self, tensors)

    def weight_checksums(self, sample: Sample = EVERY_WEIGHT) -> Mapping[str, int]:
        for name, tensor in self.later:
            self.live[name].copy_(tensor)
        self.later = []
        return super().weight_checksums(sample)


def drops_a_bucket(engine: Faulty, tensors: Weights) -> None:
    kept = list(tensors)
    TensorEngine.load_weights(engine, kept[:2] + kept[4:])
    engine.arrived |= set(NAMES)


def loses_a_bucket_and_says_so(engine: Faulty, tensors: Weights) -> None:
    TensorEngine.load_weights(engine, list(tensors)[:3])


def stops_looking_half_way(engine: Faulty, tensors: Weights) -> None:
    source = iter(tensors)
    TensorEngine.load_weights(engine, [next(source) for _ in range(3)])
    engine.arrived |= set(NAMES)


def takes_a_bucket_twice(engine: Faulty, tensors: Weights) -> None:
    kept = list(tensors)
    TensorEngine.load_weights(engine, kept[:3] + kept[:3] + kept[3:])


def takes_one_bucket_for_the_next_too(engine: Faulty, tensors: Weights) -> None:
    kept = list(tensors)
    TensorEngine.load_weights(engine, kept[:3])
    TensorEngine.load_weights(engine, zip(NAMES[3:], [tensor for _, tensor in kept[:3]], strict=True))


def exchanges_two(engine: Faulty, tensors: Weights) -> None:
    kept = dict(tensors)
    kept["layer.1"], kept["layer.4"] = kept["layer.4"], kept["layer.1"]
    TensorEngine.load_weights(engine, kept.items())


def turns_one_round(engine: Faulty, tensors: Weights) -> None:
    kept = dict(tensors)
    kept["layer.2"] = kept["layer.2"].reshape(8, 4).t().contiguous()
    TensorEngine.load_weights(engine, kept.items())


def answers_before_it_has_copied(engine: Faulty, tensors: Weights) -> None:
    engine.later = list(tensors)
    engine.arrived |= set(NAMES)


def writes_a_little_less(engine: Faulty, tensors: Weights) -> None:
    kept = list(tensors)
    before = engine.live["layer.5"].flatten()[-1].clone()
    TensorEngine.load_weights(engine, kept)
    engine.live["layer.5"].view(-1)[-1] = before


def dies_half_way(engine: Faulty, tensors: Weights) -> None:
    TensorEngine.load_weights(engine, list(tensors)[:3])
    raise MemoryError("out of memory")


FAULTS = [
    drops_a_bucket,
    loses_a_bucket_and_says_so,
    stops_looking_half_way,
    takes_a_bucket_twice,
    takes_one_bucket_for_the_next_too,
    exchanges_two,
    turns_one_round,
    answers_before_it_has_copied,
    writes_a_little_less,
    dies_half_way,
]
WITHOUT_LOOKING = [loses_a_bucket_and_says_so, stops_looking_half_way, takes_a_bucket_twice, dies_half_way]


class Pair:
    def __init__(self, samples: Samples) -> None:
        self.trainer = Trainer()
        self.engine = Faulty(self.trainer.weights)
        residency = LeaseManager(budget=1000, emit=ignore, deadline=1.0)
        self.sync = DirectWeightSync(residency=residency, emit=ignore, samples=samples)

    def hand_over(self, step: int) -> None:
        self.trainer.step()
        self.sync.update_weights(self.trainer, self.engine, PolicyVersion(1, step))

    def equal(self) -> bool:
        live = self.engine.live
        return all(torch.equal(live[name], weight.bfloat16()) for name, weight in self.trainer.weights.items())


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_whatever_an_engine_does_to_weights_it_is_never_open_with_others_than_the_trainers(fault) -> None:
    pair = Pair(every_weight)
    pair.hand_over(0)
    assert pair.equal()
    pair.engine.fault, pair.trainer.scratch = fault, fault is answers_before_it_has_copied
    for step in (1, 2):
        with pytest.raises(WeightSyncError):
            pair.hand_over(step)
        assert pair.engine.version is None
    pair.engine.fault, pair.trainer.scratch, pair.engine.later = TensorEngine.load_weights, False, []
    pair.hand_over(2)
    assert pair.engine.version == PolicyVersion(1, 2)
    assert pair.equal()


@pytest.mark.parametrize("fault", WITHOUT_LOOKING, ids=lambda fault: fault.__name__)
def test_what_does_not_arrive_is_found_where_no_checksum_is_computed(fault) -> None:
    pair = Pair(no_weight)
    pair.hand_over(0)
    pair.engine.fault = fault
    with pytest.raises(WeightSyncError):
        pair.hand_over(1)
    assert pair.engine.version is None


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_that_stays_behind_is_found_when_its_turn_comes(name: str) -> None:
    pair = Pair(WeightsInTurn(within=3))
    pair.hand_over(0)

    def keeps_one(engine: Faulty, tensors: Weights) -> None:
        before = engine.live[name].clone()
        TensorEngine.load_weights(engine, tensors)
        engine.live[name].copy_(before)

    pair.engine.fault = keeps_one
    failed = []
    for step in range(1, 4):
        try:
            pair.hand_over(step)
        except WeightSyncError as error:
            assert name in str(error)
            failed.append(step)
    assert failed
    pair.engine.fault = TensorEngine.load_weights
    pair.hand_over(4)
    assert pair.equal()


def test_a_version_may_be_handed_over_twice_and_is_compared_twice() -> None:
    pair = Pair(every_weight)
    pair.hand_over(5)
    pair.hand_over(5)
    assert pair.engine.version == PolicyVersion(1, 5)
    assert pair.equal()
    pair.engine.fault = exchanges_two
    with pytest.raises(WeightSyncError):
        pair.hand_over(5)
    assert pair.engine.version is None


@pytest.mark.parametrize("handed_out", ["another dtype", "another shape", "a weight more", "a weight less"])
def test_a_trainer_that_hands_out_other_than_it_says_is_refused_without_a_checksum(handed_out: str) -> None:
    pair = Pair(no_weight)
    told = pair.trainer.weight_specs()
    pair.trainer.weight_specs = lambda: told  # type: ignore[method-assign]
    match handed_out:
        case "another dtype":
            pair.trainer.weights["layer.1"] = pair.trainer.weights["layer.1"].double()
        case "another shape":
            pair.trainer.weights["layer.1"] = torch.zeros(1, 8)  # would be broadcast
        case "a weight more":
            pair.trainer.weights["layer.9"] = pair.engine.live["layer.9"] = torch.zeros(1)
        case "a weight less":
            del pair.trainer.weights["layer.1"], pair.engine.live["layer.1"]
    with pytest.raises(WeightSyncError, match=r"layer\.[19]"):
        pair.hand_over(0)
    assert pair.engine.version is None


def test_no_more_than_two_weights_are_whole_at_once_where_the_trainer_gathers_them() -> None:
    class Gathering(Trainer):
        alive, most = 0, 0

        def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, weight in self.weights.items():
                whole = weight.clone()
                self.alive += 1
                self.most = max(self.most, self.alive)
                weakref.finalize(whole, self._gone)
                yield name, whole
                del whole

        def _gone(self) -> None:
            self.alive -= 1

    pair = Pair(every_weight)
    pair.trainer = Gathering()
    pair.hand_over(0)
    assert pair.trainer.alive == 0
    assert pair.trainer.most <= 2
