"""The parts of the run page that need no script: facts, checkpoints, notices, settings. All text is escaped."""

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from tidemill.recorders.page.source import number_of
from tidemill.recorders.sentences import number
from tidemill.recorders.text import cut, one_line, visible
from tidemill.units import format_bytes, format_seconds

__all__ = ["checkpoint_rows", "fact", "moment", "notice_items", "setting_rows", "text"]

_MOST = 200


def text(value: Any, limit: int = 2000) -> str:
    """Any value as HTML text: cut, control characters visible, markup escaped."""
    return html.escape(visible(cut(str(value), limit)))


def fact(name: str, value: str, note: str = "") -> str:
    """One figure of the header."""
    extra = f'<span class="note">{text(note)}</span>' if note else ""
    return f'<div class="fact"><dt>{text(name)}</dt><dd>{text(value)}{extra}</dd></div>'


def moment(seconds: Any) -> str:
    """Unix time as `2026-11-30 11:58:34 UTC`, empty when it is none."""
    value = number_of(seconds)
    if value is None or not 0 < value < 2**35:
        return ""
    return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def checkpoint_rows(events: Iterable[Mapping[str, Any]]) -> str:
    """A row a checkpoint, newest first: its last status, bytes, and seconds to staged and to durable."""
    known: dict[int, dict[str, Any]] = {}
    for event in events:
        step = event.get("checkpoint_step")
        if isinstance(step, int):
            status = str(event.get("status"))
            known.setdefault(step, {})[status] = event
            known[step]["last"] = event
    rows = [_checkpoint_row(step, known[step]) for step in sorted(known, reverse=True)]
    more = f'<tr><td colspan="6">and {len(rows) - _MOST} older ones</td></tr>' if len(rows) > _MOST else ""
    return "".join(rows[:_MOST]) + more


def _checkpoint_row(step: int, events: Mapping[str, Mapping[str, Any]]) -> str:
    last = events["last"]
    durable = events.get("durable", {})
    staged = events.get("staged", {})
    size = number_of(durable.get("bytes")) or number_of(staged.get("bytes"))
    cells = (
        text(step),
        f'<span class="status {text(last.get("status"))}">{text(last.get("status"))}</span>',
        text(format_bytes(size)) if size else "",
        _seconds(staged),
        _seconds(durable),
        text(" ".join(filter(None, (moment(last.get("time")), str(last.get("reason", "")))))),
    )
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _seconds(event: Mapping[str, Any]) -> str:
    value = number_of(event.get("seconds"))
    return text(format_seconds(value)) if value else ""


def notice_items(events: Sequence[Mapping[str, Any]]) -> str:
    """Notices in order, warnings marked; of very many, the first and the last hundred."""
    half = _MOST // 2
    shown = list(events) if len(events) <= _MOST else [*events[:half], *events[-half:]]
    items = [
        f'<li class="{"warning" if event.get("level") == "warning" else "info"}">'
        f'<span class="when">after step {text(event.get("step"))} · {text(moment(event.get("time")))}</span>'
        f"<p>{text(event.get('text', ''))}</p></li>"
        for event in shown
    ]
    if len(events) > _MOST:
        items.insert(half, f'<li class="info"><p>{len(events) - _MOST} more in events.jsonl</p></li>')
    return "".join(items)


def setting_rows(settings: Any) -> str:
    """A row a setting: path, value as JSON, origin; what is not a default is marked."""
    if not isinstance(settings, Mapping):
        return ""
    rows = []
    for path, entry in settings.items():
        known = isinstance(entry, Mapping) and "value" in entry
        value, origin = (entry["value"], str(entry.get("origin", ""))) if known else (entry, "")
        shown = number(value) if isinstance(value, float) and 0 < abs(value) < 1e-3 else json.dumps(value, default=str)
        mark = "" if origin in ("", "default") else ' class="set"'
        rows.append(
            f"<tr{mark}><td>{text(one_line(str(path)))}</td><td><code>{text(shown, 400)}</code></td>"
            f"<td>{text(origin)}</td></tr>"
        )
    return "".join(rows)
