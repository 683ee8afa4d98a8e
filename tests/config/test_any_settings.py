"""Whatever is written anywhere, tidemill.config.load ends with a config that round-trips, or with named problems."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidemill.config.fields import leaves, sections
from tidemill.config.load import load
from tidemill.config.run import RunConfig
from tidemill.errors import ConfigError

PATHS = sorted(
    {".".join(leaf.path) for leaf in leaves(RunConfig, {"reward": {"use": "regex"}})}
    | {".".join(path) for path in sections(RunConfig, {})}
    | {"engine.memory", "nothing", "nothing.at.all", "steps.more", "recorder.wandb.use"}
)
VALUES = st.sampled_from(
    [
        "", " ", "0", "1", "-1", "2", "1.5", "1e-6", "nan", "-inf", "true", "false", "auto", "always", "x", '"5"', "'",
        "[]", "{}", "[1]", '["a", "b"]', "[[1]]", "{use = 1}", '{use = "x:y"}', "{a.b = 1}", "1979-05-27", "07:32:00",
        "9" * 400, "0x10", "x:y", "json:loads", "regex", "wandb", '["wandb"]', "12 GiB", "~", "~x", ".", "/", "..",
        "run.toml", "model", '"\\u0000"', "é\udce9", "a\nb = 2", "a = b", "#", "'''x'''", "\x7f",
        "x" * 300, "x/" * 3000,
    ]
)  # fmt: skip


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    words=st.lists(st.tuples(st.sampled_from(PATHS), VALUES), max_size=4),
    check_files=st.booleans(),
    training=st.booleans(),
)
def test_any_settings_are_a_config_or_named_problems(
    folder: Path, words: list[tuple[str, str]], check_files: bool, training: bool
) -> None:
    written = [f"{path}={value}" for path, value in words]
    try:
        loaded = load([Path("run.toml")], written, check_files=check_files, training=training)
    except ConfigError as error:
        assert str(error).strip()
        return
    stored = json.loads(json.dumps(loaded.to_json(), allow_nan=False))
    assert RunConfig.from_json(stored["settings"]) == loaded.config


@pytest.mark.parametrize("path", PATHS)
def test_every_setting_refuses_a_list_of_tables_by_name(folder: Path, path: str) -> None:
    with pytest.raises(ConfigError, match=path.partition(".")[0]):
        load([Path("run.toml")], [f"{path}=[{{x = 1}}]"])
