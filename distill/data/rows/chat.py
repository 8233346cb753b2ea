"""Instruction data: conversations, prompts with completions, and the tokens that a model is trained to predict."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from distill.data.batches.encode import IGNORED, Batch, TokenRows, padded
from distill.data.batches.packing import end_id, first_ids
from distill.data.batches.token_blocks import TEXTS_AT_ONCE
from distill.data.rows.chat_config import ChatConfig
from distill.data.rows.chat_template import (
    Message,
    RenderedText,
    Turns,
    is_blank,
    read_template,
    write_prompt,
    write_turns,
)
from distill.data.sources.columns import check_readable, check_text, first_of
from distill.errors import InputError

MESSAGES, PROMPT, COMPLETION = ("messages", "conversation"), ("prompt",), ("completion", "response")
INSTRUCTION, INPUT, OUTPUT = ("instruction",), ("input",), ("output",)
FORMS = "messages; prompt and completion; or instruction, output and, if any, input"


@dataclass(frozen=True)
class Completed:
    """A prompt and its completion, as plain text."""

    prompt: str
    completion: str


Chat = Turns | Completed


def chats_of(table: pa.Table, where: str) -> list[Chat]:
    """Returns the rows of a table of instruction data, in order.

    The columns determine the format: `messages` (lists of role and content, or JSON of them); `prompt` and
    `completion`, plain text that is concatenated unchanged; or `instruction`, `output` and, if present, `input`, which
    become a user's and an assistant's turn.

    Raises:
        InputError: The columns match none of the formats, or a cell is not a conversation or not text (names the row).
    """
    messages = first_of(table, MESSAGES)
    if messages is not None:
        check_readable(table, messages, where)
        return [turns_of(cell, f"{where}: row {row}") for row, cell in enumerate(table[messages].to_pylist(), 1)]
    prompt, completion = first_of(table, PROMPT), first_of(table, COMPLETION)
    if prompt is not None:
        pairs = zip(texts_of(table, prompt, where), texts_of(table, completion, where), strict=True)
        return [Completed(first, second) for first, second in pairs]
    instruction, given, output = first_of(table, INSTRUCTION), first_of(table, INPUT), first_of(table, OUTPUT)
    if instruction is None:
        names = ", ".join(table.column_names)
        raise InputError(f"{where}: expected columns {FORMS}, found {names}: it can't be told who says what")
    cells = zip(*(texts_of(table, name, where) for name in (instruction, given, output)), strict=True)
    return [Turns(user_and_assistant("\n\n".join(filter(None, asked)), said)) for *asked, said in cells]


def texts_of(table: pa.Table, name: str | None, where: str) -> list[str]:
    """Returns the texts of a column, or empty texts if there is no column."""
    if name is None:
        return [""] * table.num_rows
    check_text(table, name, where)
    return [value or "" for value in table[name].to_pylist()]


def user_and_assistant(asked: str, said: str) -> list[Message]:
    user = [{"role": "user", "content": asked}] if asked.strip() else []
    return user + ([{"role": "assistant", "content": said}] if said.strip() else [])


def turns_of(cell: Any, where: str) -> Turns:
    """Parses a conversation from a cell: a list of messages, or JSON of one; keys that are null are dropped."""
    if isinstance(cell, str):
        try:
            cell = json.loads(cell) if cell.strip() else []
        except ValueError as error:
            raise InputError(f"{where}: expected messages or JSON of them, found {cell[:60]!r}: {error}") from None
    if cell is None:
        return Turns([])
    if not isinstance(cell, list):
        raise InputError(
            f"{where}: expected a list of messages, found {str(cell)[:60]!r}: it can't be told who says what"
        )
    messages = []
    for message in cell:
        kept = {key: value for key, value in message.items() if value is not None} if isinstance(message, dict) else {}
        if not isinstance(kept.get("role"), str) or len(kept) < 2:
            raise InputError(
                f"{where}: expected messages with a role and a content, found {str(message)[:60]!r}: "
                "it can't be told who says what"
            )
        messages.append(kept)
    return Turns(messages)


@dataclass(frozen=True)
class TargetBlocks(TokenRows):
    """Documents of which only some tokens are prediction targets; replaces `LanguageBlocks`, also in `PackedRows`.

    Args:
        input_ids: Ids of each document, int64 [length].
        targets: Mask of the tokens to predict, bool [length].
        counted: Counts of truncated and skipped documents.
    """

    input_ids: list[np.ndarray]
    targets: list[np.ndarray]
    token_type_ids: None = None
    counted: dict[str, int] = field(default_factory=dict)

    @property
    def notes(self) -> dict[str, int]:
        return {name: count for name, count in self.counted.items() if count}

    @cached_property
    def positions(self) -> list[np.ndarray]:
        """Masks of the positions whose next token is a target, bool [length]."""
        return [np.append(row[1:], False) for row in self.targets]

    def collate(self, rows: Sequence[int] | np.ndarray, pad_id: int, epoch: int = 0) -> Batch:
        """Pads the rows to the longest: input_ids, attention_mask, labels, int64, and `positions`, bool, each [batch,
        length].

        The label of a position is the token after it if that token is a target, else IGNORED; `positions` is true
        where there is a label.
        """
        places, ids = self.positions, self.input_ids
        labels = [np.where(places[i], np.roll(ids[i], -1), IGNORED) for i in rows]
        return self.tokens(rows, pad_id) | {"labels": padded(labels, IGNORED)}


def encode_chats(
    tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat], length: int, config: ChatConfig | None = None
) -> TargetBlocks:
    """Tokenizes conversations with the chat template, and prompts with completions unchanged, with an end token.

    The targets in a conversation are the spans that the template marks as generated or, without marks, the assistant's
    turns including their end token; in a pair, the completion and the end token.

    Returns:
        The documents, of at most `length` tokens or the tokenizer's own limit if that is smaller. Their counts are the
        documents `skipped_empty`, `skipped_without_answer` and `skipped_too_long`, the truncated ones (`cut`), and the
        answers with a token that spans their boundary (`answers_that_share_a_token`).

    Raises:
        InputError: The tokenizer has no template for conversations, the template rejects a conversation or its turns
            can't be separated, the tokenizer has no end token for pairs or no character offsets, or no document is
            left.
    """
    settings = config or ChatConfig()
    limit, template = check_chat_inputs(tokenizer, chats, length, settings)
    names = ("skipped_empty", "skipped_without_answer", "skipped_too_long", "cut", "answers_that_share_a_token")
    notes = dict.fromkeys(names, 0)
    written: list[RenderedText] = []
    for number, chat in enumerate(chats, 1):
        if is_empty(chat):
            notes["skipped_empty"] += 1
            continue
        text = write(tokenizer, chat, template, settings.asked, f"chat {number}")
        if text.spans:
            written.append(text)
        else:
            notes["skipped_without_answer"] += 1
    ids, asked = [], []
    for row, wanted, shared in tokens_of(tokenizer, written):
        long = len(row) > limit
        if long and settings.longer == "skip" or not wanted[1:limit].any():
            notes["skipped_too_long" if long else "skipped_without_answer"] += 1
            continue
        notes["cut"] += long
        notes["answers_that_share_a_token"] += shared
        ids.append(row[:limit])
        asked.append(wanted[:limit])
    if not ids:
        why = ", ".join(f"{name} {count}" for name, count in notes.items() if count)
        raise InputError(
            f"data: expected conversations with an answer, found none in {len(chats)} ({why or 'no rows'})"
        )
    return TargetBlocks(ids, asked, counted=notes)


def prompt_rows(
    tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat], length: int, config: ChatConfig | None = None
) -> list[np.ndarray | None]:
    """Tokenizes the prompts for generation: a conversation up to its final assistant turn, or all of it without one.

    Returns:
        Ids of each prompt, int64, of any length; None for a chat without a prompt.

    Raises:
        InputError: As in `encode_chats`.
    """
    _, template = check_chat_inputs(tokenizer, chats, length, config or ChatConfig())
    written = [prompt_of(tokenizer, chat, template, f"chat {number}") for number, chat in enumerate(chats, 1)]
    rows = iter(tokens_of(tokenizer, [text for text in written if text is not None]))
    return [next(rows)[0] if text is not None else None for text in written]


def prompt_of(tokenizer: PreTrainedTokenizerBase, chat: Chat, template: str, where: str) -> RenderedText | None:
    if isinstance(chat, Turns):
        return write_prompt(tokenizer, chat, template, where)
    return RenderedText(chat.prompt, [], True) if chat.prompt.strip() else None


def check_chat_inputs(
    tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat], length: int, config: ChatConfig
) -> tuple[int, str]:
    """Returns the maximum number of tokens of a document, and the template, empty if none is needed."""
    if not tokenizer.is_fast:
        raise InputError(
            f"tokenizer {type(tokenizer).__name__}: expected a fast one, which knows the characters of each token; "
            "the tokens of an answer couldn't be told from the others"
        )
    limit = min(length, tokenizer.model_max_length)
    if limit < 2:
        raise InputError(f"length: expected at least 2 tokens, found {limit}: no token would have another beside it")
    if any(isinstance(chat, Completed) for chat in chats):
        end_id(tokenizer)
    needed = any(isinstance(chat, Turns) for chat in chats)
    return limit, read_template(tokenizer, config.template) if needed else ""


def is_empty(chat: Chat) -> bool:
    if isinstance(chat, Completed):
        return not (chat.prompt + chat.completion).strip()
    return all(is_blank(message) for message in chat.messages)


def write(tokenizer: PreTrainedTokenizerBase, chat: Chat, template: str, asked: str, where: str) -> RenderedText:
    if isinstance(chat, Turns):
        return write_turns(tokenizer, chat, template, asked == "last", where)
    text = chat.prompt + chat.completion
    return RenderedText(text, [(len(chat.prompt), len(text))] if chat.completion.strip() else [], True)


def tokens_of(
    tokenizer: PreTrainedTokenizerBase, written: Sequence[RenderedText]
) -> list[tuple[np.ndarray, np.ndarray, int]]:
    """Returns for each text its ids, the mask of target tokens, and the number of spans that share a token with the
    surrounding text.

    Plain text starts with the tokenizer's bos token if it adds one, and ends with an end token if it has targets.
    """
    made = []
    first = first_ids(tokenizer)
    for start in range(0, len(written), TEXTS_AT_ONCE):
        chunk = written[start : start + TEXTS_AT_ONCE]
        found: Any = tokenizer(
            [each.text for each in chunk], add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        for each, ids, offsets in zip(chunk, found["input_ids"], found["offset_mapping"], strict=True):
            asked, shared = target_mask(np.asarray(offsets, np.int64).reshape(-1, 2), each.spans)
            row = np.asarray(ids, np.int64)
            if each.plain:
                last = [end_id(tokenizer)] if each.spans else []
                row = np.concatenate([first, row, last]).astype(np.int64)
                asked = np.concatenate([[False] * len(first), asked, [True] * len(last)]).astype(bool)
            made.append((row, asked, shared))
    return made


def target_mask(offsets: np.ndarray, spans: Sequence[tuple[int, int]]) -> tuple[np.ndarray, int]:
    """Returns the mask of tokens with a character in any span, bool [tokens], and the number of spans with a token that
    also has characters outside the span.

    Args:
        offsets: First character of each token and the one after its last [tokens, 2].
        spans: The same for each span.
    """
    starts, ends = offsets.T
    before = np.maximum.accumulate(np.concatenate([[0], ends]))[:-1]
    starts = np.where(starts < ends, starts, before)  # byte-level: a token of blanks may have no characters
    asked, shared = np.zeros(len(ends), bool), 0
    for first, last in spans:
        here = (starts < last) & (ends > first)
        asked |= here
        shared += bool((here & ((starts < first) | (ends > last))).any())
    return asked, shared
