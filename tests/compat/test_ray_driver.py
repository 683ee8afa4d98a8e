"""What a driver uses of Ray's inner names (`tidemill.compat.ray_driver`)."""

from types import SimpleNamespace

import pytest
from ray import _raylet
from ray._private import ray_constants, services
from ray._private import worker as ray_worker

from tidemill.cluster.ray.connection import connect
from tidemill.compat.ray_driver import on_loopback, print_through, read_authentication_again, refuse_other_ray
from tidemill.errors import PluginError


def test_this_ray_has_every_name_and_goes_by_it() -> None:
    refuse_other_ray()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (ray_worker, "print_to_stdstream"),
        (ray_constants, "ENABLE_RAY_CLUSTER"),
        (_raylet, "AuthenticationTokenLoader"),
        (_raylet, "Config"),
    ],
)
def test_a_ray_without_a_name_is_refused_with_the_install_command_before_it_is_started(
    module: object, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(module, name)
    with pytest.raises(PluginError, match=rf"cannot use Ray \S+: it has no ray\.\S*{name} .*pip install 'ray==2.60"):
        connect("127.0.0.1:1", private=False, say=lambda text: None)


def test_a_ray_whose_code_goes_by_another_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_worker, "listen_error_messages", lambda worker: None)
    with pytest.raises(PluginError, match="has no ray._private.worker.print_to_stdstream"):
        refuse_other_ray()


def test_what_ray_prints_goes_where_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_worker, "print_to_stdstream", ray_worker.print_to_stdstream)
    seen: list[object] = []
    print_through(lambda data, **_: seen.append(data))
    ray_worker.print_to_stdstream({"lines": ["one"]}, ignore_prefix=True)
    assert seen == [{"lines": ["one"]}]


def test_127_0_0_1_is_an_address_of_this_host_inside_the_block_and_only_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "node_ip_address_from_perspective", lambda address: "192.0.2.1")
    monkeypatch.setattr(ray_worker, "_global_node", None)
    with pytest.raises(KeyError), on_loopback():
        assert services.get_node_ip_address() == "127.0.0.1"
        raise KeyError
    assert services.get_node_ip_address() == "192.0.2.1"


def test_how_to_authenticate_is_read_from_the_environment_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    loader = SimpleNamespace(reset_cache=lambda: done.append("token"))
    monkeypatch.setattr(_raylet, "Config", SimpleNamespace(initialize=lambda text: done.append("mode")))
    monkeypatch.setattr(_raylet, "AuthenticationTokenLoader", SimpleNamespace(instance=lambda: loader))
    read_authentication_again()
    assert done == ["mode", "token"]
