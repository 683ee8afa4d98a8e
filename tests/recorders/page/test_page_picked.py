import json
from pathlib import Path

from tests.recorders.written import WrittenAtOnce

from tidemill.contracts.events import RolloutDone
from tidemill.recorders.page.picked import picked
from tidemill.testing.suites.recorder import scored_group


def test_steps_are_spread_over_the_run_with_the_first_and_the_last(tmp_path: Path) -> None:
    sink = WrittenAtOnce(run=tmp_path)
    sink.resume(0, {})
    for step in range(500):
        sink.write(step, RolloutDone(kind="train", groups=[scored_group("q", (1.0, 0.0))]))
        if step % 100 == 0:
            sink.write(step, RolloutDone(kind="eval", groups=[scored_group("e", (1.0,))]))
    found = picked(tmp_path)
    steps = sorted({sample["step"] for sample in found if sample["kind"] == "train"})
    assert len(steps) == 40 and steps[0] == 0 and steps[-1] == 499
    assert {sample["step"] for sample in found if sample["kind"] == "eval"} == {0, 100, 200, 300, 400}


def test_long_texts_share_the_room_there_is(tmp_path: Path) -> None:
    sink = WrittenAtOnce(run=tmp_path, max_characters=100_000)
    sink.resume(0, {})
    for step in range(100):
        sink.write(step, RolloutDone(kind="train", groups=[scored_group("long " * 2000, (1.0, 0.0)) for _ in range(4)]))
    assert len(json.dumps(picked(tmp_path))) < 1_500_000


def test_no_file_no_samples(tmp_path: Path) -> None:
    assert picked(tmp_path) == []
