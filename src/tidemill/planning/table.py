"""A plan as people read it: bars of moments, and under each what it is made of."""

from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tidemill.planning.moments import Moment
from tidemill.planning.plan import Plan
from tidemill.units import format_bytes

__all__ = ["show"]

_BAR = 40
_WIDTH = 110
_SMALL = 0.01  # of a moment: smaller parts are added up


def show(plan: Plan, stream: TextIO) -> None:
    """Write `plan` to `stream` and flush it, with colours where it is a terminal.

    At once: a console that writes by itself ends the process, in its own way, when nobody reads.
    """
    console = Console(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=False)
    if not console.is_terminal:
        console = Console(file=stream, highlight=False, markup=False, emoji=False, width=_WIDTH)
    with console.capture() as written:
        for line in _head(plan):
            console.print(Text(line))
        for seat in plan.seats:
            there = plan.machine.device_bytes
            each = "the GPU" if seat.count == 1 else f"each of {seat.count} GPUs"
            _show_moments(console, f"{each} ({seat.name})", seat.moments, there)
        _show_moments(console, "host memory, of all processes", plan.host, plan.machine.host_bytes)
        console.print()
        console.print(Text(plan.disk.sentence()))
    stream.write(written.get())
    stream.flush()


def _head(plan: Plan) -> Iterator[str]:
    model, choice = plan.model, plan.choice
    yield (
        f"{model.folder.name}: {model.decoder.architecture or 'unknown type'}, "
        f"{model.parameters / 1e6:,.1f}M parameters"
        f"{', tied embeddings' if model.decoder.tied else ''} (from {model.source})"
    )
    yield choice.sentence
    if plan.setup.device == "cuda" and plan.setup.shared and plan.setup.replicas:
        yield (
            f"offload auto keeps both awake on a GPU of {format_bytes(choice.both_from)} or more, and refuses one of "
            f"less than {format_bytes(choice.least)}"
        )


def _show_moments(console: Console, title: str, moments: Sequence[Moment], there: int | None) -> None:
    largest = max(moments, key=lambda moment: moment.bytes)
    scale = max(largest.bytes, there or 0)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for moment in moments:
        style = "red" if there is not None and moment.bytes > there else "bold" if moment is largest else ""
        note = " <- the largest" if moment is largest else ""
        bar = Text(_bar(moment.bytes / scale), style=style or "cyan") + Text(note, style=style)
        table.add_row(Text(moment.name, style=style), Text(format_bytes(moment.bytes), style=style), bar)
        table.add_row("", "", Text(_made_of(moment), style="dim"))
    console.print()
    console.print(Text(f"{title}: {'unknown' if there is None else format_bytes(there)} there", style="bold"))
    console.print(table)


def _bar(share: float) -> str:
    full = round(share * _BAR)
    return "█" * full + "░" * (_BAR - full)


def _made_of(moment: Moment) -> str:
    """The parts, largest first."""
    ordered = sorted(moment.parts.items(), key=lambda part: -part[1])
    shown = [(name, count) for name, count in ordered if count >= _SMALL * moment.bytes]
    rest = moment.bytes - sum(count for _, count in shown)
    words = [f"{name.replace('_', ' ')} {format_bytes(count)}" for name, count in shown]
    return ", ".join([*words, *([f"other {format_bytes(rest)}"] if rest else [])])
