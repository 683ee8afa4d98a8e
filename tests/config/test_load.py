"""tidemill.config.load: files and words to one value, or to everything that is wrong with it."""

import json
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tidemill.config.load import Loaded, SettingsError, load
from tidemill.errors import ConfigError

Load = Callable[..., Loaded]


def test_the_message_of_the_house_is_exact(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "my_lab.py").write_text(
        textwrap.dedent("""
        from typing import Annotated
        from pydantic import Field
        from tidemill.config.engine import EngineSettings

        class TinyEngine(EngineSettings):
            memory: Annotated[float, Field(gt=0, lt=1)] = 0.5
        """)
    )
    monkeypatch.syspath_prepend(folder)
    (folder / "run.toml").write_text(
        textwrap.dedent("""
        [run]
        dir = "runs/first"
        [trainer.optimizer]
        learning_rate = 1e-6
        [engine]
        use = "my_lab:TinyEngine"
        memory = 1.5
        [data]
        prompts = "prompts.jsonl"
        """)
    )
    with pytest.raises(SettingsError) as caught:
        load([Path("run.toml")], ["steps=0", "stpes=100"])
    assert str(caught.value) == textwrap.dedent("""\
        5 problem(s) in this run's settings:
          model: must be set; it has no default
          steps = 0 (command line): should be greater than 0
          trainer.optimizer.learning_rate (run.toml): no such setting; did you mean trainer.optimizer.lr?
          engine.memory = 1.5 (run.toml): should be less than 1
          stpes (command line): no such setting; did you mean steps?""")


def test_nothing_at_all_names_everything_that_must_be_set(folder: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        load([], [])
    assert [problem.path for problem in caught.value.problems] == ["model", "steps", "run.dir", "data.prompts"]
    assert {problem.text for problem in caught.value.problems} == {"must be set; it has no default"}


def test_later_files_win_and_words_win_over_files(folder: Path) -> None:
    (folder / "more.toml").write_text("steps = 20\n[trainer.optimizer]\nlr = 1e-4\neps = 1e-7\n")
    loaded = load([Path("run.toml"), Path("more.toml")], ["trainer.optimizer.lr=2e-4", "trainer.optimizer.lr=3e-4"])
    assert loaded.config.steps == 20
    assert loaded.config.trainer.optimizer.lr == 3e-4
    assert loaded.config.trainer.optimizer.eps == 1e-7
    assert loaded.origins["model"] == "run.toml"
    assert loaded.origins["steps"] == "more.toml"
    assert loaded.origins["trainer.optimizer.lr"] == "command line"
    assert loaded.origins["trainer.optimizer.eps"] == "more.toml"
    assert loaded.origins["trainer.optimizer.betas"] == "default"


def test_lists_are_replaced_not_joined(loaded: Load, folder: Path) -> None:
    (folder / "run.toml").write_text((folder / "run.toml").read_text() + 'rollout.sampling.stop = ["a", "b"]\n')
    assert loaded('rollout.sampling.stop=["c"]').config.rollout.sampling.stop == ("c",)


def test_a_word_may_be_a_table_and_merges(loaded: Load) -> None:
    optimizer = loaded("trainer.optimizer.eps=1e-7", "trainer.optimizer={lr=1e-5}").config.trainer.optimizer
    assert (optimizer.lr, optimizer.eps) == (1e-5, 1e-7)


def test_text_needs_no_quotes_where_text_is_wanted(loaded: Load) -> None:
    config = loaded(
        "engine.offload=always",
        'trainer.dtype="float32"',
        "run.dir=2024",
        'recorder.use=["wandb"]',
        "recorder.wandb.project=123",
        "recorder.wandb.name=a=b # c",
        "residency.page=2 MiB",
        "reward.use=regex",
        r"reward.pattern=#### (\d+)",
        check_files=False,
    ).config
    assert config.engine.offload == "always"
    assert config.trainer.dtype == "float32"
    assert config.run.dir.name == "2024"
    assert config.recorder.wandb.project == "123"
    assert config.recorder.wandb.name == "a=b # c"
    assert config.residency.page == 2 << 20
    assert config.reward.model_dump()["pattern"] == r"#### (\d+)"


def test_a_word_cannot_smuggle_in_a_second_setting(loaded: Load) -> None:
    with pytest.raises(SettingsError, match="valid integer, not text"):
        loaded('steps=5\nmodel = "other"')


def test_a_single_text_is_not_a_list(loaded: Load) -> None:
    with pytest.raises(SettingsError, match=r'recorder.use = "rich" \(command line\): should be a list'):
        loaded("recorder.use=rich")


def test_a_value_where_a_table_belongs_is_one_problem(loaded: Load) -> None:
    with pytest.raises(SettingsError) as caught:
        loaded("run=5", "trainer=6", "eval=[]")
    assert [str(problem) for problem in caught.value.problems] == [
        "run = 5 (command line): should be a table",
        "trainer = 6 (command line): should be a table",
        "eval = [] (command line): should be a table",
    ]


def test_an_empty_text_takes_an_optional_path_back(loaded: Load, folder: Path) -> None:
    (folder / "run.toml").write_text((folder / "run.toml").read_text() + 'eval.data = "gone.jsonl"\n')
    assert loaded("eval.data=").config.eval.data is None


def test_a_config_round_trips_through_json_and_compares(loaded: Load) -> None:
    one = loaded("reward.use=my.module:score", "recorder.use=[]", check_files=False)
    stored = json.loads(json.dumps(one.to_json()))
    assert type(one.config).from_json(stored["settings"]) == one.config
    assert stored["origins"]["reward.use"] == "command line"
    assert loaded("run.seed=1").config != loaded().config
    assert loaded().config == loaded("run.seed=0").config
    assert hash(loaded().config) == hash(loaded().config)


def test_every_setting_has_an_origin(loaded: Load) -> None:
    def paths(values: dict, prefix: str = "") -> set[str]:
        found = set()
        for key, value in values.items():
            found |= paths(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key}
        return found

    one = loaded()
    assert paths(one.config.to_json()) == set(one.origins)


def test_a_config_cannot_be_changed(loaded: Load) -> None:
    with pytest.raises(ValueError, match="frozen"):
        loaded().config.trainer.optimizer.lr = 1.0  # type: ignore[misc]


UNREADABLE: dict[str, tuple[bytes, str]] = {
    "broken": (b'model = "m"\nsteps = = 3\n', r"broken.toml: invalid value \(at line 2, column 9\); correct the file"),
    "twice": (b"steps = 1\nsteps = 2\n", r"at line 2"),
    "latin": (b'model = "m"\nrun.dir = "caf\xe9"\n', r"latin.toml: line 2 is not UTF-8 text \(byte 0xe9\)"),
    "deep": (b"x = " + b"[" * 5000, r"deep.toml"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_file_that_cannot_be_read_is_named_with_the_line(folder: Path, name: str) -> None:
    raw, message = UNREADABLE[name]
    (folder / f"{name}.toml").write_bytes(raw)
    with pytest.raises(ConfigError, match=message):
        load([Path(f"{name}.toml")], [])


def test_all_files_that_cannot_be_read_are_named_at_once(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load([Path("gone.toml"), Path("model")], ["=5", "a b=3"])
    lines = str(caught.value).splitlines()
    assert "gone.toml: there is no such file" in lines[0]
    assert "model: Is a directory" in lines[1]
    assert "cannot read '=5' as a setting" in lines[2] and "'a b=3'" in lines[3]


def test_yaml_is_not_read(folder: Path) -> None:
    (folder / "run.yaml").write_text("steps: 3\n")
    with pytest.raises(ConfigError, match="settings are TOML, not YAML"):
        load([Path("run.yaml")], [])


def test_a_byte_order_mark_and_windows_line_ends_are_read(folder: Path) -> None:
    text = (folder / "run.toml").read_text().replace("\n", "\r\n")
    (folder / "windows.toml").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert load([Path("windows.toml")], []).config.steps == 10


@pytest.mark.parametrize("word", ["rollout.sampling.stop=[]", "trainer.optimizer.betas=[0.9, 0.999]"])
def test_lists_on_the_command_line_are_toml(loaded: Load, word: str) -> None:
    assert loaded(word).origins[word.partition("=")[0]] == "command line"


def test_without_looking_at_files_only_values_are_judged(problems: Callable[..., list[str]]) -> None:
    words = ("model=gone", "data.prompts=gone", "reward.use=gone.py:f", "rollout.replay=gone")
    assert problems(*words, check_files=False) == []
    assert len(problems(*words)) == 4
