"""tidemill.config.engine_remote: engines that are servers."""

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from tidemill.config.engine import EngineSettings, TransformersEngineSettings
from tidemill.config.engine_remote import RemoteEngineSettings, SglangEngineSettings
from tidemill.config.fields import leaves
from tidemill.config.load import Loaded
from tidemill.errors import ConfigError

SHARED = {"weights_folder", "probe", "probe_tolerance", "seeded", "request_deadline", "sync_deadline", "health_every"}
SHARED |= {"recovery"}
FINE: dict[str, Any] = {"use": "remote", "urls": ["http://10.0.0.2:8000", "https://host/path"]}


def names(settings: type[EngineSettings]) -> set[str]:
    return {leaf.path[-1] for leaf in leaves(settings, {})}


def test_each_kind_of_server_has_settings_of_its_own() -> None:
    standard = names(TransformersEngineSettings)
    remote = {"urls", "server", "served_model", "token_env", "cache_memory"}
    started = {"command", "options", "log", "memory", "reproducible", "start_deadline", "restarts"}
    assert names(RemoteEngineSettings) - standard == SHARED | remote
    assert names(SglangEngineSettings) - standard == SHARED | started


def test_only_servers_that_run_already_are_elsewhere() -> None:
    assert RemoteEngineSettings.elsewhere
    assert not SglangEngineSettings.elsewhere and not TransformersEngineSettings.elsewhere


@pytest.mark.parametrize(
    "wrong",
    [
        {"urls": []},
        {"urls": ["10.0.0.2:8000"]},
        {"urls": ["http://me:secret@10.0.0.2"]},
        {"urls": ["http://a", "http://a"]},
        {"urls": "http://a"},
        {"server": "tgi"},
        {"token_env": "not a name"},
        {"probe": -1},
        {"probe_tolerance": 0.0},
        {"request_deadline": 0.0},
        {"cache_memory": -1},
        {"cache_memory": "2 GiB", "server": "sglang"},
    ],
)
def test_what_can_be_no_server_is_refused(wrong: dict[str, Any]) -> None:
    assert RemoteEngineSettings.model_validate(FINE).urls == ("http://10.0.0.2:8000", "https://host/path")
    with pytest.raises(ValidationError) as error:
        RemoteEngineSettings.model_validate({**FINE, **wrong})
    assert "secret" not in str(error.value.errors(include_input=False))


@pytest.mark.parametrize(
    "wrong", [{"memory": 1.0}, {"memory": 0.0}, {"restarts": -1}, {"command": [""]}, {"start_deadline": 0.0}]
)
def test_what_can_start_no_server_is_refused(wrong: dict[str, Any]) -> None:
    assert SglangEngineSettings.model_validate({"use": "sglang", "options": ["--tp", "2"]}).restarts == 3
    with pytest.raises(ValidationError):
        SglangEngineSettings.model_validate({"use": "sglang", **wrong})


def test_the_replicas_of_servers_are_their_addresses(loaded: Callable[..., Loaded]) -> None:
    words = ("engine.use=remote", 'engine.urls=["http://a:1", "http://b:1"]')
    assert loaded(*words).config.engine.replicas == "auto"
    with pytest.raises(ConfigError, match=r"engine.replicas = 2 .*one replica for each address"):
        loaded(*words, "engine.replicas=2", "cluster.use=ray")
