"""Who sleeps and wakes when, over the real loop with real parts, under small, large and too small budgets."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.small_run import prepare
from tests.residency.real_run import SMALL, Watching, moves_of, real_parts
from tidemill.contracts.footprint import Part
from tidemill.errors import ConfigError
from tidemill.loops import sync

SHORT = ("steps=4", "warm_up.steps=1", "eval.every=2", "checkpoint.every=1")
BEGINNING = ["trainer.step", "engine.wake_up(weights)", "update_weights"]
STEP = [
    "trainer.sleep",
    "engine.wake_up(kv cache)",
    "engine.sleep",
    "trainer.wake_up(weights, optimizer, grads)",
    "trainer.step",
    "engine.wake_up(weights)",
    "update_weights",
]
LAST_LOOK = ["trainer.sleep", "engine.wake_up(kv cache)"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("base")
    prepare(base)
    return base


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Iterator[Path]:
    for path in base.iterdir():
        (tmp_path / path.name).symlink_to(path)
    yield tmp_path


def moves(folder: Path, *words: str) -> tuple[list[str], list[str]]:
    """Of a whole run, and what it said."""
    seen = Watching()
    with real_parts(folder, seen, *SHORT, *words) as parts:
        sync.run(parts, steps=4)
        return moves_of(seen.events, parts.trainer, parts.engine), seen.notices()


def sizes(folder: Path) -> tuple[int, int, int]:
    """Bytes of the trainer, of the engine's weights, and of the engine."""
    with real_parts(folder, Watching(), *SHORT) as parts:
        trainer, engine = parts.trainer, parts.engine
        return trainer.footprint(Part.ALL), engine.footprint(Part.WEIGHTS), engine.footprint(Part.ALL)


@pytest.mark.parametrize("path", ["residency.offload", "trainer.offload", "engine.offload"])
def test_where_they_take_turns_one_step_is_one_sleep_and_one_wake_of_each_in_the_order_of_the_design(
    folder: Path, path: str
) -> None:
    """Whatever happens inside: each step here trains, saves, hands over, and every other one evaluates."""
    others = [] if path == "residency.offload" else ["residency.offload=never"]
    found, said = moves(folder, *others, f"{path}=always")
    assert found == [*BEGINNING, *STEP * 3, *LAST_LOOK]
    assert any("offload is always: the budget is" in text and "take turns" in text for text in said)


def test_a_budget_that_the_settings_name_gives_the_same_order_down_to_its_last_byte(folder: Path) -> None:
    trainer, engine_weights, engine = sizes(folder)
    least = max(trainer + engine_weights, engine)
    for budget in (least, trainer + engine - 1):
        found, said = moves(
            folder, "residency.offload=auto", f"residency.budget={budget}", f"run.dir={folder}/{budget}"
        )
        assert found == [*BEGINNING, *STEP * 3, *LAST_LOOK]
        assert any("residency.budget is" in text for text in said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["residency.offload=never"], "offload is never: trainer and engine"),
        (["trainer.offload=never"], "offload is never: trainer and engine"),
        (["engine.offload=never"], "offload is never: trainer and engine"),
        (["residency.offload=auto"], "so both stay awake"),
    ],
    ids=["never", "trainer", "engine", "auto"],
)
def test_with_room_for_both_nothing_ever_sleeps_and_the_choice_is_told(
    folder: Path, words: list[str], said: str
) -> None:
    found, notices = moves(folder, *words)
    assert found == [
        *BEGINNING,
        "engine.wake_up(kv cache)",
        *["trainer.step", "update_weights"] * 3,
    ]
    assert any(said in text for text in notices)


@pytest.mark.parametrize("roomy", [True, False], ids=["large", "small"])
def test_auto_goes_by_what_the_device_has_free_and_prints_what_it_chose(folder: Path, roomy: bool) -> None:
    trainer, engine_weights, engine = sizes(folder)
    budget = trainer + engine if roomy else max(trainer + engine_weights, engine)
    # A tenth is kept back. What the trainer holds when it is built counts as free; of it gradients are not there yet.
    free = -(-10 * budget // 9) + 1 - trainer
    words = ("residency.offload=auto", f"cluster.use={SMALL}", f"cluster.free={free + trainer // 4}")
    found, said = moves(folder, *words)
    assert ("trainer.sleep" in found) is not roomy
    (choice,) = [text for text in said if text.startswith("offload is auto: ")]
    assert "may be used, trainer and engine need" in choice
    assert choice.endswith("so both stay awake" if roomy else "so they take turns")
    if not roomy:
        assert found == [*BEGINNING, *STEP * 3, *LAST_LOOK]


def test_a_budget_one_byte_too_small_is_refused_before_the_first_step_with_the_ledger(folder: Path) -> None:
    trainer, engine_weights, engine = sizes(folder)
    least = max(trainer + engine_weights, engine)
    seen = Watching()
    with (
        pytest.raises(ConfigError) as caught,
        real_parts(folder, seen, *SHORT, "residency.offload=auto", f"residency.budget={least - 1}"),
    ):
        raise AssertionError("parts were built")
    for word in ("must be awake at once", "trainer", "engine's weights", "residency.budget", "engine.max_batch"):
        assert word in str(caught.value)
    assert moves_of(seen.events) == []
    assert seen.lines == {}
