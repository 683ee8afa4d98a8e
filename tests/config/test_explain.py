"""tidemill.config.explain: effective settings, the reference page, and the JSON schema."""

import json
from collections.abc import Callable

import pytest

from tidemill.config.explain import effective, json_schema, main, reference
from tidemill.config.fields import leaves
from tidemill.config.load import Loaded
from tidemill.config.run import RunConfig

Load = Callable[..., Loaded]


def test_every_effective_setting_is_shown_with_its_origin(loaded: Load, folder) -> None:
    one = loaded("residency.budget=12 GiB", "residency.page=1000001")
    lines = {line.split(" = ")[0].strip(): line for line in effective(one).splitlines()}
    assert set(lines) == set(one.origins)
    assert lines["residency.budget"].split() == ["residency.budget", "=", '"12.0', 'GiB"', "command", "line"]
    assert "1000001" in lines["residency.page"]  # no rounding
    assert lines["model"].endswith("run.toml")
    assert lines["run.seed"].endswith("= 0")


def test_what_is_shown_can_be_given_again(loaded: Load) -> None:
    one = loaded('rollout.sampling.stop=["a b", "\\n"]', "residency.budget=12 GiB", "run.device=cpu")
    words = []
    for line in effective(one).splitlines():
        path, _, rest = line.partition(" = ")
        for origin in ("command line", "run.toml"):
            rest = rest.removesuffix(origin)
        words.append(f"{path.strip()}={rest.strip()}")
    assert loaded(*words).config == one.config


def test_the_reference_has_every_setting_once() -> None:
    page = reference()
    for leaf in leaves(RunConfig, {}):
        assert page.count(f"| `{'.'.join(leaf.path)}` |") == 1, leaf.path
    assert "| `reward.pattern` |" in page
    assert "| `steps` | integer > 0 | none; for example `300` |" in page
    assert '`"async"` \\| `"sync"`' in page


def test_the_schema_carries_the_help_and_the_built_in_plug_ins() -> None:
    schema = json_schema()
    assert schema["properties"]["steps"]["exclusiveMinimum"] == 0
    assert "supervised ones included" in schema["properties"]["steps"]["description"]
    assert len(schema["properties"]["reward"]["anyOf"]) == 3
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["OptimizerSettings"]["properties"]["lr"]["minimum"] == 0


def test_the_module_writes_page_or_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out == reference()
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema()
