"""The run page: one HTML file about one run, made from the run folder and nothing else.

It holds everything it needs, asks no network for anything (its content policy forbids it), and can be made at any
moment: of an empty folder, of a run under way, after a crash. Every text in it is escaped; its script sets text only.
"""

import base64
import hashlib
import html
import json
import os
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from tidemill.recorders.page.apart import apart_rows
from tidemill.recorders.page.curves import curves, result_name
from tidemill.recorders.page.moments import moments
from tidemill.recorders.page.picked import picked
from tidemill.recorders.page.planned import plan_caption, plan_rows
from tidemill.recorders.page.source import Numbers, number_of, read_json, read_numbers, select_lines
from tidemill.recorders.page.tables import checkpoint_rows, fact, moment, notice_items, setting_rows, text
from tidemill.recorders.sentences import number
from tidemill.units import format_bytes, format_seconds

__all__ = ["render", "write_report"]

_SAVED = ("durable", "restored")
_SCRIPTS = ("draw.js", "curves.js", "stack.js", "tide.js", "samples.js", "main.js")


def write_report(run: Path) -> Path:
    """Write `report.html` into the run folder, all or nothing; returns its path."""
    target = run / "report.html"
    new = run / f"report.html.{os.getpid()}.new"
    try:
        new.write_text(render(run), encoding="utf-8")
        new.replace(target)
    finally:
        new.unlink(missing_ok=True)
    return target


def render(run: Path) -> str:
    """The page as a string: a pure function of the files in `run`."""
    manifest, summary = read_json(run / "manifest.json"), read_json(run / "summary.json")
    plan = read_json(run / "plan.json")
    numbers = read_numbers(run)
    events = list(select_lines(run / "events.jsonl", {"checkpoint": None, "notice": None}))
    saves = [event for event in events if event["kind"] == "checkpoint"]
    notices = [event for event in events if event["kind"] == "notice"]
    warm_up = int(number_of(_setting(manifest, "warm_up.steps")) or 0)
    data = {
        "steps": numbers.steps,
        "warmUp": warm_up,
        "curves": curves(numbers, warm_up),
        **moments(run, numbers.steps),
        "samples": picked(run),
    }
    style, script = _file("page.css"), "\n".join(_file(name) for name in _SCRIPTS)
    return Template(_file("page.html")).substitute(
        title=text(run.resolve().name),
        policy=_policy(style, script),
        style=style,
        script=script,
        data=_embedded(data),
        state=_state(numbers, summary, manifest),
        subtitle=_subtitle(manifest),
        facts=_facts(numbers, summary, saves),
        plan=plan_rows(plan, numbers.timings),
        planned=plan_caption(plan),
        checkpoints=checkpoint_rows(saves),
        apart=apart_rows(run),
        notices=notice_items(notices),
        warnings=_count(sum(event.get("level") == "warning" for event in notices), "warning"),
        settings=setting_rows(manifest.get("settings")),
        versions=text("  ".join(f"{name} {version}" for name, version in _table(manifest, "versions").items())),
        command=text(_words(manifest.get("command"))),
    )


def _file(name: str) -> str:
    return resources.files("tidemill.recorders.page").joinpath(name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    def source(content: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"

    policy = (
        f"default-src 'none'; style-src {source(style)}; script-src {source(script)}; img-src data:; base-uri 'none'"
    )
    return html.escape(policy)


def _embedded(data: Any) -> str:
    """JSON that may stand in a script element: no `<`, so nothing in it can end the element or open a comment."""
    line = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return line.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _table(manifest: dict[str, Any], name: str) -> dict[str, Any]:
    value = manifest.get(name)
    return value if isinstance(value, dict) else {}


def _setting(manifest: dict[str, Any], path: str) -> Any:
    entry = _table(manifest, "settings").get(path)
    return entry.get("value") if isinstance(entry, dict) else entry


def _state(numbers: Numbers, summary: dict[str, Any], manifest: dict[str, Any]) -> str:
    if summary.get("finished", bool(summary)):
        return '<span class="state done">finished</span>'
    if summary:
        return '<span class="state stopped">stopped</span>'
    if numbers.steps:
        return '<span class="state open">under way, or cut short</span>'
    return f'<span class="state open">{"started" if manifest else "nothing recorded yet"}</span>'


def _subtitle(manifest: dict[str, Any]) -> str:
    words = [str(_setting(manifest, "model") or ""), str(manifest.get("device") or ""), moment(manifest.get("started"))]
    attempt = number_of(manifest.get("attempt"))
    if attempt and attempt > 1:
        words.append(f"started {int(attempt)} times")
    return text(" · ".join(filter(None, words)))


def _facts(numbers: Numbers, summary: dict[str, Any], saves: list[dict[str, Any]]) -> str:
    result = result_name(numbers.evaluations)
    evals = [v for line in numbers.evaluations if (v := number_of(line.get(result))) is not None]
    rewards = [v for line in numbers.metrics if (v := number_of(line.get("reward/mean"))) is not None]
    few = max(1, min(25, len(rewards)))
    derived: dict[str, Any] = {
        "steps": numbers.steps,
        "seconds": sum(number_of(line.get("time/step")) or 0.0 for line in numbers.timings),
        "eval_first": evals[0] if evals else None,
        "eval_last": evals[-1] if evals else None,
        "reward_first": sum(rewards[:few]) / few if rewards else None,
        "reward_last": sum(rewards[-few:]) / few if rewards else None,
        "checkpoints": len({save.get("checkpoint_step") for save in saves if save.get("status") in _SAVED}),
    }
    known = derived | {name: value for name, value in summary.items() if number_of(value) is not None}
    value = {name: number_of(known.get(name)) for name in known}
    facts = [fact("steps", f"{int(value['steps'] or 0):,}")]
    if value["seconds"]:
        facts.append(fact("time", format_seconds(value["seconds"])))
    for name, first, last in (("evaluation", "eval_first", "eval_last"), ("reward", "reward_first", "reward_last")):
        begin, end = value[first], value[last]
        if begin is not None and end is not None:
            facts.append(fact(name, f"{number(begin)} → {number(end)}"))
    facts.append(fact("checkpoints", str(int(value["checkpoints"] or 0)), _stall(value.get("save_stall_seconds"))))
    sleeps, wakes, peak = value.get("sleeps"), value.get("wakes"), value.get("peak_host_bytes")
    if sleeps is not None and wakes is not None:
        facts.append(fact("trainer", f"{int(sleeps):,} sleeps, {int(wakes):,} wakes"))
    if peak:
        facts.append(fact("peak host memory", format_bytes(peak)))
    return "".join(facts)


def _words(command: Any) -> str:
    return " ".join(str(word) for word in command) if isinstance(command, list) else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number or 'no'} {noun}s"


def _stall(seconds: float | None) -> str:
    return f"saving held the loop up for {format_seconds(seconds)}" if seconds is not None else ""
