"""tidemill.config.problems: what a problem says, and which setting is taken to be meant."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tidemill.config.problems import Problem, dotted, toml_text

Problems = Callable[..., list[str]]

MEANT = {
    "stpes=1": "did you mean steps?",
    "lr=1": "did you mean trainer.optimizer.lr or warm_up.optimizer.lr?",
    "trainer.lr=1": "did you mean trainer.optimizer.lr?",
    "trainer.learning_rate=1": "did you mean trainer.optimizer.lr?",
    "trainer.optimizer.learning_rate=1": "did you mean trainer.optimizer.lr?",
    "warm_up.optimizer.learning-rate=1": "did you mean warm_up.optimizer.lr?",
    "trainer.optimzer.lr=1": "no such section; did you mean trainer.optimizer?",
    "every=1": "did you mean checkpoint.every or eval.every?",
    "rollout.temperature=1": "did you mean rollout.sampling.temperature?",
    "checkpoint.keep_lats=1": "did you mean checkpoint.keep_last?",
    "engine.dtpye=auto": "did you mean engine.dtype?",
    "utterly.unlike.anything=1": "no such section",
}


@pytest.mark.parametrize("word", MEANT)
def test_the_nearest_setting_is_named(problems: Problems, word: str) -> None:
    (found,) = problems(word)
    assert found.endswith(MEANT[word])


def test_the_nearest_choice_is_named(problems: Problems) -> None:
    (found,) = problems("engine.offload=alway")
    assert found == (
        'engine.offload = "alway" (command line): should be "auto", "always" or "never"; did you mean "always"?'
    )


def test_an_item_of_a_list_is_named(problems: Problems) -> None:
    (found,) = problems('rollout.sampling.stop=["a", ""]')
    assert found == 'rollout.sampling.stop[1] = "" (command line): should not be empty'
    (found,) = problems("rollout.sampling.stop_token_ids=[1, -2]")
    assert found.startswith("rollout.sampling.stop_token_ids[1] = -2")
    (found,) = problems("trainer.optimizer.betas=[0.9]")
    assert found == "trainer.optimizer.betas (command line): should have exactly two items"


def test_types_are_named_as_toml_names_them(problems: Problems) -> None:
    (found,) = problems("trainer.recompute=1")
    assert found.endswith("should be true or false")
    (found,) = problems('model=["a"]')
    assert found.endswith("should be a path, as text")
    (found,) = problems("engine.use=[1]")
    assert found.endswith("should be a name, as text")


def test_a_bad_regular_expression_is_a_problem(problems: Problems) -> None:
    (found,) = problems("reward.use=regex", "reward.pattern=(")
    assert "is not a regular expression: missing )" in found
    (found,) = problems("reward.use=regex")
    assert found == "reward.pattern: must be set; it has no default"


def test_a_value_is_shown_as_it_would_be_written() -> None:
    values = {
        True: "true",
        'a "b"': '"a \\"b\\""',
        ("x", 1): '["x", 1]',
        None: '""',
        Path("a/b"): '"a/b"',
        1e-6: "1e-06",
    }
    for value, text in values.items():
        assert toml_text(value) == text
    assert toml_text({"n": 4}) == "{n = 4}"
    assert len(str(Problem(path="a", text="b", value="x" * 1000))) < 220


def test_a_path_is_dotted() -> None:
    assert dotted(("recorder", "use", 1)) == "recorder.use[1]"


def test_a_problem_is_a_line_and_an_object() -> None:
    problem = Problem(path="steps", text="should be greater than 0", value=0, origin="run.toml")
    assert str(problem) == "steps = 0 (run.toml): should be greater than 0"
    assert problem.to_json() == {
        "path": "steps", "value": "0", "origin": "run.toml", "text": "should be greater than 0"
    }  # fmt: skip
    assert Problem(path="model", text="must be set").to_json()["value"] is None
