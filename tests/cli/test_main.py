"""tidemill.cli.main, tidemill.cli.arguments and tidemill.__main__: words in, exit code out."""

import argparse
import functools
import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.planning.test_plan import QWEN3_1_7B

from tidemill.cli.arguments import parser
from tidemill.cli.main import main
from tidemill.errors import ConfigError, EngineError, Interrupted, RunLockedError, WeightSyncError, WorkerError

Command = Callable[..., "subprocess.CompletedProcess[str]"]


class Verb(types.ModuleType):
    """Stands in for a verb's module: keeps what it was given, and ends as it is told to."""

    def __init__(self, ending: BaseException | int = 0) -> None:
        super().__init__("verb")
        self.ending = ending
        self.given = argparse.Namespace()

    def main(self, arguments: argparse.Namespace) -> int:
        self.given = arguments
        if isinstance(self.ending, BaseException):
            raise self.ending
        return self.ending


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Verb]:
    def _verb(name: str, ending: BaseException | int = 0) -> Verb:
        stand_in = Verb(ending)
        monkeypatch.setitem(sys.modules, f"tidemill.cli.{name}", stand_in)
        return stand_in

    return _verb


def test_help_fits_a_screen_and_names_the_exit_codes(command: Command) -> None:
    done = command("--help")
    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    for word in ("run", "check", "plan", "rollout", "report", "ckpt", "model", "130", "143", "141", "70"):
        assert word in done.stdout.split(), word


@pytest.mark.parametrize(
    "words", [["run"], ["check"], ["plan"], ["rollout"], ["report"], ["ckpt"], ["ckpt", "ls"], ["model"]]
)
def test_every_verb_explains_itself(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    assert "usage: tidemill" in capsys.readouterr().out


def test_the_version_is_that_of_the_package(command: Command) -> None:
    assert command("--version").stdout == "tidemill 0.1.0\n"


def test_files_and_settings_are_told_apart(verb: Callable[..., Verb], folder: Path) -> None:
    run = verb("run")
    (folder / "odd=name.toml").write_text("")
    assert main(["run", "run.toml", "steps=5", "--fresh", "odd=name.toml", "model=a=b", "gone.toml", "--quiet"]) == 0
    assert run.given.files == [Path("run.toml"), Path("odd=name.toml"), Path("gone.toml")]
    assert run.given.words == ["steps=5", "model=a=b"]
    assert run.given.fresh and run.given.quiet and not run.given.json


def test_a_value_that_begins_with_a_dash_is_a_setting(verb: Callable[..., Verb]) -> None:
    run = verb("run")
    assert main(["run", "a.toml", "run.seed=-1", "reward.pattern=-?\\d+"]) == 0
    assert run.given.words == ["run.seed=-1", "reward.pattern=-?\\d+"]


def test_a_setting_that_is_too_long_for_a_file_name_is_a_setting(verb: Callable[..., Verb]) -> None:
    run = verb("run")
    assert main(["run", "a.toml", f"reward.pattern={'x' * 9000}", "a.b=\0"]) == 0
    assert len(run.given.words) == 2


def test_verbs_take_their_options(verb: Callable[..., Verb]) -> None:
    plan, rollout, ckpt, model = verb("plan"), verb("rollout"), verb("ckpt"), verb("model")
    main(["rollout", "a.toml", "--out", "answers", "--limit", "3", "--json"])
    assert (rollout.given.out, rollout.given.limit, rollout.given.json) == (Path("answers"), 3, True)
    main(["plan", "a.toml", "--device-memory", "80GiB", "--host-memory=1 TiB"])
    assert (plan.given.device_memory, plan.given.host_memory, plan.given.json) == (80 << 30, 1 << 40, False)
    main(["ckpt", "verify", "runs/first", "--step", "50"])
    assert (ckpt.given.action, ckpt.given.run, ckpt.given.step) == ("verify", Path("runs/first"), 50)
    main(["ckpt", "export", "runs/first", "--out", "model", "--dtype", "bfloat16"])
    assert (ckpt.given.out, ckpt.given.dtype, ckpt.given.step) == (Path("model"), "bfloat16", None)
    main(["model", "import", "a.gguf", "--out", "model"])
    assert (model.given.action, model.given.source) == ("import", "a.gguf")


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["fly"],
        ["run"],
        ["run", "a.toml", "--frsh"],
        ["plan", "a.toml", "--device-memory", "much"],
        ["plan", "a.toml", "--device-memory", "0"],
        ["plan", "a.toml", "--host-memory", "0.1"],
        ["report"],
        ["report", "a", "b"],
        ["rollout", "a.toml"],
        ["rollout", "a.toml", "--out", "b", "--limit", "-1"],
        ["ckpt"],
        ["ckpt", "verify", "a", "--step", "last"],
        ["model", "import", "a"],
    ],
    ids=" ".join,
)
def test_wrong_words_end_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "tidemill" in capsys.readouterr().err


class Stopped(Interrupted):
    """As by SIGTERM."""

    exit_code = 143


ENDINGS: dict[int, list[BaseException]] = {
    1: [EngineError("cannot generate: no weights")],
    2: [ConfigError("bad"), RunLockedError("taken")],
    130: [KeyboardInterrupt(), Interrupted("stopped")],
    143: [Stopped("stopped")],
    141: [BrokenPipeError()],
}


@pytest.mark.parametrize("code", ENDINGS)
def test_each_way_to_end_has_its_exit_code(
    verb: Callable[..., Verb], code: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A broken pipe takes standard output away for good, which this process still needs.
    monkeypatch.setattr("tidemill.cli.main.silence", lambda stream: None)
    for ending in ENDINGS[code]:
        verb("report", ending)
        assert main(["report", "runs/first"]) == code
        written = capfd.readouterr().err
        assert "Traceback" not in written
        assert code == 141 or (written.startswith("tidemill: ") and str(ending) in written)


def test_what_went_wrong_besides_is_said_after_the_error(
    verb: Callable[..., Verb], capsys: pytest.CaptureFixture[str]
) -> None:
    error = EngineError("cannot generate")
    error.add_note("and then: the disk is full")
    verb("report", error)
    assert main(["report", "runs/first"]) == 1
    assert capsys.readouterr().err == "tidemill: cannot generate\n  and then: the disk is full\n"


def test_a_workers_traceback_is_shown_however_often_its_error_was_told_in_other_words(
    verb: Callable[..., Verb], capsys: pytest.CaptureFixture[str]
) -> None:
    first, error = WorkerError("trainer-1 on alpha failed"), WeightSyncError("cannot bring engine to version 1")
    first.add_note("in trainer-1 on alpha:\nTraceback")
    error.__cause__ = first
    verb("report", error)
    assert main(["report", "runs/first"]) == 1
    assert "version 1\n  in trainer-1 on alpha:\nTraceback" in capsys.readouterr().err


def test_what_a_verb_returns_is_the_exit_code(verb: Callable[..., Verb]) -> None:
    verb("ckpt", 1)
    assert main(["ckpt", "verify", "runs/first"]) == 1


def test_a_bug_keeps_its_traceback_and_ends_with_70(
    verb: Callable[..., Verb], capsys: pytest.CaptureFixture[str]
) -> None:
    verb("report", ZeroDivisionError("a bug"))
    assert main(["report", "runs/first"]) == 70
    assert "Traceback" in capsys.readouterr().err


VERBS = [["check", "run.toml"], ["check", "run.toml", "--json"], ["plan", "run.toml"], ["plan", "run.toml", "--json"]]


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_an_output_that_is_full_is_one_line_and_one_that_is_closed_changes_nothing(
    folder: Path, words: list[str], unbuffered: str
) -> None:
    (folder / "model" / "config.json").write_text(json.dumps(QWEN3_1_7B))
    command = [sys.executable, "-m", "tidemill", *words]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    run = functools.partial(subprocess.run, stderr=subprocess.PIPE, text=True, timeout=60, env=environment)
    with Path("/dev/full").open("w") as full:
        done = run(command, stdout=full)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert done.stderr.startswith("tidemill: cannot write to standard output: No space left on device")
    closed = run(["/bin/sh", "-c", 'exec "$@" >&-', "sh", *command])
    assert closed.returncode in (0, 2) and "Traceback" not in closed.stderr


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_a_reader_that_goes_away_ends_every_verb_alike(folder: Path, words: list[str]) -> None:
    (folder / "model" / "config.json").write_text(json.dumps(QWEN3_1_7B))
    reading, writing = os.pipe()
    os.close(reading)
    child = subprocess.run(
        [sys.executable, "-m", "tidemill", *words], stdout=writing, stderr=subprocess.PIPE, timeout=60
    )
    os.close(writing)
    assert child.returncode == 141
    assert b"Traceback" not in child.stderr and b"BrokenPipe" not in child.stderr


def test_the_installed_command_and_the_module_are_one(command: Command) -> None:
    script = Path(sys.executable).with_name("tidemill")
    done = subprocess.run([script, "--help"], capture_output=True, text=True, timeout=60)
    assert done.stdout == command("--help").stdout


def test_help_is_quick_and_imports_no_more_than_it_needs(folder: Path) -> None:
    code = (
        "import sys\nfrom tidemill.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = ('torch', 'transformers', 'numpy', 'ray', 'rich', 'pydantic')\n"
        "print([name for name in heavy if name in sys.modules], file=sys.stderr)"
    )
    fastest = 60.0
    for _ in range(3):  # the best of three: the machine may be busy with something else
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        fastest = min(fastest, time.perf_counter() - start)
    assert done.stderr.strip() == "[]"
    assert fastest < 0.5


def test_verbs_are_modules() -> None:
    folder = Path(__file__).parents[2] / "src" / "tidemill" / "cli"
    (verbs,) = (action.choices for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    for name in verbs:
        assert (folder / f"{name}.py").is_file(), name


def test_who_types_nothing_is_helped(command: Command) -> None:
    done = command()
    assert done.returncode == 2
    assert "train, or go on from the newest checkpoint" in done.stderr


def test_an_option_for_a_setting_is_told_how_settings_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "a.toml", "--lr", "3"])
    assert "settings are written path=value" in capsys.readouterr().err
