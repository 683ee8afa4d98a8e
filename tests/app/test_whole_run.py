"""A whole run in this process, from settings to summary, dump, replay, rollout and export.

Modules: tidemill.app.assemble, tidemill.app.run, tidemill.app.summary; tidemill.cli.run,
tidemill.cli.rollout; tidemill.engines.replay.engine.
"""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.crash.small_run import STEPS, WARM_UP, checksums, outcome, prepare, recipe
from transformers import AutoModelForCausalLM, AutoTokenizer

from tidemill.app.identity import run_identity
from tidemill.cli.main import main
from tidemill.config.checkpoint import BOUND_TO
from tidemill.config.load import load
from tidemill.contracts.sample import Group
from tidemill.faults import armed
from tidemill.recorders.jsonl import JsonlSink
from tidemill.rollout.dump import read_dump

Command = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole run")
    prepare(folder)
    return folder


@pytest.fixture(scope="module")
def run(base: Path) -> Path:
    folder = base / "run"
    assert main(["run", str(recipe(base, folder)), "--quiet", 'recorder.use=["tensorboard"]']) == 0
    return folder


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """`tidemill WORDS --json`: exit code and the object that it printed."""

    def call(*words: str) -> tuple[int, dict[str, Any]]:
        code = main([*words, "--json"])
        return code, json.loads(capsys.readouterr().out or "{}")

    return call


def groups_of(run: Path, step: int) -> tuple[Group, ...]:
    return read_dump(run / "rollouts" / f"step-{step:08d}.jsonl").groups


def test_the_summary_counts_the_whole_run(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert summary["finished"] is True
    assert summary["checkpoints"] == 5
    # Asleep at each rollout and at the final evaluation; awake again for each update. The export needs no waking.
    assert summary["sleeps"] == STEPS - WARM_UP + 1
    assert summary["wakes"] == STEPS - WARM_UP
    assert 0 <= summary["save_stall_seconds"] < summary["seconds"]
    assert summary["peak_host_bytes"] > 1 << 20
    assert Path(summary["export"]).is_dir()
    assert set(summary) >= {"eval_first", "eval_last", "reward_first", "reward_last"}


def test_a_run_whose_last_words_do_not_reach_the_disk_has_not_finished(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, close = base / "unsaid", JsonlSink.close

    def fails(sink: JsonlSink) -> None:
        close(sink)
        raise OSError(errno.EIO, "the disk does not answer")

    with monkeypatch.context() as patched:
        patched.setattr(JsonlSink, "close", fails)
        assert main(["run", str(recipe(base, folder)), "--quiet"]) == 1
    assert "the disk does not answer" in capsys.readouterr().err
    assert not json.loads((folder / "summary.json").read_text())["finished"]
    assert main(["run", str(recipe(base, folder)), "--quiet"]) == 0
    assert json.loads((folder / "summary.json").read_text())["finished"]


def test_the_run_folder_holds_what_the_documentation_says(run: Path) -> None:
    names = {path.name for path in run.iterdir()}
    assert names >= {
        "manifest.json", "metrics.jsonl", "events.jsonl", "samples.jsonl", "rollouts", "checkpoints", "export",
        "report.html", "summary.json", "tensorboard",
    }  # fmt: skip
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["settings"]["steps"]["value"] == STEPS
    assert manifest["settings"]["recorder.use"] == {"value": ["tensorboard"], "origin": "command line"}
    assert manifest["device"] == "cpu"


def test_the_export_is_what_the_last_checkpoint_holds_and_speaks_as_the_trainer_does(run: Path, base: Path) -> None:
    export = run / "export" / f"step-{STEPS:08d}"
    model = AutoModelForCausalLM.from_pretrained(export)
    tokenizer = AutoTokenizer.from_pretrained(export)
    assert main(["ckpt", "export", str(run), "--out", str(base / "from disk")]) == 0
    again = AutoModelForCausalLM.from_pretrained(base / "from disk")
    ids = tokenizer("12345678>", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)


def test_the_engine_and_the_trainer_agree_on_every_sampled_token(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    worst = [line["mismatch/logprob_abs_max"] for line in lines if "mismatch/logprob_abs_max" in line]
    assert len(worst) == STEPS - WARM_UP
    assert max(worst) < 1e-4


def test_a_dump_holds_every_answer_with_log_probs_rewards_and_advantages(run: Path) -> None:
    dumped = read_dump(run / "rollouts" / f"step-{WARM_UP:08d}.jsonl")
    members = [member for group in dumped.groups for member in group.trajectories]
    assert [len(group.trajectories) for group in dumped.groups] == [4, 4, 4]
    assert {member.version.step for member in members} == {WARM_UP}
    assert all(len(member.logprobs) == len(member.token_ids) > 0 for member in members)
    assert set(dumped.advantages) == {member.id for member in members}
    for group in dumped.groups:
        assert abs(sum(dumped.advantages[member.id] for member in group.trajectories)) < 1e-5


def test_training_on_the_dump_gives_the_weights_of_the_run_that_dumped(run: Path, base: Path) -> None:
    replay = base / "replay"
    words = ["run", str(recipe(base, replay)), f"rollout.replay={run / 'rollouts'}", "rollout.dump=false"]
    assert main([*words, "eval.every=0", "--quiet"]) == 0
    assert checksums(replay) == checksums(run)
    notices = [json.loads(x) for x in (replay / "events.jsonl").read_text().splitlines() if '"notice"' in x]
    assert any("no engine is built" in notice["text"] for notice in notices)


@pytest.mark.parametrize(
    ("word", "answer"),
    [("rollout.sampling.temperature=0.5", "set it to 1"), ("rollout.samples=6", "set rollout.samples = 4")],
)
def test_a_dump_that_was_made_otherwise_is_not_trained_on(
    word: str, answer: str, run: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replay = base / f"replay with {word}"
    words = ["run", str(recipe(base, replay)), f"rollout.replay={run / 'rollouts'}", "rollout.dump=false", word]
    assert main([*words, "eval.every=0", "--quiet"]) in (1, 2)
    assert answer in capsys.readouterr().err


@pytest.mark.parametrize("words", [["residency.offload=never"], ["residency.offload=auto"], ["checkpoint.mode=sync"]])
def test_who_sleeps_and_who_waits_changes_no_bit(run: Path, base: Path, words: list[str]) -> None:
    other = base / words[0]
    assert main(["run", str(recipe(base, other)), *words, "--quiet"]) == 0
    assert outcome(other) == outcome(run)


def test_rollout_generates_and_scores_and_builds_no_trainer(base: Path, command: Command) -> None:
    words = ["rollout", str(recipe(base, base / "untouched")), "--out", str(base / "look"), "--limit", "3"]
    code, result = command(*words)
    assert code == 0
    assert result["prompts"] == 3
    assert result["reward/scored"] == 1.0
    assert "no trainer is built" in result["skipped"]
    assert len(read_dump(Path(result["rollouts"])).groups) == 3
    assert not (base / "untouched").exists()
    assert main(words) == 2  # never over rollouts that are there


def test_rollout_looks_for_a_place_to_write_before_it_generates(
    base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.app.build.build_engine", lambda *_, **__: pytest.fail("an engine was built"))
    for out in (base / "rows.jsonl", base / "rows.jsonl" / "below"):
        assert main(["rollout", str(recipe(base, base / "untouched")), "--out", str(out)]) == 2
        error = capsys.readouterr().err
        assert f"cannot write rollouts to {out}" in error
        assert error.rstrip().endswith("choose another --out")


def test_rollouts_that_cannot_be_written_name_the_option_of_this_verb(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["rollout", str(recipe(base, base / "untouched")), "--out", str(base / "full"), "--limit", "1"]
    with armed("rollout.dump.write=disk-full"):
        assert main(words) == 1
    assert "free the disk or choose another --out" in capsys.readouterr().err


def test_rollout_prints_what_a_person_wants_to_see(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["rollout", str(recipe(base, base / "untouched")), "--out", str(base / "look again"), "--limit", "2"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert out.startswith("2 prompts, ")
    assert "best answer" in out


def test_a_run_that_ended_prints_where_everything_is(run: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(recipe(base, run)), 'recorder.use=["tensorboard"]']) == 0
    out = capsys.readouterr().out
    for name in ("report.html", "summary.json", "checkpoints", "AutoModelForCausalLM.from_pretrained"):
        assert name in out


def test_wandb_offline_keeps_one_run_over_a_resume(base: Path, command: Command) -> None:
    folder = base / "wandb run"
    words = ["run", str(recipe(base, folder)), 'recorder.use=["wandb"]', "recorder.wandb.mode=offline"]
    assert command(*words, "steps=5")[0] == 0
    assert command(*words, "steps=6")[0] == 0
    ids = {path.name.split("-")[3] for path in (folder / "wandb").rglob("offline-run-*") if path.is_dir()}
    assert len(ids) == 1


def test_data_that_changed_is_refused_by_name_and_accepted_by_name(base: Path, command: Command) -> None:
    folder, rows = base / "changed data", base / "changing.jsonl"
    rows.write_bytes((base / "rows.jsonl").read_bytes())
    words = ["run", str(recipe(base, folder)), f"data.prompts={rows}", "eval.every=0"]
    assert command(*words, "steps=4", "warm_up.steps=4")[0] == 0
    rows.write_text(rows.read_text() + '{"prompt": "87654321>", "label": "12345678"}\n')
    assert main([*words, "steps=6", "warm_up.steps=4"]) == 2
    assert main([*words, "steps=6", "warm_up.steps=4", 'checkpoint.accept=["data"]', "--quiet"]) == 0


@pytest.mark.parametrize("name", ["data", "seed"])
def test_an_accepted_change_goes_on_with_the_next_epoch_and_says_so(name: str, base: Path, command: Command) -> None:
    folder, rows = base / f"accepted {name}", base / f"changing {name}.jsonl"
    rows.write_bytes((base / "rows.jsonl").read_bytes())
    words = ["run", str(recipe(base, folder)), f"data.prompts={rows}", "eval.every=0", "rollout.dump=true"]
    assert command(*words, "steps=6")[0] == 0
    if name == "data":
        renamed = [{**json.loads(row), "id": f"new-{n}"} for n, row in enumerate(rows.read_text().splitlines())]
        rows.write_text("".join(json.dumps(row) + "\n" for row in renamed))
    else:
        words.append("run.seed=99")
    assert main([*words, "steps=8"]) == 2
    assert command(*words, "steps=8", f'checkpoint.accept=["{name}"]')[0] == 0
    keys = [[group.prompt.key.partition(":")[0] for group in groups_of(folder, step)] for step in range(4, 8)]
    assert keys == [["0"] * 3, ["0"] * 3, ["1"] * 3, ["1"] * 3]
    notices = [json.loads(x)["text"] for x in (folder / "events.jsonl").read_text().splitlines() if '"notice"' in x]
    assert [text for text in notices if "begins epoch 1 of the new order" in text]
    # The checkpoint of step 8 is bound to what is new: nothing has to be accepted any more.
    assert command(*words, "steps=9")[0] == 0
    assert [group.prompt.key[0] for group in groups_of(folder, 8)] == ["1"] * 3


def test_what_a_checkpoint_is_bound_to_are_the_names_that_the_settings_take(base: Path) -> None:
    loaded = load([recipe(base, base / "names")], [])
    assert set(run_identity(loaded.config)) == set(BOUND_TO)


def test_settings_that_changed_between_two_starts_are_told(base: Path, command: Command) -> None:
    folder = base / "changed settings"
    words = ["run", str(recipe(base, folder)), "eval.every=0"]
    assert command(*words, "steps=5")[0] == 0
    assert command(*words, "steps=6", "trainer.optimizer.lr=2e-3")[0] == 0
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    told = [event["text"] for event in events if event["kind"] == "notice" and "settings changed" in event["text"]]
    assert told == ["settings changed since then: steps: 5 -> 6; trainer.optimizer.lr: 0.001 -> 0.002"]
