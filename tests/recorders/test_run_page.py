"""The page as a whole: `tidemill.recorders.report`."""

import base64
import hashlib
import html
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from tests.recorders.synthetic_run import write_run
from tests.recorders.written import WrittenAtOnce

from tidemill.contracts.events import CheckpointEvent, Evaluated, Metrics, Notice, RolloutDone
from tidemill.recorders.report import render, write_report
from tidemill.testing.suites.recorder import every_event, scored_group

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&<!-- \x1b[31m \u202e \ud83d \u2028"


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("page") / "sort-digits"
    write_run(run, steps=120, warm_up=20)
    return run


def test_a_run_becomes_a_page_with_every_section(whole: Path) -> None:
    page = render(whole)
    for name in ("learning", "tide", "seconds", "samples", "checkpoints", "notices", "settings"):
        assert f'<section id="{name}">' in page
    data = data_of(page)
    assert data["steps"] == 120 and data["warmUp"] == 20
    assert [curve["key"] for curve in data["curves"]][:3] == ["reward", "warm-up", "loss"]
    assert data["detail"]["owners"] == ["trainer", "engine"]
    assert len(data["detail"]["steps"]) == 120
    assert data["samples"]
    assert "finished" in page and "0.56 → 0.957" in page
    assert "trainer.optimizer.lr" in page and "command line" in page


def test_the_page_is_a_pure_function_of_the_folder(whole: Path) -> None:
    assert render(whole) == render(whole)


def test_the_page_asks_no_network_for_anything(whole: Path) -> None:
    page = render(whole)
    for word in ("http://www.w3.org/2000/svg",):
        page = page.replace(word, "")
    assert not re.search(r"https?://|//cdn|@import|url\((?!#host)|\bsrc=|fetch\(|XMLHttpRequest", page)


def test_its_content_policy_allows_its_own_style_and_script_and_nothing_else(whole: Path) -> None:
    page = render(whole)
    found = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert found
    policy = html.unescape(found[1])
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    for pattern in (r"<style>(.*?)</style>", r"<script>(.*)</script>\n</body>"):
        content = re.search(pattern, page, re.S)
        assert content
        digest = base64.b64encode(hashlib.sha256(content[1].encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy


def test_no_text_of_others_becomes_markup(tmp_path: Path) -> None:
    run = tmp_path / "a<b>&c"
    sink = WrittenAtOnce(run=run)
    sink.resume(0, {})
    for event in every_event(EVIL):
        sink.write(0, event)
    sink.write(0, Metrics(values={EVIL: 1.0}))
    sink.write(0, Evaluated(values={EVIL: 1.0}))
    sink.write(0, RolloutDone(kind="train", groups=[scored_group(EVIL, (0.0, 1.0))]))
    sink.write(0, CheckpointEvent(time=1.0, status=EVIL, step=1, path=EVIL, reason=EVIL))
    sink.write(0, Notice(text=EVIL, level="warning"))
    manifest = {
        "settings": {EVIL: {"value": EVIL, "origin": EVIL}, "model": {"value": EVIL, "origin": "x"}},
        "versions": {EVIL: EVIL},
        "command": [EVIL],
        "device": EVIL,
        "attempt": EVIL,
        "started": EVIL,
    }
    (run / "manifest.json").write_text(json.dumps(manifest))
    (run / "summary.json").write_text(json.dumps({"eval_first": EVIL, "steps": EVIL, "export": EVIL}))
    page = write_report(run).read_text(encoding="utf-8")
    assert page.count("<script") == 2 and page.count("</script>") == 2
    assert "<img" not in page and "<!-- " not in page and "a<b>" not in page
    assert not set(page) & {"\x1b", "\u202e", "\u2028"}
    assert data_of(page)["samples"][0]["prompt"].startswith("</script><script>")


def test_a_folder_with_nothing_in_it_has_a_page(tmp_path: Path) -> None:
    page = render(tmp_path)
    assert "nothing recorded yet" in page
    data = data_of(page)
    assert data["curves"] == [] and data["samples"] == [] and data["detail"]["steps"] == []


def test_a_run_under_way_has_a_page_at_any_byte(whole: Path, tmp_path: Path) -> None:
    for share in (0.0, 0.2, 0.501, 0.777, 0.999):
        run = tmp_path / str(share)
        run.mkdir()
        for name in ("metrics.jsonl", "events.jsonl", "samples.jsonl", "manifest.json"):
            content = (whole / name).read_bytes()
            (run / name).write_bytes(content[: int(len(content) * share)])
        data = data_of(render(run))
        assert data["steps"] <= 120


def test_files_that_are_not_ours_do_no_harm(tmp_path: Path) -> None:
    lines = [
        b'{"kind":"metrics","step":1,"reward/mean":"high","x":1e999,"y":true,"z":' + b"9" * 400 + b"}",
        b'{"kind":"phase","step":1,"name":3,"start":null}',
        b'{"kind":"phase","step":1,"name":"train","start":"now","seconds":1}',
        b'{"kind":"memory","step":1,"time":1,"device":[],"host":{}}',
        b'{"kind":"memory","step":1,"time":1,"device":{"a":"b"},"host":{"a":null},"budget":"x","what":[1]}',
        b'{"kind":"checkpoint","step":1}',
        b'{"kind":"notice","step":1,"text":{"a":1}}',
        b'{"kind":"train","step":1,"prompt":[1],"answer":null,"reward":"1"}',
        b'{"kind":"phase","step":1,"name":"train","start":5,"seconds":1}',
        b"\x00\xff",
    ]
    for name in ("metrics.jsonl", "events.jsonl", "samples.jsonl"):
        (tmp_path / name).write_bytes(b"\n".join(lines) + b"\n")
    (tmp_path / "manifest.json").write_text('{"settings": [1], "command": 3, "versions": 7}')
    (tmp_path / "summary.json").write_text("[]")
    render(tmp_path)


def test_a_long_run_still_makes_a_small_page_quickly(tmp_path: Path) -> None:
    write_run(tmp_path, steps=5000)
    began = time.process_time()
    page = render(tmp_path)
    assert time.process_time() - began < 4.0, "2 s alone on a machine; others work here too"
    assert len(page) < 3_000_000


def test_the_page_is_written_whole_or_not_at_all(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_report(whole)
    before = path.read_bytes()
    monkeypatch.setattr(Path, "replace", lambda self, target: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_report(whole)
    assert path.read_bytes() == before
    assert not list(whole.glob("*.new"))


def test_a_stopped_run_is_not_called_finished(whole: Path, tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "events.jsonl", "samples.jsonl", "manifest.json"):
        (tmp_path / name).write_bytes((whole / name).read_bytes())
    assert "under way, or cut short" in render(tmp_path)
    (tmp_path / "summary.json").write_text('{"finished": false, "steps": 7}')
    assert '<span class="state stopped">stopped</span>' in render(tmp_path)
