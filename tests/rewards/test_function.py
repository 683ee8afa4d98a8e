import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from tidemill.contracts.sample import ScoreStatus
from tidemill.errors import PluginError, RewardError
from tidemill.rewards.function import FunctionReward
from tidemill.testing.suites.reward import RewardSuite

CASES = Path(__file__).parents[1] / "data"
HOSTILE = CASES / "reward_functions_hostile.py"
OURS = Path(__file__).with_name("reward_functions.py")
ODD = {
    row["id"]: row["python"]
    for row in map(json.loads, (CASES / "reward_outputs_odd.jsonl").read_text("utf-8").splitlines())
}
TEXTS = ("abc", "b", "cccc", "dd")
LENGTHS = [3.0, 1.0, 4.0, 2.0]


class TestFunctionReward(RewardSuite):
    @pytest.fixture
    def reward(self, function):
        return function(f"{HOSTILE}:good")

    @pytest.fixture
    def trajectories(self, answers):
        return answers(*TEXTS)


def values(scores):
    return [score.value for score in scores]


def failed(scores):
    return [score.status is ScoreStatus.FAILED for score in scores]


def gone(pid, seconds=5.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


# What functions return.


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("none-one", [1.0, "abstained", 0.0, 1.0]),
        ("none-all", ["abstained"] * 4),
        ("nan-one", [1.0, "nan is not a finite number", 0.0, 1.0]),
        ("three-nan", ["nan is not a finite number"] * 3 + [1.0]),
        ("plus-inf", [1.0, "inf is not a finite number", 0.0, 0.0]),
        ("too-few", ["returned 3 values for 4 answers"] * 4),
        ("too-many", ["returned more than 4 values for 4 answers"] * 4),
        ("scalar", ["returned float 1.0 for 4 answers; return a list"] * 4),
        ("strings", ["str '1' is not a number", "str '0'", "str '1'", "str '0'"]),
        ("booleans", [1.0, 0.0, 1.0, 0.0]),
        ("numpy", [1.0, 0.0, 1.0, 0.0]),
        ("tensor-grad", [1.0] * 4),
        ("dicts", [1.0] * 4),
        ("tuple", ["tuple (1.0, 'ok') is not a number"] * 4),
        ("empty", ["returned 0 values for 4 answers"] * 4),
        ("generator", [1.0, 0.0, 1.0, 0.0]),
        ("huge", [1e30, -1e30, 0.0, 0.0]),
    ],
)
def test_odd_outputs_of_the_cases_are_taken_or_refused_as_documented(case, expected, function, answers):
    memory = 1 << 35 if case in ("numpy", "tensor-grad") else 1 << 28
    reward = function(f"{OURS}:odd", keywords={"expression": ODD[case]}, memory=memory, timeout=60)
    for number, (score, wanted) in enumerate(zip(reward.score(answers(*TEXTS)), expected, strict=True)):
        if isinstance(wanted, float):
            assert (score.value, score.status) == (wanted, ScoreStatus.SCORED)
        elif wanted == "abstained":
            assert (score.value, score.status) == (None, ScoreStatus.ABSTAINED)
        else:
            assert (score.value, score.status) == (None, ScoreStatus.FAILED)
            assert f"reward {OURS}:odd failed for 0:q0#{number}: " in score.reason
            assert wanted in score.reason
        json.dumps([score.value, dict(score.parts)], allow_nan=False)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("'abcd'", None),
        ("None", None),
        ("{1.0, 2.0}", None),
        ("{answer.id: 1.0 for answer in answers[1:]}", None),
        ("dict({answer.id: 1.0 for answer in answers}, other=1.0)", None),
        ("(1.0, 0.5, 0, 1)", [1.0, 0.5, 0.0, 1.0]),
        ("[10**400, 1, 1, 1]", [None, 1.0, 1.0, 1.0]),
        ("[Fraction(1, 2)] * 4", [None] * 4),
        ("[{'no': 1}, {'score': None}, {'score': '1'}, {'score': 1, 'part': 'x'}]", [None] * 4),
        ("iter(int, 1)", None),
    ],
)
def test_further_outputs_are_not_guessed_at(expression, expected, function, answers):
    reward = function(f"{OURS}:odd", keywords={"expression": expression})
    assert values(reward.score(answers(*TEXTS))) == (expected or [None] * 4)


def test_rewards_by_id_are_matched_by_id_in_whatever_order(function, answers):
    assert values(function(f"{OURS}:by_id").score(answers(*TEXTS))) == LENGTHS


def test_parts_and_reason_of_a_score_are_kept(function, answers):
    reward = function(f"{OURS}:odd", keywords={"expression": "[{'score': 1, 'format': True, 'reason': 'neat'}]"})
    (score,) = reward.score(answers("a"))
    assert (score.value, score.parts, score.reason) == (1.0, {"format": 1.0}, "neat")


# What functions do.


def test_a_function_that_fails_once_for_all_is_tried_for_each(function, answers):
    notices = []
    reward = function(f"{HOSTILE}:raises_on_second_call", emit=notices.append)
    assert values(reward.score(answers(*TEXTS))) == LENGTHS
    assert values(reward.score(answers(*TEXTS))) == LENGTHS
    assert "KeyError: 'reward failed on purpose' (reward_functions_hostile.py:" in notices[0].text


def test_only_the_answer_that_cannot_be_scored_fails(function, answers):
    scores = function(f"{HOSTILE}:raises_for_one_sample").score(answers(*TEXTS))
    assert values(scores) == [None, 1.0, 1.0, 1.0]
    assert "0:q0#0: ValueError: this one sample cannot be scored" in scores[0].reason


def test_an_answer_that_hangs_fails_within_the_limit_and_the_others_keep_their_rewards(function, answers):
    """Ten times in a row: the process is replaced each time, and the pool is whole again."""
    reward = function(f"{HOSTILE}:sleeps_on_one_sample", timeout=0.15, failure_budget=0.5)
    pids = set()
    for _ in range(10):
        begun = time.monotonic()
        scores = reward.score(answers(*TEXTS))
        assert values(scores) == [None, 1.0, 4.0, 2.0]
        assert "took longer than 0.15 s" in scores[0].reason
        assert time.monotonic() - begun < 5
        assert len(reward.pool.pids) == 1
        pids.update(reward.pool.pids)
    assert len(pids) == 10


@pytest.mark.parametrize("name", ["sleeps_forever", "busy_forever", "busy_in_c"])
def test_a_function_that_never_returns_is_ended(name, function, answers):
    reward = function(f"{HOSTILE}:{name}", timeout=0.15)
    begun = time.monotonic()
    scores = reward.score(answers(*TEXTS))
    assert failed(scores) == [True] * 4
    assert all("took longer" in score.reason for score in scores)
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("exits_the_process", "its process ended with code 3"),
        ("calls_sys_exit", "SystemExit: 0"),
        ("recursion", "RecursionError"),
        ("eats_memory", "MemoryError: over reward.memory"),
    ],
)
def test_a_function_that_dies_or_raises_every_time_fails_every_answer(name, words, function, answers):
    scores = function(f"{HOSTILE}:{name}", timeout=20.0).score(answers("a", "b"))
    assert failed(scores) == [True, True]
    assert all(words in score.reason for score in scores)


def test_a_crash_names_the_signal_and_costs_one_answer(function, answers):
    scores = function(f"{OURS}:kills_itself").score(answers("a", "die", "c"))
    assert values(scores) == [1.0, None, 1.0]
    assert "its process was ended by SIGSEGV" in scores[1].reason


def test_enough_memory_lets_the_same_function_pass(function, answers):
    assert values(function(f"{HOSTILE}:eats_memory", memory=1 << 30, timeout=30).score(answers("ab"))) == [2.0]


def test_what_a_function_prints_is_cut_and_told_once(function, answers):
    notices = []
    reward = function(f"{HOSTILE}:prints_a_lot", timeout=30, emit=notices.append)
    for _ in range(2):
        assert values(reward.score(answers(*TEXTS))) == LENGTHS
    assert len(notices) == 1
    assert "printed: noise noise" in notices[0].text
    assert len(notices[0].text) < 1000


@pytest.mark.parametrize(
    "use", [f"{HOSTILE}:changes_its_input", f"{OURS}:sorts_its_input", f"{OURS}:empties_its_input"]
)
def test_a_changed_list_never_gives_an_answer_the_reward_of_another(use, function, answers):
    texts = ("zzz", "b", "cccc", "aa")
    trajectories = answers(*texts)
    scores = function(use).score(trajectories)
    if "empties" in use:
        assert failed(scores) == [True] * 4
        assert "changed the list" in scores[0].reason
    else:
        assert values(scores) == LENGTHS
    assert [trajectory.text for trajectory in trajectories] == list(texts)


def test_answers_cannot_be_changed(function, answers):
    (score,) = function(f"{OURS}:tries_to_change_an_answer").score(answers("a"))
    assert "an answer cannot be changed" in score.reason


def test_a_changed_folder_is_changed_back(function, answers):
    reward = function(f"{OURS}:changes_folder_after_telling")
    assert {reward.score(answers("a"))[0].reason for _ in range(2)} == {str(Path.cwd())}
    assert values(function(f"{HOSTILE}:changes_directory").score(answers(*TEXTS))) == LENGTHS


def test_a_function_that_differs_every_time_is_scored(function, answers):
    scores = function(f"{HOSTILE}:different_every_time").score(answers(*TEXTS))
    assert all(score.status is ScoreStatus.SCORED for score in scores)


@pytest.mark.parametrize("name", ["leaves_a_child", "leaves_a_daemon"])
def test_what_a_call_leaves_running_is_ended_with_the_call(name, function, answers):
    (score,) = function(f"{OURS}:{name}").score(answers("a"))
    assert gone(int(score.value))


def test_the_children_of_the_cases_do_not_pile_up(function, answers):
    reward = function(f"{HOSTILE}:leaves_a_child_running", timeout=20)
    for _ in range(3):
        assert values(reward.score(answers(*TEXTS))) == LENGTHS
    (pid,) = reward.pool.pids
    running = [p for p in psutil.Process(pid).children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    assert all(gone(process.pid) for process in running)


def test_standard_input_is_empty(function, answers):
    assert values(function(f"{OURS}:reads_input").score(answers("a"))) == [0.0]


def test_a_reply_that_floods_the_pipe_ends_the_process(function, answers):
    (score,) = function(f"{OURS}:returns_much", memory=1 << 30, timeout=30).score(answers("a"))
    assert "its reply is too long" in score.reason


# What functions are given.


def test_an_answer_is_its_text_with_what_belongs_to_it(function, answers):
    trajectories = answers("ja \u2028\U0001f600", label={"a": [1]}, extra={"level": 3})
    (score,) = function(f"{OURS}:describes").score(trajectories)
    text = "ja \u2028\U0001f600"
    assert score.reason.split("|") == [
        "0:q0#0",
        "the question",
        "q0",
        "0",
        "{'a': [1]}",
        "{'level': 3}",
        "(5, 6)",
        "eos",
        text,
        text,
        "str",
    ]


def test_half_a_surrogate_pair_in_an_answer_reaches_the_function(function, answers):
    assert values(function(f"{HOSTILE}:good").score(answers("a\ud83d"))) == [2.0]


def test_all_odd_texts_of_the_cases_can_be_scored(function, answers):
    lines = (CASES / "prompts_odd_unicode.jsonl").read_text("utf-8").split("\n")
    texts = [json.loads(line)["prompt"] for line in lines if line]
    assert values(function(f"{HOSTILE}:good").score(answers(*texts))) == [float(len(text)) for text in texts]


def test_secrets_of_the_environment_are_not_passed_on(monkeypatch, function, answers):
    monkeypatch.setenv("ACME_API_KEY", "secret")
    monkeypatch.setenv("ACME_COLOUR", "blue")
    hidden = function(f"{OURS}:environment", keywords={"name": "ACME_API_KEY"}).score(answers("a"))
    shown = function(f"{OURS}:environment", keywords={"name": "ACME_COLOUR"}).score(answers("a"))
    assert (hidden[0].reason, shown[0].reason) == ("not there", "blue")


def test_the_process_loads_no_heavy_library_by_itself(function, answers):
    assert function(f"{OURS}:modules").score(answers("a"))[0].reason == ""


def test_a_process_starts_fast(function):
    begun = time.monotonic()
    function(f"{HOSTILE}:good")
    assert time.monotonic() - begun < 2


# Limits and budgets.


def test_more_failures_than_the_budget_allows_stop_the_run_and_say_why(function, answers):
    reward = function(f"{HOSTILE}:raises_for_one_sample", failure_budget=0.2)
    with pytest.raises(RewardError) as caught:
        reward.score(answers(*TEXTS))
    message = str(caught.value)
    assert f"reward {HOSTILE}:raises_for_one_sample failed for" in message
    assert "of 4 answers, more than reward.failure_budget = 0.2 allows" in message
    assert "0:q0#0: ValueError: this one sample cannot be scored" in message


def test_failures_within_the_budget_are_scores(function, answers):
    reward = function(f"{HOSTILE}:raises_for_one_sample", failure_budget=0.25)
    assert failed(reward.score(answers(*TEXTS))) == [True, False, False, False]


def test_a_function_that_always_hangs_is_given_up_as_soon_as_the_budget_is_exceeded(function, answers):
    reward = function(f"{HOSTILE}:sleeps_forever", timeout=0.3, failure_budget=0.05)
    begun = time.monotonic()
    with pytest.raises(RewardError, match="took longer than 0.3 s"):
        reward.score(answers(*["x"] * 40))
    assert time.monotonic() - begun < 0.3 * 5 + 3


def test_trying_alone_has_a_limit_of_its_own(function, answers):
    """Each answer is in time alone, all together are not: what is not reached has failed."""
    reward = function(f"{OURS}:sleeps_on_each", keywords={"seconds": 0.05}, timeout=0.1, failure_budget=0.9)
    begun = time.monotonic()
    scores = reward.score(answers(*["x"] * 20))
    assert time.monotonic() - begun < 0.1 * (3 + 18) + 3
    assert any(failed(scores)) or values(scores) == [1.0] * 20


def test_workers_share_the_answers_and_keep_those_to_one_prompt_together(function, answers):
    reward = function(f"{OURS}:processes", workers=2, timeout=20)
    scores = reward.score(answers(*["x"] * 12, samples=4))
    assert [score.reason.split()[1] for score in scores] == ["8"] * 8 + ["4"] * 4
    reward.score(answers(*["x"] * 12, samples=4))
    assert 1 <= len(reward.pool.pids) <= 2


def test_several_workers_replace_those_that_hang(function, answers):
    reward = function(f"{HOSTILE}:sleeps_on_one_sample", workers=2, timeout=0.3, failure_budget=0.5)
    for _ in range(3):
        assert values(reward.score(answers("abc", "b", "cccc", "dd", samples=2))) == [None, 1.0, 4.0, 2.0]


# Loading, and the end.


def test_functions_may_be_named_through_modules_and_classes(function, answers):
    assert values(function(f"{OURS}:Scorer.score").score(answers("a"))) == [3.0]
    assert values(function("builtins:list").score(answers("a"))) == [None]


@pytest.mark.parametrize(
    ("use", "words"),
    [
        ("no_such_module:score", "No module named 'no_such_module'"),
        (f"{OURS}:missing", "has no attribute 'missing'"),
        (f"{OURS}:not_a_function", "not_a_function is int, not a function"),
        ("/nowhere/file.py:score", "no such file: /nowhere/file.py"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_refused_before_the_run(use, words, function):
    with pytest.raises(PluginError) as caught:
        function(use)
    assert words in str(caught.value)
    assert use in str(caught.value)


def test_a_module_that_exits_when_imported_is_refused(function, tmp_path):
    (tmp_path / "leaves.py").write_text("raise SystemExit(4)")
    with pytest.raises(PluginError, match="SystemExit: 4"):
        function(f"{tmp_path / 'leaves.py'}:score")


def test_closing_ends_a_call_in_progress(function, answers):
    reward = function(f"{HOSTILE}:sleeps_forever", timeout=60)
    outcome = []

    def score():
        try:
            reward.score(answers("a"))
        except RewardError as error:
            outcome.append(error)
        else:
            outcome.append("scored")

    thread = threading.Thread(target=score)
    thread.start()
    time.sleep(0.3)
    (pid,) = reward.pool.pids
    reward.close()
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert outcome
    assert gone(pid)


def test_an_interrupt_ends_the_processes(function, answers):
    reward = function(f"{HOSTILE}:sleeps_forever", timeout=60)
    (pid,) = reward.pool.pids
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        reward.score(answers("a"))
    assert gone(pid)


def test_a_killed_run_leaves_neither_the_process_nor_what_it_started(tmp_path):
    """SIGKILL gives the run no chance to clean up; the kernel does."""
    told = tmp_path / "pids"
    script = f"""
from tests_support import trajectory
from tidemill.rewards.function import FunctionReward
FunctionReward(use={str(OURS) + ":hangs_with_a_child"!r}, timeout=60, memory=1 << 28, workers=1, failure_budget=1.0,
               emit=print, keywords={{"path": {str(told)!r}}}).score([trajectory])
"""
    support = """
from tidemill.contracts.sample import *
from tidemill.contracts.state import PolicyVersion
trajectory = Trajectory(prompt=Prompt(id="a", key="0:a", token_ids=(1,), text=""), sample=0, token_ids=(), logprobs=(),
    loss_mask=(), version=PolicyVersion(0, 0), stop_reason=StopReason.EOS)
"""
    (tmp_path / "tests_support.py").write_text(support)
    run = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path)
    deadline = time.monotonic() + 20
    while not (told.exists() and len(told.read_text().split()) == 2) and time.monotonic() < deadline:
        time.sleep(0.05)
    child, grandchild = map(int, told.read_text().split())
    run.kill()
    run.wait(timeout=10)
    assert gone(child)
    assert gone(grandchild)


def test_the_reward_can_be_made_and_closed_without_a_call():
    reward = FunctionReward(
        use=f"{HOSTILE}:good", timeout=1, memory=1 << 28, workers=2, failure_budget=0, emit=lambda event: None
    )
    (pid,) = reward.pool.pids
    reward.close()
    assert gone(pid)
