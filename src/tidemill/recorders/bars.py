"""Progress bars and lines on a terminal, and only the lines where there is none."""

from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

__all__ = ["Bars", "NoBars"]


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raises what was raised: rich itself would end the process, and the run with it."""
        raise  # noqa: PLE0704


class Bars:
    """A bar for each kind of work under way, below the lines. The display starts with the first bar."""

    def __init__(self, stream: TextIO) -> None:
        self._console = _Console(file=stream, markup=False, highlight=False, emoji=False, soft_wrap=True)
        self._progress = Progress(
            TextColumn("  {task.description}", markup=False),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            refresh_per_second=8,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._tasks: dict[str, TaskID] = {}

    def show(self, what: str, done: int, total: int) -> None:
        """`done` of `total`; a bar that is full goes away, one of unknown length pulses."""
        if total and done >= total:
            self._remove(what)
            return
        if what not in self._tasks:
            self._progress.start()
            self._tasks[what] = self._progress.add_task(what, total=total or None)
        self._progress.update(self._tasks[what], completed=done, total=total or None)

    def clear(self) -> None:
        """Take all bars away."""
        for what in list(self._tasks):
            self._remove(what)

    def print(self, text: str, style: str) -> None:
        """A line above the bars."""
        self._console.print(Text(text, style=style))

    def close(self) -> None:
        """End the display and its thread."""
        self.clear()
        self._progress.stop()

    def _remove(self, what: str) -> None:
        if what in self._tasks:
            self._progress.remove_task(self._tasks.pop(what))


class NoBars:
    """Lines of plain text."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, what: str, done: int, total: int) -> None:
        """Nothing: a log file is not animated."""

    def clear(self) -> None:
        """Nothing to clear."""

    def print(self, text: str, style: str) -> None:
        """The line, at once."""
        self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Nothing to end."""
