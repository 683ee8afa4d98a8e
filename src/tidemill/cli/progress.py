"""A bar on standard error, where that is a terminal, for work that takes long."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from tidemill.contracts.events import Event
from tidemill.contracts.events import Progress as Progressed

__all__ = ["bar", "shown"]


@contextmanager
def bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """The function takes bytes that are done more. `total` is in bytes, 0 for not known."""
    with _bar(what, total) as advance:
        yield lambda count: advance(count, total)


@contextmanager
def shown(what: str) -> Iterator[Callable[[Event], None]]:
    """An Emit that shows what it hears of progress, and nothing else."""
    with _bar(what, 0) as advance:
        before = 0

        def emit(event: Event) -> None:
            nonlocal before
            if isinstance(event, Progressed):
                advance(event.done - before, event.total)
                before = event.done

        yield emit


@contextmanager
def _bar(what: str, total: int) -> Iterator[Callable[[int, int], None]]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total or None)
        yield lambda count, whole: progress.update(task, advance=count, total=whole or None)
