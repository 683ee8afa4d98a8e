"""Prompts from a JSONL file, checked whole and tokenized once when it is loaded, then taken by cursor.

A row is `{"id"?, "prompt": text or messages, "label"?, ...}`. What a cursor stands for never depends on the batch: rows
of one epoch follow those of the one before without a gap, so that another batch size, or a resume in the middle of
one, drops nothing. Prompts longer than the limit, measured as they are sent, are dropped and counted.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from tidemill.contracts.events import Emit, Notice
from tidemill.contracts.sample import Prompt
from tidemill.contracts.state import Cursor
from tidemill.data.order import EpochOrder, shuffled
from tidemill.data.rows import BadLine, Row, read_rows
from tidemill.data.tokenizer import Tokenizer
from tidemill.errors import DataError

__all__ = ["JsonlData"]

_SHOWN = 10


class JsonlData:
    """The prompts of a file, endless by cursor (`take`) or once in the file's order (`all_prompts`).

    `chat` says what text is: "plain" is sent as it stands and lists of messages are refused, "template" makes it the
    message of a user, "auto" sends text plain and lists through the template.
    Raises DataError when lines are bad and `skip_bad_lines` is False, when nothing is left, or the file is unreadable.
    """

    def __init__(
        self,
        *,
        path: Path,
        tokenizer: Tokenizer,
        seed: int,
        shuffle: bool,
        max_prompt_tokens: int,
        skip_bad_lines: bool,
        chat: Literal["auto", "plain", "template"] = "auto",
        emit: Emit,
    ) -> None:
        self.path = Path(path)
        self._seed, self._shuffle = seed, shuffle
        file = read_rows(self.path)
        prompts, refused = _tokenized(file.rows, tokenizer, chat)
        _handle_bad_lines(self.path, [*file.bad, *refused], skip_bad_lines, emit)
        if file.repaired:
            emit(Notice(text=f"{file.repaired} rows of {self.path} hold half a surrogate pair: replaced by U+FFFD"))
        self._prompts = _short_enough(self.path, prompts, max_prompt_tokens, emit)
        self._ids = tuple(prompt.id for prompt in self._prompts)
        self._epoch = lru_cache(maxsize=4)(self._order_of)

    def __len__(self) -> int:
        """Rows an epoch."""
        return len(self._prompts)

    def all_prompts(self, limit: int = 0) -> list[Prompt]:
        """The first `limit` prompts, 0 for all, in the file's order; their keys begin with `eval`."""
        return [replace(prompt, key=f"eval:{prompt.id}") for prompt in self._prompts[: limit or None]]

    def take(self, cursor: Cursor, count: int) -> tuple[list[Prompt], Cursor]:
        """The next `count` prompts after `cursor`, and the cursor behind them. Pure.

        Raises DataError when the cursor was made with other data.
        """
        self._check(cursor)
        epoch, position = cursor.epoch, cursor.position
        taken: list[Prompt] = []
        while len(taken) < count:
            if position == len(self):
                epoch, position = epoch + 1, 0
            indices = self._epoch(epoch).indices[position : position + count - len(taken)]
            taken += [replace(self._prompts[i], key=f"{epoch}:{self._ids[i]}") for i in indices]
            position += len(indices)
        return taken, Cursor(epoch=epoch, position=position, digest=self._epoch(epoch).digest(position))

    def rebase(self, cursor: Cursor) -> Cursor:
        """The cursor itself where it fits this data, else the start of the next epoch. Pure."""
        if self._fits(cursor):
            return cursor
        return Cursor(epoch=cursor.epoch + 1)

    def _order_of(self, epoch: int) -> EpochOrder:
        indices: Sequence[int] = range(len(self._ids))
        if self._shuffle:
            indices = shuffled(self._ids, seed=self._seed, epoch=epoch)
        return EpochOrder(self._ids, indices)

    def _check(self, cursor: Cursor) -> None:
        where = f"epoch {cursor.epoch}, row {cursor.position}"
        todo = (
            "restore the file, seed and shuffle setting of the first start, begin a new run, or go on with the next "
            'epoch of the new order: checkpoint.accept = ["data"] (["warm_up"] for demonstrations)'
        )
        if not self._reaches(cursor):
            raise DataError(f"cannot go on at {where} of {self.path}: it has {len(self)} usable rows now; {todo}")
        if not self._fits(cursor):
            raise DataError(
                f"cannot go on at {where} of {self.path}: the rows before it are not those that were consumed; {todo}"
            )

    def _reaches(self, cursor: Cursor) -> bool:
        return cursor.epoch >= 0 and 0 <= cursor.position <= len(self)

    def _fits(self, cursor: Cursor) -> bool:
        return self._reaches(cursor) and self._epoch(cursor.epoch).digest(cursor.position) == cursor.digest


def _tokenized(rows: Sequence[Row], tokenizer: Tokenizer, chat: str) -> tuple[list[Prompt], list[BadLine]]:
    if not tokenizer.has_chat_template and any(_as_chat(row, chat) for row in rows):
        first = next(row for row in rows if _as_chat(row, chat))
        _explain_missing_template(tokenizer, first)
    prompts: list[Prompt] = []
    bad: list[BadLine] = []
    for row in rows:
        try:
            prompts.append(_prompt(row, tokenizer, chat))
        except DataError as error:
            bad.append(BadLine(line=row.line, reason=str(error)))
    return prompts, bad


def _explain_missing_template(tokenizer: Tokenizer, row: Row) -> None:
    raise DataError(
        f"cannot encode the chat on line {row.line}: {tokenizer.folder} has no chat template; add chat_template.jinja "
        'to that folder, use an instruction-tuned model, or write prompts as text and set data.chat = "plain"'
    )


def _as_chat(row: Row, chat: str) -> bool:
    return chat == "template" or (chat == "auto" and not isinstance(row.prompt, str))


def _prompt(row: Row, tokenizer: Tokenizer, chat: str) -> Prompt:
    if _as_chat(row, chat):
        messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
        text, ids = tokenizer.read_chat(messages)
    elif isinstance(row.prompt, str):
        text, ids = row.prompt, tokenizer.encode_plain(row.prompt)
    else:
        raise DataError('a list of messages, but data.chat = "plain"; write text, or set data.chat = "auto"')
    if not ids:
        raise DataError("an empty prompt, of no token at all")
    return Prompt(id=row.id, key=f"0:{row.id}", token_ids=ids, text=text, label=row.label, extra=row.extra)


def _handle_bad_lines(path: Path, bad: Sequence[BadLine], skip: bool, emit: Emit) -> None:
    if not bad:
        return
    bad = sorted(bad, key=lambda line: line.line)
    listed = "".join(f"\n  {path}:{line.line}: {line.reason}" for line in bad[:_SHOWN])
    more = f"\n  and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    if not skip:
        raise DataError(
            f"cannot use {path}: {len(bad)} bad line(s); correct them, or set data.skip_bad_lines = true:{listed}{more}"
        )
    emit(
        Notice(
            text=f"{len(bad)} bad line(s) of {path} skipped:{listed}{more}",
            level="warning",
            details={"skipped": len(bad), "lines": [line.line for line in bad]},
        )
    )


def _short_enough(path: Path, prompts: Sequence[Prompt], limit: int, emit: Emit) -> tuple[Prompt, ...]:
    if not prompts:
        raise DataError(f"cannot take prompts from {path}: it holds no usable row; write one JSON object a line")
    kept = tuple(prompt for prompt in prompts if len(prompt.token_ids) <= limit)
    dropped = len(prompts) - len(kept)
    if not kept:
        shortest = min(len(prompt.token_ids) for prompt in prompts)
        raise DataError(
            f"cannot take prompts from {path}: all {dropped} are longer than data.max_prompt_tokens = {limit}, "
            f"the shortest has {shortest} tokens; raise the limit or shorten the prompts"
        )
    if dropped:
        text = f"{dropped} of {len(prompts)} prompts of {path} dropped: longer than {limit} tokens"
        emit(Notice(text=text, level="warning", details={"dropped": dropped, "kept": len(kept), "limit": limit}))
    return kept
