"""What every trainer must do. Subclass `TrainerSuite` and override `make_trainer`; nothing else is needed."""

import numpy as np
import pytest

from tidemill.contracts.algorithm import Loss
from tidemill.contracts.batch import Batch
from tidemill.contracts.checkpoint import Saved
from tidemill.contracts.footprint import Part
from tidemill.contracts.trainer import Trainer
from tidemill.errors import CheckpointError, ResidencyError, TrainerError
from tidemill.testing.suites.trainer_case import MakeTrainer, awake, copied, plain, ragged_batch, same

__all__ = ["MakeTrainer", "TrainerSuite", "awake", "copied", "ragged_batch", "same"]


def _state(trainer: Trainer) -> Saved:
    with awake(trainer):
        snapshot = trainer.snapshot()
    try:
        return copied(snapshot)
    finally:
        snapshot.release()


class TrainerSuite:
    """Trainers that `make_trainer` builds must be equal, know at least 32 words and the phases "warm_up" and "rl"."""

    @pytest.fixture
    def make_trainer(self) -> MakeTrainer:
        """Override: build a fresh trainer."""
        raise NotImplementedError("override the fixture `make_trainer`")

    @pytest.fixture
    def loss(self) -> Loss:
        """Override: any loss that depends on advantages and is a sum over tokens."""
        raise NotImplementedError("override the fixture `loss`")

    def test_a_trainer_used_without_a_lease_refuses(self, make_trainer: MakeTrainer, loss: Loss) -> None:
        trainer, batch = make_trainer(), ragged_batch()
        for use in (
            lambda: trainer.begin("rl"),
            lambda: trainer.step(batch, loss),
            lambda: trainer.log_probs(batch),
            lambda: trainer.named_weights(),
            lambda: trainer.load(Saved(tensors={}, extra={})),
        ):
            with pytest.raises(ResidencyError):
                use()

    def test_weights_are_handed_out_under_the_lease_each_of_them(self, make_trainer: MakeTrainer) -> None:
        trainer = make_trainer()
        with awake(trainer):
            next(weights := trainer.named_weights())
        trainer.sleep()
        with pytest.raises(ResidencyError):
            next(weights)

    def test_closing_twice_leaves_snapshots_readable(self, make_trainer: MakeTrainer) -> None:
        trainer = make_trainer()
        with awake(trainer):
            snapshot = trainer.snapshot()
        before = copied(snapshot)
        for _ in range(2):
            trainer.close()
        assert same(copied(snapshot), before)

    def test_a_sleeping_trainer_refuses_to_step(self, make_trainer: MakeTrainer, loss: Loss) -> None:
        trainer = make_trainer()
        with awake(trainer):
            trainer.begin("rl")
        trainer.sleep()
        with pytest.raises(ResidencyError):
            trainer.step(ragged_batch(), loss)

    def test_a_step_before_any_phase_is_refused(self, make_trainer: MakeTrainer, loss: Loss) -> None:
        trainer = make_trainer()
        with awake(trainer), pytest.raises(TrainerError):
            trainer.step(ragged_batch(), loss)

    def test_a_phase_without_settings_is_refused(self, make_trainer: MakeTrainer) -> None:
        trainer = make_trainer()
        with awake(trainer), pytest.raises(TrainerError):
            trainer.begin("no such phase")

    def test_equal_inputs_give_equal_bits(self, make_trainer: MakeTrainer, loss: Loss) -> None:
        states, reports = [], []
        for trainer in (make_trainer(), make_trainer()):
            with awake(trainer):
                trainer.begin("rl")
                reports.append([trainer.step(ragged_batch(seed=seed), loss).metrics for seed in range(2)])
            states.append(_state(trainer))
        assert same(*states)
        assert reports[0] == reports[1]

    def test_a_step_changes_weights_and_reports_finite_numbers(self, make_trainer: MakeTrainer, loss: Loss) -> None:
        trainer = make_trainer()
        with awake(trainer):
            trainer.begin("rl")
            before = {name: tensor.clone() for name, tensor in trainer.named_weights()}
            report = trainer.step(ragged_batch(), loss)
            moved = [name for name, tensor in trainer.named_weights() if not tensor.equal(before[name])]
        assert not report.skipped
        assert moved
        assert np.isfinite(list(report.metrics.values())).all()

    def test_sleeping_between_steps_changes_no_bit(self, make_trainer: MakeTrainer, loss: Loss) -> None:
        sleeper, waker = make_trainer(), make_trainer()
        for trainer in (sleeper, waker):
            with awake(trainer):
                trainer.begin("rl")
        for seed in range(3):
            sleeper.sleep()
            for trainer in (sleeper, waker):
                with awake(trainer):
                    trainer.step(ragged_batch(seed=seed), loss)
        assert same(_state(sleeper), _state(waker))

    def test_sleep_gives_everything_back_and_may_be_called_twice(self, make_trainer: MakeTrainer) -> None:
        trainer = make_trainer()
        size = trainer.footprint(Part.ALL)
        trainer.sleep()
        trainer.sleep()
        assert trainer.resident() == Part.NONE
        assert trainer.footprint(Part.ALL) == size > 0
        trainer.wake_up(Part.ALL)
        trainer.wake_up(Part.ALL)
        held = Part.WEIGHTS | Part.OPTIMIZER | Part.GRADS
        assert trainer.resident() & held == held

    def test_a_snapshot_taken_asleep_equals_one_taken_awake(self, make_trainer: MakeTrainer, loss: Loss) -> None:
        trainer = make_trainer()
        with awake(trainer):
            trainer.begin("rl")
            trainer.step(ragged_batch(), loss)
            awake_snapshot = trainer.snapshot()
        state = copied(awake_snapshot)
        awake_snapshot.release()
        trainer.sleep()
        asleep = trainer.snapshot()
        assert same(copied(asleep), state)
        asleep.release()

    def test_a_snapshot_that_is_held_does_not_change(self, make_trainer: MakeTrainer, loss: Loss) -> None:
        trainer = make_trainer()
        with awake(trainer):
            trainer.begin("rl")
            trainer.step(ragged_batch(), loss)
        trainer.sleep()
        held = trainer.snapshot()
        before = copied(held)
        for seed in (1, 2):
            with awake(trainer):
                trainer.step(ragged_batch(seed=seed), loss)
            trainer.sleep()
        assert same(copied(held), before)
        assert not same(_state(trainer), before)
        held.release()
        held.release()

    def test_a_loaded_state_goes_on_as_the_saved_one_would(self, make_trainer: MakeTrainer, loss: Loss) -> None:
        first, second = make_trainer(), make_trainer()
        with awake(first):
            first.begin("warm_up")
            first.step(ragged_batch(seed=7), loss)
            first.begin("rl")
            first.step(ragged_batch(seed=8), loss)
        saved = _state(first)
        with awake(second):
            second.load(saved)
            second.begin("rl")
        for trainer in (first, second):
            with awake(trainer):
                trainer.step(ragged_batch(seed=9), loss)
        assert same(_state(first), _state(second))

    def test_beginning_the_phase_under_way_changes_nothing(self, make_trainer: MakeTrainer, loss: Loss) -> None:
        trainer = make_trainer()
        with awake(trainer):
            trainer.begin("rl")
            trainer.step(ragged_batch(), loss)
        before = _state(trainer)
        with awake(trainer):
            trainer.begin("rl")
        assert same(_state(trainer), before)

    def test_a_new_phase_starts_with_fresh_optimizer_state(self, make_trainer: MakeTrainer, loss: Loss) -> None:
        used, fresh = make_trainer(), make_trainer()
        with awake(used), awake(fresh):
            used.begin("warm_up")
            used.step(ragged_batch(), loss)
            used.begin("rl")
            fresh.begin("rl")
        moments = [
            {name: bytes(tensor.data) for name, tensor in _state(trainer).tensors.items() if "optimizer" in name}
            for trainer in (used, fresh)
        ]
        assert moments[0] == moments[1]

    def test_a_state_with_a_tensor_missing_is_refused_and_changes_nothing(
        self, make_trainer: MakeTrainer, loss: Loss
    ) -> None:
        trainer = make_trainer()
        with awake(trainer):
            trainer.begin("rl")
            trainer.step(ragged_batch(), loss)
        before = _state(trainer)
        for missing in before.tensors:
            partial = {name: tensor for name, tensor in before.tensors.items() if name != missing}
            with awake(trainer), pytest.raises(CheckpointError):
                trainer.load(Saved(tensors=partial, extra=before.extra))
        assert same(_state(trainer), before)

    def test_a_batch_without_a_token_to_train_on_changes_no_weight(self, make_trainer: MakeTrainer, loss: Loss) -> None:
        trainer, full = make_trainer(), ragged_batch()
        empty = Batch(
            token_ids=full.token_ids,
            offsets=full.offsets,
            loss_mask=np.zeros_like(full.loss_mask),
            logprobs=np.zeros_like(full.logprobs),
            advantages=np.zeros_like(full.advantages),
            metrics={},
        )
        with awake(trainer):
            trainer.begin("rl")
            trainer.step(full, loss)
        before = _state(trainer)
        with awake(trainer):
            report = trainer.step(empty, loss)
        assert report.skipped
        assert np.isfinite(list(report.metrics.values())).all()
        assert plain(_state(trainer).tensors) == plain(before.tensors)

    def test_log_probs_are_of_every_token_but_the_first_of_a_row(self, make_trainer: MakeTrainer) -> None:
        trainer, batch = make_trainer(), ragged_batch()
        with awake(trainer):
            found = trainer.log_probs(batch)
        first = np.zeros(batch.tokens, np.bool_)
        first[batch.offsets[:-1]] = True
        assert found.dtype == np.float32
        assert (found[first] == 0).all()
        assert (found[~first] < 0).all()
        assert np.isfinite(found).all()

    def test_a_step_tells_log_probs_under_the_weights_before_it(self, make_trainer: MakeTrainer, loss: Loss) -> None:
        trainer, batch = make_trainer(), ragged_batch()
        with awake(trainer):
            trainer.begin("rl")
            before = trainer.log_probs(batch)
            found = trainer.step(batch, loss).logprobs
        assert found.dtype == np.float32
        assert found == pytest.approx(np.where(batch.loss_mask, before, 0.0), abs=1e-5)

    def test_weights_have_one_name_each(self, make_trainer: MakeTrainer) -> None:
        trainer = make_trainer()
        with awake(trainer):
            names = [name for name, _ in trainer.named_weights()]
        assert names
        assert len(set(names)) == len(names)
