"""The reward process: runs the user's function on request, and nothing else.

Started as `python -m tidemill.rewards.child READ_FD WRITE_FD LIFELINE_FD PARENT_PID`. Requests and replies are lines of
JSON on two pipes, which the user's code never sees: its standard input is empty, its output is caught, up to a limit,
and sent along. The process dies with its parent, and so does its group: the lifeline is a pipe on which the kernel is
told to kill the group when its other end closes. Only the standard library is loaded until the user's code asks for
more.
"""

import contextlib
import ctypes
import fcntl
import functools
import importlib
import importlib.util
import io
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from tidemill.rewards.answer import Answer
from tidemill.rewards.outputs import BrokenContractError, entries, entry

__all__ = ["main"]

_PRINTED_CHARACTERS = 4096
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_F_SETSIG = 10  # asm-generic/fcntl.h


class _CappedText(io.TextIOBase):
    """Keeps the beginning of what is written, forgets the rest."""

    def __init__(self) -> None:
        self.kept = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if len(self.kept) < _PRINTED_CHARACTERS:
            self.kept += text[: _PRINTED_CHARACTERS - len(self.kept)]
        return len(text)


def main(read_fd: int, write_fd: int, lifeline_fd: int, parent: int) -> None:
    """Serve requests until the parent closes its end."""
    _die_with(parent, lifeline_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process when it is done.
    for fd in (read_fd, write_fd, lifeline_fd):
        os.set_inheritable(fd, False)
    with os.fdopen(read_fd, "rb") as requests, os.fdopen(write_fd, "wb") as replies:
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        _serve(requests, replies)


def _die_with(parent: int, lifeline_fd: int) -> None:
    if sys.platform == "linux":
        fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline_fd, _F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, fcntl.fcntl(lifeline_fd, fcntl.F_GETFL) | os.O_ASYNC)
        libc = ctypes.CDLL(None, use_errno=True)
        # For the case that a fork of the parent still holds the lifeline. Not SIGKILL: the parent's thread may be gone
        # before its files are closed, and a process killed then has let go of the lifeline that ends its group.
        signal.signal(signal.SIGTERM, lambda number, frame: os.killpg(0, signal.SIGKILL))
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        # Orphans of the user's code come to this process, so that the parent finds and ends them.
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent:
        os._exit(1)


def _serve(requests: BinaryIO, replies: BinaryIO) -> None:
    folder = Path.cwd()
    function: Callable[[list[Answer]], Any] = _not_loaded
    for line in requests:
        request = json.loads(line)
        printed = _CappedText()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            if "load" in request:
                reply, function = _load(request)
            else:
                reply = _score(function, request["answers"])
        os.chdir(folder)
        reply["printed"] = printed.kept
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


def _not_loaded(answers: list[Answer]) -> Any:
    raise RuntimeError("no function was loaded")


def _load(request: dict[str, Any]) -> tuple[dict[str, Any], Callable[[list[Answer]], Any]]:
    sys.path[:] = request["sys_path"]
    try:
        function = functools.partial(_resolve(request["load"]), **request["keywords"])
    except BaseException as error:  # the user's module may raise anything, SystemExit too
        return {"error": _words(error)}, _not_loaded
    _limit_memory(request["memory"])
    return {"loaded": True}, function


def _resolve(use: str) -> Callable[..., Any]:
    place, _, name = use.rpartition(":")
    value: Any = _module(place)
    for word in name.split("."):
        value = getattr(value, word)
    if not callable(value):
        raise TypeError(f"{name} is {type(value).__name__}, not a function")
    return value  # type: ignore[no-any-return]  # what a user's module holds has no type


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place).resolve()
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _limit_memory(allowance: int) -> None:
    """Let the process grow by `allowance` bytes of address space from here."""
    if sys.platform != "linux":
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + allowance
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _score(function: Callable[[list[Answer]], Any], fields: list[dict[str, Any]]) -> dict[str, Any]:
    answers = [Answer.of(values) for values in fields]
    given = list(answers)
    ids = [answer.id for answer in given]
    try:
        found = entries(function(answers), ids)
        if len(answers) != len(given) or any(a is not b for a, b in zip(answers, given, strict=True)):
            return {"error": "it changed the list of answers that it was given; work on a copy"}
        return {"entries": [_entry(value) for value in found]}
    except BrokenContractError as error:
        return {"broken": str(error)}
    except BaseException as error:  # the user's function may raise anything, SystemExit too
        return {"error": _words(error)}


def _entry(value: Any) -> dict[str, Any]:
    try:
        return entry(value)
    except ValueError as error:
        return {"failed": str(error)}


def _words(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, MemoryError):
        text = "MemoryError: over reward.memory"
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if frame.filename != __file__ and "importlib" not in frame.filename]
    return f"{text[:500]} ({Path(inside[-1].filename).name}:{inside[-1].lineno})" if inside else text[:500]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]))
