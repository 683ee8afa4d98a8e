"""The synchronous loop: generate, learn, hand the weights over, and so on. Indentation shows who is awake."""

from tidemill.contracts.parts import Parts
from tidemill.contracts.state import RunState
from tidemill.loops import warm_up
from tidemill.loops.interruption import saved_when_interrupted

__all__ = ["run"]


def run(parts: Parts, *, steps: int) -> RunState:
    """Run to `steps` updates from the newest checkpoint, or from the start; the last state is durable on return.

    Raises Interrupted after saving the present state when a signal asked the run to stop.
    """
    trainer, engine = parts.trainer, parts.engine
    with parts.residency.awake(trainer):
        state = parts.checkpointer.restore() or parts.fresh_state()
        parts.recorder.start(state.step)
        state = warm_up.run(parts, state)
        trainer.begin("rl")
        parts.weights.update_weights(trainer, engine, state.policy_version)
    while state.step < steps:
        with saved_when_interrupted(parts, state):
            state = step(parts, state)
    with saved_when_interrupted(parts, state), parts.residency.awake(engine), parts.stop.at_once():
        parts.evaluation.final(engine, state)
    parts.checkpointer.drain()
    return state


def step(parts: Parts, state: RunState) -> RunState:
    """One rollout and one update. The state advances before the save: what is saved lies between two steps."""
    trainer, engine = parts.trainer, parts.engine
    with parts.recorder.step(state.step) as record:
        prompts, cursor = parts.data.take(state.cursor)
        with parts.residency.awake(engine), parts.stop.at_once():
            parts.evaluation.if_due(engine, state)
            groups = parts.rollout.collect(engine, prompts)
        batch = parts.algorithm.batch(groups)
        with parts.residency.awake(trainer):
            parts.agreement.check(trainer, groups, batch, state.policy_version)
            report = trainer.step(batch, parts.algorithm.loss)
            state = state.advance(cursor=cursor)
            record(groups=groups, batch=batch, report=parts.agreement.measured(groups, batch, report))
            parts.checkpointer.save_if_due(state)
            parts.weights.update_weights(trainer, engine, state.policy_version)
    return state
