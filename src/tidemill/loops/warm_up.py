"""The supervised phase before the first rollout: same step count, fresh optimizer state at its end."""

from tidemill.contracts.parts import Parts
from tidemill.contracts.state import RunState
from tidemill.loops.interruption import saved_when_interrupted

__all__ = ["run"]


def run(parts: Parts, state: RunState) -> RunState:
    """Supervised steps until `parts.warm_up.steps` are done, none when they are. Needs the trainer's lease."""
    while state.step < parts.warm_up.steps:
        parts.trainer.begin("warm_up")
        with saved_when_interrupted(parts, state):
            parts.stop.check()
            with parts.recorder.step(state.step) as record:
                batch, cursor = parts.warm_up.batch(state.warm_up_cursor)
                report = parts.trainer.step(batch, parts.warm_up.loss)
                state = state.advance(warm_up_cursor=cursor)
                record(groups=(), batch=batch, report=report)
                parts.checkpointer.save_if_due(state)
    return state
