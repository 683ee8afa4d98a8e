"""The moves of a run, chosen by Hypothesis and by dice."""

import contextlib
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.residency.life_cycle_faults import SOUND, Fault
from tests.residency.life_cycle_run import Life
from tests.residency.life_cycle_settings import Settings

from tidemill.testing.volatile_disk import Choose, PowerCut

__all__ = ["RunMachine", "walk"]

Move = Callable[[Life, random.Random], None]


ADVERSARIES = (0, 1)
WORDS = ("rename", "fsync checkpoints", "fsync manifest", "unlink")


def adversary(number: int) -> Choose:
    """0 leaves nothing that was not synced, 1 all of it, others some of it."""
    if number in ADVERSARIES:
        return lambda options: number * (options - 1)
    return random.Random(number).randrange


def cut(life: Life, number: int, operations: int, again: int | None) -> None:
    """Power cut after so many operations of a save, one that goes on or, where saves are made at once, a new one."""
    if life.saving is not None:
        life.advance(operations)
    elif operations:
        with contextlib.suppress(PowerCut):
            life.train_to_save(cut=operations)
    life.crash(adversary(number), again=again)


def cut_before(life: Life, number: int, operation: str, nth: int) -> None:
    """Power cut in a save in the background, where names come and go."""
    if life.saving is None:
        life.train_to_save()
    for _ in range(nth):
        life.advance_to(operation)
    life.crash(adversary(number))


def _number(dice: random.Random) -> int:
    return dice.choice([*ADVERSARIES, *(dice.getrandbits(32) for _ in range(4))])


MOVES: dict[str, tuple[int, Move]] = {
    "train": (6, lambda life, dice: life.train()),
    "use": (1, lambda life, dice: life.use()),
    "generate": (4, lambda life, dice: life.generate()),
    "save": (2, lambda life, dice: life.save()),
    "advance": (5, lambda life, dice: life.advance(dice.randint(1, 8))),
    "finish": (1, lambda life, dice: life.finish()),
    "fail": (1, lambda life, dice: life.fail(dice.randint(0, 25))),
    "sleep again": (1, lambda life, dice: life.sleep_again()),
    "save again": (1, lambda life, dice: life.save_again()),
    "other order": (1, lambda life, dice: life.write_in_other_order()),
    "cut": (
        1,
        lambda life, dice: cut(life, _number(dice), dice.randint(0, 25), dice.choice([None, dice.randint(0, 15)])),
    ),
    "cut before": (1, lambda life, dice: cut_before(life, _number(dice), dice.choice(WORDS), dice.randint(1, 3))),
}


def walk(seed: int, fault: Fault = SOUND, steps: int = 40) -> None:
    """A random walk whose weights lead to what is rare. Raises AssertionError at what must not be."""
    dice = random.Random(seed)
    weights, moves = zip(*MOVES.values(), strict=True)
    settings = Settings(keep_last=dice.choice([1, 2]), background=dice.random() < 0.6, many_spares=dice.random() < 0.5)
    with contextlib.ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        life = stack.enter_context(fault.injected(base, settings))
        for _ in range(steps):
            (move,) = dice.choices(moves, weights)
            move(life, dice)
            life.check()
        life.end()


class RunMachine(RuleBasedStateMachine):
    """The same moves as rules."""

    fault = SOUND
    number = st.integers(0, 2**32)
    operations = st.integers(0, 25)
    examples = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).examples += 1
        self.stack = contextlib.ExitStack()

    @initialize(keep_last=st.integers(1, 2), background=st.booleans(), many_spares=st.booleans())
    def start(self, keep_last: int, background: bool, many_spares: bool) -> None:
        base = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        settings = Settings(keep_last=keep_last, background=background, many_spares=many_spares)
        self.life = self.stack.enter_context(self.fault.injected(base, settings))

    @rule()
    def train(self) -> None:
        self.life.train()

    @rule()
    def use(self) -> None:
        self.life.use()

    @rule()
    def generate(self) -> None:
        self.life.generate()

    @rule()
    def save(self) -> None:
        self.life.save()

    @precondition(lambda self: self.life.saving is not None)
    @rule(operations=st.integers(1, 30))
    def advance(self, operations: int) -> None:
        self.life.advance(operations)

    @rule(after=operations)
    def fail(self, after: int) -> None:
        self.life.fail(after)

    @rule()
    def sleep_again(self) -> None:
        self.life.sleep_again()

    @rule()
    def save_again(self) -> None:
        self.life.save_again()

    @rule()
    def write_in_other_order(self) -> None:
        self.life.write_in_other_order()

    @rule(number=number, operations=operations, again=st.none() | st.integers(0, 15))
    def cut(self, number: int, operations: int, again: int | None) -> None:
        cut(self.life, number, operations, again)

    @rule(number=number, operation=st.sampled_from(WORDS), nth=st.integers(1, 3))
    def cut_before(self, number: int, operation: str, nth: int) -> None:
        cut_before(self.life, number, operation, nth)

    @invariant()
    def invariants(self) -> None:
        self.life.check()

    def teardown(self) -> None:
        self.stack.close()
