"""What was planned of memory, beside what the run then held. All text is escaped."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tidemill.recorders.page.source import number_of
from tidemill.recorders.page.tables import text
from tidemill.units import format_bytes

__all__ = ["plan_caption", "plan_rows"]


def plan_rows(plan: Mapping[str, Any], timings: Sequence[Mapping[str, Any]]) -> str:
    """A row for each tenant and kind of memory: bytes planned, the most that a step held, and the difference."""
    rows = []
    for tenant, where, planned in _planned(plan):
        held = max((_number(line, f"memory/{where}/{tenant}") for line in timings), default=0.0)
        cells = (tenant, where, format_bytes(planned), format_bytes(held) if held else "", _difference(planned, held))
        rows.append("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in cells) + "</tr>")
    return "".join(rows)


def plan_caption(plan: Mapping[str, Any]) -> str:
    """What was decided, and the fullest moment of each kind of device; empty without a plan."""
    words = [str(_table(plan, "offload").get("text") or "")]
    devices = plan.get("devices")
    for device in devices if isinstance(devices, list) else []:
        if isinstance(device, Mapping):
            words.append(_fullest(device, f"each GPU ({device.get('name')})"))
    words.append(_fullest(_table(plan, "host"), "host memory"))
    return text("; ".join(filter(None, words)))


def _planned(plan: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    for tenant, sizes in _table(plan, "tenants").items():
        for where in ("device", "host"):
            planned = number_of(sizes.get(where)) if isinstance(sizes, Mapping) else None
            if planned is not None:
                yield str(tenant), where, planned


def _fullest(place: Mapping[str, Any], name: str) -> str:
    moments = place.get("moments")
    for moment in moments if isinstance(moments, list) else []:
        size = number_of(moment.get("bytes")) if isinstance(moment, Mapping) else None
        if size is not None and moment.get("name") == place.get("largest"):
            return f"{name} is fullest at {place['largest']}, with {format_bytes(size)}"
    return ""


def _difference(planned: float, held: float) -> str:
    if not planned or not held:
        return ""
    return f"{(held / planned - 1) * 100:+.1f} %"


def _table(plan: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = plan.get(name)
    return value if isinstance(value, Mapping) else {}


def _number(line: Mapping[str, Any], name: str) -> float:
    return number_of(line.get(name)) or 0.0
