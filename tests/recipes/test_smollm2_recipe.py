import importlib.util
import json
from pathlib import Path

import pytest

from tidemill.contracts.sample import Prompt, StopReason, Trajectory
from tidemill.contracts.state import PolicyVersion
from tidemill.rewards.function import FunctionReward

FOLDER = Path(__file__).parents[2] / "recipes" / "smollm2"


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answered(text: str, label: float, sample: int) -> Trajectory:
    prompt = Prompt(id="0", key="0:0", token_ids=(5,), text="?", label=label)
    return Trajectory(
        prompt=prompt,
        sample=sample,
        token_ids=(),
        logprobs=(),
        loss_mask=(),
        version=PolicyVersion(1, 0),
        stop_reason=StopReason.EOS,
        text=text,
    )


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12", 12),
        ("3 x 4 = 12 rolls.", 12),
        ("It is -3.", -3),
        ("$1,600!", 1600),
        ("2.50 euros", 2.5),
        ("none", None),
        ("", None),
        ("7, then 8,", 8),
    ],
)
def test_the_last_number_is_found(text: str, number: float | None) -> None:
    assert load("reward").last_number(text) == number


def test_a_right_last_number_is_worth_one_in_the_process_that_a_run_scores_in() -> None:
    reward = FunctionReward(
        use=f"{FOLDER / 'reward.py'}:score",
        timeout=20.0,
        memory=1 << 28,
        workers=1,
        failure_budget=0.0,
        emit=lambda event: None,
    )
    try:
        texts = ("so 3 + 4 = 7", "7 or 8", "seven", "$7.00")
        scores = reward.score([answered(text, 7, sample) for sample, text in enumerate(texts)])
    finally:
        reward.close()
    assert [score.value for score in scores] == [1.0, 0.0, 0.0, 1.0]


def test_the_word_problems_are_chats_with_numbers_as_labels() -> None:
    rows = [json.loads(line) for line in (FOLDER / "words.jsonl").read_text().splitlines()]
    assert len(rows) >= 60
    assert len({row["prompt"][0]["content"] for row in rows}) == len(rows)
    for row in rows:
        assert [message["role"] for message in row["prompt"]] == ["user"]
        assert isinstance(row["label"], int)


def test_the_packages_file_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "packed_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    locate = load("locate").locate
    with pytest.raises(SystemExit, match="0 GGUF files"):
        locate("packed_model")
    (package / "tiny.gguf").write_bytes(b"GGUF")
    assert locate("packed_model") == package / "tiny.gguf"
    with pytest.raises(SystemExit, match="not installed"):
        locate("no_such_package_here")
