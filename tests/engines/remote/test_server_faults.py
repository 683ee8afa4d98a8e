"""tidemill.engines.remote.dispatch and tidemill.engines.remote.replica: servers that fail, and what is served then.

The undisturbed answers are those of an engine in this process, since draws depend on seed and key alone.
"""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engines.remote.conftest import FIRST, Servers

from tidemill.contracts.engine import Completion, Request, Sampling
from tidemill.contracts.events import Metrics, Notice, Progress
from tidemill.contracts.footprint import Part
from tidemill.contracts.state import PolicyVersion
from tidemill.errors import ConfigError, EngineError, Interrupted, ResidencyError, WeightSyncError
from tidemill.testing.suites.engine_case import close_asleep, hand_over, open_awake, requests_of, weights_of

PROMPTS = [[4 + row % 5] * (3 + row % 5) for row in range(24)]
REQUESTS = requests_of(PROMPTS)
SAMPLING = Sampling(max_new_tokens=6, seed=2)
DIALECTS = ({}, {"modern": False}, {"dialect": "sglang"})


def undisturbed(make: Servers, folder: Path, **serve: Any) -> list[Completion]:
    return make.ready(folder, 1, serve=serve).generate(REQUESTS, SAMPLING)


def reissued(make: Servers) -> float:
    return sum(e.values["engine/reissued"] for e in make.events if isinstance(e, Metrics))


def notices(make: Servers) -> str:
    return "\n".join(event.text for event in make.events if isinstance(event, Notice))


@pytest.mark.parametrize("serve", DIALECTS)
def test_a_server_that_dies_leaves_its_requests_to_the_others(make: Servers, folder: Path, serve: Any) -> None:
    expected = undisturbed(make, folder, **serve)
    engine = make.ready(folder, 2, serve=serve)
    make.servers[1].arm("die", after=3, times=1)
    assert engine.generate(REQUESTS, SAMPLING) == expected
    assert reissued(make) >= 1
    assert "engine-1 at http" in notices(make) and "its requests go to others" in notices(make)
    # Before the next: it is still gone.
    assert engine.generate(REQUESTS, SAMPLING) == expected


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("error", "internal error"),
        ("truncate", "broke off"),
        ("ids", "tokens and"),
        ("logprobs", "log-probs"),
        ("outside", "token id 1000000"),
        ("late", "behind the ending id"),
        ("shape", "in a form that"),
        ("nan", "log-prob of nan"),
        ("abort", "aborted"),
    ],
)
@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_an_answer_that_cannot_be_one_is_asked_again_and_its_server_renewed(
    make: Servers, folder: Path, kind: str, words: str, dialect: str
) -> None:
    expected = undisturbed(make, folder, dialect=dialect)
    engine = make.ready(folder, 2, serve={"dialect": dialect})
    make.servers[0].arm(kind, after=2, times=1)
    # Long enough for the one that failed to come back.
    make.servers[1].arm("slow", value=0.1)
    assert engine.generate(REQUESTS, SAMPLING) == expected
    # SGLang names ids beside log-probs: one too many or too few is another fault there.
    assert ("in a form that" if dialect == "sglang" and kind in {"ids", "logprobs"} else words) in notices(make)
    assert "engine-0 at http" in notices(make)
    assert "is back, with the present weights" in notices(make)
    assert reissued(make) >= 1


@pytest.mark.parametrize("serve", DIALECTS)
def test_a_server_that_was_started_again_serves_nothing_before_it_has_the_present_weights(
    make: Servers, folder: Path, serve: Any
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    weights = {name: weight * 1.5 for name, weight in weights_of(model).items()}
    alone = make.ready(folder, 1, serve=serve)
    hand_over(alone, weights, PolicyVersion(1, 1))
    expected = alone.generate(REQUESTS, SAMPLING)
    engine = make.ready(folder, 2, serve=serve)
    hand_over(engine, weights, PolicyVersion(1, 1))
    first, second = make.servers
    # Between two rollouts, unseen by anybody.
    first.die()
    first.rise()
    assert engine.generate(REQUESTS, SAMPLING) == expected
    # In the middle of one.
    second.arm("restart", after=2, times=1)
    first.arm("slow", value=0.1)
    assert engine.generate(REQUESTS, SAMPLING) == expected
    assert "is back, with the present weights" in notices(make)
    assert {answer.version for answer in engine.generate(REQUESTS, SAMPLING)} == {PolicyVersion(1, 1)}


def test_a_version_that_an_answer_names_must_be_the_present_one(make: Servers, folder: Path) -> None:
    expected = undisturbed(make, folder, dialect="sglang")
    engine = make.ready(folder, 2, serve={"dialect": "sglang"})
    make.servers[0].arm("version", times=1, value="default")
    assert engine.generate(REQUESTS, SAMPLING) == expected
    assert "'version default'" in notices(make)


def test_a_server_that_hangs_is_out_when_its_answer_is_late(make: Servers, folder: Path) -> None:
    expected = undisturbed(make, folder)
    engine = make.ready(folder, 2, request_deadline=1.0)
    make.servers[0].arm("hang", times=4, value=30)
    began = time.monotonic()
    assert engine.generate(REQUESTS, SAMPLING) == expected
    assert time.monotonic() - began < 15
    assert "did not answer POST /v1/completions within 1" in notices(make)
    assert "request 0:" in notices(make)


def test_a_slow_server_is_left_alone_and_takes_fewer_requests(make: Servers, folder: Path) -> None:
    expected = undisturbed(make, folder)
    engine = make.ready(folder, 2)
    make.servers[0].arm("slow", value=0.3)
    asked = [server.calls["/v1/completions"] for server in make.servers]
    assert engine.generate(REQUESTS, SAMPLING) == expected
    slow, quick = (server.calls["/v1/completions"] - n for server, n in zip(make.servers, asked, strict=True))
    assert slow < quick
    assert slow + quick == len(REQUESTS)
    assert not notices(make)


def test_samples_of_one_prompt_go_to_one_server(make: Servers, folder: Path) -> None:
    engine = make.ready(folder, 2, max_batch=32)
    requests = [Request(key=f"{row}#{s}", token_ids=(5 + row, 9, 9)) for row in range(8) for s in range(4)]
    # Each begins with all its own: nobody is idle before everything is asked.
    for server in make.servers:
        server.prompts.clear()
        server.arm("slow", value=0.2)
    engine.generate(requests, SAMPLING)
    first, second = (set(server.prompts) for server in make.servers)
    # Bounded loads may cut one prompt in two.
    assert len(first & second) <= 1
    assert max(len(server.prompts) for server in make.servers) <= 20


def test_when_nobody_is_left_the_message_names_every_server_and_why(make: Servers, folder: Path) -> None:
    engine = make.ready(folder, 2, recovery=0.5)
    for server in make.servers:
        server.arm("die", after=1, times=1)
    with pytest.raises(EngineError, match=r"no server .* well for .*engine-0 at http.*engine-1 at http") as told:
        engine.generate(REQUESTS, SAMPLING)
    assert "cannot be reached" in str(told.value)
    assert engine.version == FIRST


def test_a_lone_server_that_comes_back_ends_the_rollout_as_if_nothing_was(make: Servers, folder: Path) -> None:
    expected = undisturbed(make, folder)
    engine = make.ready(folder, 1)
    (server,) = make.servers
    server.arm("die", after=5, times=1)
    threading.Timer(1.0, server.rise).start()
    assert engine.generate(REQUESTS, SAMPLING) == expected


def test_a_request_that_no_server_survives_ends_the_rollout_by_its_name(make: Servers, folder: Path) -> None:
    engine = make.ready(folder, 2)
    for server in make.servers:
        server.arm("error")
    with pytest.raises(EngineError, match=r"cannot answer request 0:\d+#0: 4 tries failed.*internal error|no server"):
        engine.generate(REQUESTS, SAMPLING)


def test_a_request_that_a_server_refuses_is_nobodys_fault_but_its_own(make: Servers, folder: Path) -> None:
    engine = make.ready(folder, 2)
    for server in make.servers:
        server.arm("error", value=400)
    with pytest.raises(EngineError, match=r"cannot answer request 0:\d+#0: engine-\d at .*400"):
        engine.generate(REQUESTS, SAMPLING)
    for server in make.servers:
        server.faults.clear()
    assert len(engine.generate(REQUESTS, SAMPLING)) == len(REQUESTS)


def test_progress_reaches_the_end_and_never_goes_back_unless_answers_were_lost(make: Servers, folder: Path) -> None:
    engine = make.ready(folder, 2)
    make.events.clear()
    engine.generate(REQUESTS, SAMPLING)
    done = [event.done for event in make.events if isinstance(event, Progress)]
    assert done == sorted(done) and done[-1] == len(REQUESTS)


def test_an_interruption_ends_what_servers_are_asked(make: Servers, folder: Path) -> None:
    engine = make.ready(folder, 2)
    for server in make.servers:
        server.arm("slow", value=5.0)

    def stop(event: object) -> None:
        raise Interrupted("stop")

    engine._emit = stop
    began = time.monotonic()
    with pytest.raises(Interrupted):
        engine.generate(REQUESTS, SAMPLING)
    assert time.monotonic() - began < 3
    engine._emit = make.events.append
    for server in make.servers:
        server.faults.clear()
    assert len(engine.generate(REQUESTS, SAMPLING)) == len(REQUESTS)


# Handing weights over


@pytest.mark.parametrize("serve", DIALECTS)
def test_a_server_that_keeps_old_weights_is_found_out_before_it_serves(make: Servers, folder: Path, serve: Any) -> None:
    engine = make.ready(folder, 2, serve=serve)
    model = engine._staged.views()
    changed = {name: torch.randn_like(weight) * 0.2 for name, weight in model.items()}
    make.servers[1].arm("keep_old_weights", times=1)
    with pytest.raises(WeightSyncError, match=r"engine-1 .* does not answer from version 1 \(attempt 1\).*nats"):
        hand_over(engine, changed, PolicyVersion(1, 1))
    assert engine.version is None
    with pytest.raises(WeightSyncError, match="unknown"):
        engine.generate(REQUESTS, SAMPLING)
    hand_over(engine, changed, PolicyVersion(1, 1))
    assert len(engine.generate(REQUESTS, SAMPLING)) == len(REQUESTS)


def test_a_server_that_keeps_its_prefix_cache_is_found_out(make: Servers, folder: Path) -> None:
    engine = make.ready(folder, 1)
    weights = {name: weight.clone() for name, weight in engine._staged.views().items()}
    make.servers[0].arm("keep_cache", times=1)
    with pytest.raises(WeightSyncError, match="does not answer from version"):
        hand_over(engine, weights, PolicyVersion(1, 1))


def test_weights_that_wake_without_content_are_found_out_when_their_load_is_skipped(
    make: Servers, folder: Path
) -> None:
    engine = make.ready(folder, 1)
    weights = {name: weight.clone() for name, weight in engine._staged.views().items()}
    close_asleep(engine)
    open_awake(engine, Part.WEIGHTS)
    make.servers[0].arm("keep_old_weights", times=1)
    hand_over(engine, weights, PolicyVersion(1, 1))
    open_awake(engine)
    with pytest.raises(WeightSyncError, match="does not answer from version"):
        engine.generate(REQUESTS, SAMPLING)
    assert engine.version is None


@pytest.mark.parametrize("kind", ["load_fails", "die_in_load"])
def test_a_server_that_fails_to_load_is_left_out_and_gets_the_weights_later(
    make: Servers, folder: Path, kind: str
) -> None:
    engine = make.ready(folder, 2)
    weights = {name: weight * 1.5 for name, weight in engine._staged.views().items()}
    make.servers[0].arm(kind, times=1)
    hand_over(engine, weights, PolicyVersion(1, 1))
    assert engine.version == PolicyVersion(1, 1)
    if kind == "die_in_load":
        make.servers[0].rise()
    make.servers[1].arm("slow", value=0.1)
    asked = make.servers[0].calls["/v1/completions"]
    answers = engine.generate(REQUESTS, SAMPLING)
    assert make.servers[0].calls["/v1/completions"] > asked
    alone = make.ready(folder, 1)
    hand_over(alone, weights, PolicyVersion(1, 1))
    assert alone.generate(REQUESTS, SAMPLING) == answers


def test_when_no_server_takes_the_weights_the_version_stays_unknown(make: Servers, folder: Path) -> None:
    engine = make.ready(folder, 2)
    for server in make.servers:
        server.arm("load_fails", times=1)
    with pytest.raises(WeightSyncError, match=r"no server .*engine-0 at .*out of memory.*engine-1"):
        engine.load_pretrained(PolicyVersion(1, 1))
    assert engine.version is None
    engine.load_pretrained(PolicyVersion(1, 1))
    assert engine.version == PolicyVersion(1, 1)


def test_an_sglang_server_that_refuses_weights_says_why(make: Servers, folder: Path) -> None:
    engine = make.ready(folder, 1, serve={"dialect": "sglang"})
    make.servers[0].arm("load_fails", times=1)
    with pytest.raises(WeightSyncError, match="cannot hand the weights to engine-0 .*out of memory while loading"):
        engine.load_pretrained(PolicyVersion(1, 1))


def test_syncs_without_a_probe_cost_no_forward_when_that_is_asked_for(make: Servers, folder: Path) -> None:
    engine = make.ready(folder, 1, probe=2)
    (server,) = make.servers
    counts = []
    for step in range(1, 4):
        before = server.calls["/v1/completions"]
        engine.load_pretrained(PolicyVersion(1, step))
        counts.append(server.calls["/v1/completions"] - before)
    # The check of log-probs is one token; the comparison three answers more, at every other sync.
    assert counts == [1, 4, 1]


# Memory


def test_a_wake_that_fails_puts_all_back_and_forgets_the_version(make: Servers, folder: Path) -> None:
    engine = make(folder, 2)
    make.servers[1].arm("wake_fails", times=1)
    with pytest.raises(ResidencyError, match="cannot wake engine .*engine-1 at .*out of memory"):
        engine.wake_up(Part.ALL)
    assert engine.resident() == Part.NONE
    assert all(server.sleeping for server in make.servers)
    open_awake(engine)
    engine.load_pretrained(FIRST)
    assert len(engine.generate(REQUESTS, SAMPLING)) == len(REQUESTS)


@pytest.mark.parametrize("serve", DIALECTS)
def test_an_engine_awake_in_part_gives_that_part_back(make: Servers, folder: Path, serve: Any) -> None:
    engine = make.ready(folder, 2, serve=serve)
    for part in (Part.WEIGHTS, Part.KV_CACHE):
        close_asleep(engine)
        open_awake(engine, part)
        close_asleep(engine)
        assert all({"weights", "kv_cache"} <= server.sleeping for server in make.servers)
    open_awake(engine)
    assert not any(server.sleeping for server in make.servers)
    engine.load_pretrained(FIRST)
    assert len(engine.generate(REQUESTS, SAMPLING)) == len(REQUESTS)


def test_servers_on_gpus_of_their_own_take_no_bytes_here_and_never_sleep(make: Servers, folder: Path) -> None:
    engine = make.ready(folder, 1, cache_memory=0)
    assert engine.footprint(Part.ALL) == 0
    before = engine.generate(REQUESTS, SAMPLING)
    close_asleep(engine)
    open_awake(engine)
    assert engine.version == FIRST
    assert engine.generate(REQUESTS, SAMPLING) == before
    assert make.servers[0].calls["/sleep"] == 0


# Who is there at the start


def test_a_server_that_is_not_there_is_named_with_all_others_that_are_not(make: Servers, folder: Path) -> None:
    with pytest.raises(EngineError, match=r"engine-0 at http://127.0.0.1:9 cannot be reached.*engine-1 at http"):
        make(folder, 1, urls=("http://127.0.0.1:9", "http://127.0.0.1:11"))


def test_another_model_behind_the_address_is_refused(make: Servers, folder: Path, tmp_path: Path) -> None:
    from tidemill.testing.tiny import make_tiny_model

    with pytest.raises(ConfigError, match="it calls it stub, and engine.served_model is other"):
        make(folder, 1, served_model="other")
    other = make_tiny_model(tmp_path / "bytes", hidden=64, heads=2, kv_heads=1, alphabet="bytes")
    make(other, 1)
    with pytest.raises(ConfigError, match="its tokenizer makes"):
        make(folder, 1, urls=(make.servers[0].url,))
    llama = make_tiny_model(tmp_path / "llama", family="llama", hidden=64, heads=2, kv_heads=1)
    make(llama, 1, serve={"dialect": "sglang"})
    llamas = make.servers[0].url
    with pytest.raises(ConfigError, match="it is a llama, and the model folder holds a qwen3"):
        make(folder, 1, urls=(llamas,), server="sglang")
    with pytest.raises(EngineError, match="refuses GET /v1/models"):
        make(folder, 1, urls=(llamas,))


@pytest.mark.parametrize("serve", DIALECTS)
def test_log_probs_of_another_distribution_are_found_out(make: Servers, folder: Path, serve: Any) -> None:
    engine = make(folder, 1, serve=serve, probe=0)
    make.servers[0].temperature = False
    open_awake(engine)
    with pytest.raises(WeightSyncError, match="does not report log-probs of the distribution that it samples from"):
        engine.load_pretrained(FIRST)


def test_a_token_comes_from_the_environment_and_is_in_no_message(
    make: Servers, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_TOKEN", "very-secret")
    engine = make.ready(folder, 1, serve={"token": "very-secret"}, token_env="ENGINE_TOKEN")
    assert engine.generate(REQUESTS, SAMPLING)
    assert "very-secret" not in repr(vars(engine._replicas[0]))
    monkeypatch.setenv("ENGINE_TOKEN", "other-secret")
    with pytest.raises(EngineError, match="wants a token") as told:
        make(folder, 1, serve={"token": "very-secret"}, token_env="ENGINE_TOKEN")
    assert "secret" not in str(told.value)
    monkeypatch.delenv("ENGINE_TOKEN")
    with pytest.raises(ConfigError, match="ENGINE_TOKEN, which is not set"):
        make(folder, 1, token_env="ENGINE_TOKEN")
