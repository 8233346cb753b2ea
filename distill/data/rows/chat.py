"""Instruction data: conversations, prompts with completions, and the tokens that a model is trained to predict."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from distill.data.batches.encode import Batch, TokenRows, pad_rows
from distill.data.batches.packing import find_first_ids, require_end_token
from distill.data.batches.token_blocks import TEXTS_AT_ONCE
from distill.data.rows.chat_config import ChatConfig
from distill.data.rows.chat_template import (
    Message,
    RenderedText,
    Turns,
    is_blank,
    read_template,
    render_prompt,
    render_turns,
)
from distill.data.sources.columns import check_readable, check_text, find_column
from distill.errors import InputError
from distill.losses.logits import IGNORED

MESSAGES, PROMPT, COMPLETION = ("messages", "conversation"), ("prompt",), ("completion", "response")
INSTRUCTION, INPUT, OUTPUT = ("instruction",), ("input",), ("output",)
_FORMATS = "messages; prompt and completion; or instruction, output and, if any, input"
UNKNOWN_SPEAKER = "the speaker of each text is unknown"


@dataclass(frozen=True)
class PromptCompletion:
    """A prompt and its completion, as plain text."""

    prompt: str
    completion: str


Chat = Turns | PromptCompletion


def parse_chats(table: pa.Table, where: str) -> list[Chat]:
    """Returns the rows of a table of instruction data, in order.

    The columns determine the format: `messages` (lists of role and content, or JSON of them); `prompt` and
    `completion`, plain text that is concatenated unchanged; or `instruction`, `output` and, if present, `input`, which
    become a user's and an assistant's turn.

    Raises:
        InputError: The columns match none of the formats, or a cell is not a conversation or not text (names the row).
    """
    messages = find_column(table, MESSAGES)
    if messages is not None:
        check_readable(table, messages, where)
        return [_parse_turns(cell, f"{where}: row {row}") for row, cell in enumerate(table[messages].to_pylist(), 1)]
    prompt, completion = find_column(table, PROMPT), find_column(table, COMPLETION)
    if prompt is not None:
        pairs = zip(_read_texts(table, prompt, where), _read_texts(table, completion, where), strict=True)
        return [PromptCompletion(first, second) for first, second in pairs]
    instruction, context, output = (find_column(table, names) for names in (INSTRUCTION, INPUT, OUTPUT))
    if instruction is None:
        names = ", ".join(table.column_names)
        raise InputError(f"{where}: expected columns {_FORMATS}, found {names}: {UNKNOWN_SPEAKER}")
    cells = zip(*(_read_texts(table, name, where) for name in (instruction, context, output)), strict=True)
    return [Turns(_build_messages("\n\n".join(filter(None, request)), answer)) for *request, answer in cells]


def _read_texts(table: pa.Table, name: str | None, where: str) -> list[str]:
    """Returns the texts of a column, or empty texts if there is no column."""
    if name is None:
        return [""] * table.num_rows
    check_text(table, name, where)
    return [value or "" for value in table[name].to_pylist()]


def _build_messages(request: str, answer: str) -> list[Message]:
    user = [{"role": "user", "content": request}] if request.strip() else []
    return user + ([{"role": "assistant", "content": answer}] if answer.strip() else [])


def _parse_turns(cell: object, where: str) -> Turns:
    """Parses a conversation from a cell: a list of messages, or JSON of one; keys that are null are dropped."""
    if isinstance(cell, str):
        text = cell
        try:
            cell = json.loads(text) if text.strip() else []
        except ValueError as error:
            raise InputError(f"{where}: expected messages or JSON of them, found {text[:60]!r}: {error}") from None
    if cell is None:
        return Turns([])
    if not isinstance(cell, list):
        raise InputError(f"{where}: expected a list of messages, found {str(cell)[:60]!r}: {UNKNOWN_SPEAKER}")
    messages = []
    for entry in cell:
        message = {key: value for key, value in entry.items() if value is not None} if isinstance(entry, dict) else {}
        if not isinstance(message.get("role"), str) or len(message) < 2:
            raise InputError(
                f"{where}: expected messages with a role and a content, found {str(entry)[:60]!r}: {UNKNOWN_SPEAKER}"
            )
        messages.append(message)
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
        """Nonzero counts of truncated and skipped documents."""
        return {name: count for name, count in self.counted.items() if count}

    @cached_property
    def positions(self) -> list[np.ndarray]:
        """Masks of the positions whose next token is a target, bool [length]."""
        return [np.append(row[1:], False) for row in self.targets]

    def collate(self, rows: Sequence[int] | np.ndarray, pad_id: int, epoch: int = 0) -> Batch:
        """Pads the rows to the longest, [batch, length] each.

        input_ids, attention_mask and labels are int64, `positions` is bool. The label of a position is the token after
        it if that token is a target, else IGNORED; `positions` is true where there is a label.
        """
        positions, ids = self.positions, self.input_ids
        labels = [np.where(positions[i], np.roll(ids[i], -1), IGNORED) for i in rows]
        return self.tokens(rows, pad_id) | {"labels": pad_rows(labels, IGNORED)}


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
    limit, template = _check_inputs(tokenizer, chats, length, settings)
    names = ("skipped_empty", "skipped_without_answer", "skipped_too_long", "cut", "answers_that_share_a_token")
    notes = dict.fromkeys(names, 0)
    texts: list[RenderedText] = []
    for number, chat in enumerate(chats, 1):
        if is_empty(chat):
            notes["skipped_empty"] += 1
            continue
        text = _render_chat(tokenizer, chat, template, settings.turns, f"chat {number}")
        if text.spans:
            texts.append(text)
        else:
            notes["skipped_without_answer"] += 1
    ids, targets = [], []
    for row, mask, shared in _tokenize(tokenizer, texts):
        long = len(row) > limit
        if long and settings.too_long == "skip" or not mask[1:limit].any():
            notes["skipped_too_long" if long else "skipped_without_answer"] += 1
            continue
        notes["cut"] += long
        notes["answers_that_share_a_token"] += shared
        ids.append(row[:limit])
        targets.append(mask[:limit])
    if not ids:
        reasons = ", ".join(f"{name} {count}" for name, count in notes.items() if count)
        raise InputError(
            f"data: expected conversations with an answer, found none in {len(chats)} ({reasons or 'no rows'})"
        )
    return TargetBlocks(ids, targets, counted=notes)


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat], length: int, config: ChatConfig | None = None
) -> list[np.ndarray | None]:
    """Tokenizes the prompts for generation: a conversation up to its final assistant turn, or all of it without one.

    Returns:
        Ids of each prompt, int64, of any length; None for a chat without a prompt.

    Raises:
        InputError: As in `encode_chats`.
    """
    _, template = _check_inputs(tokenizer, chats, length, config or ChatConfig())
    texts = [_render_chat_prompt(tokenizer, chat, template, f"chat {number}") for number, chat in enumerate(chats, 1)]
    rows = iter(_tokenize(tokenizer, [text for text in texts if text is not None]))
    return [next(rows)[0] if text is not None else None for text in texts]


def _render_chat_prompt(
    tokenizer: PreTrainedTokenizerBase, chat: Chat, template: str, where: str
) -> RenderedText | None:
    if isinstance(chat, Turns):
        return render_prompt(tokenizer, chat, template, where)
    return RenderedText(chat.prompt, [], True) if chat.prompt.strip() else None


def _check_inputs(
    tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat], length: int, config: ChatConfig
) -> tuple[int, str]:
    """Returns the maximum number of tokens of a document, and the template, empty if none is needed."""
    if not tokenizer.is_fast:
        raise InputError(
            f"tokenizer {type(tokenizer).__name__}: expected a fast one, which knows the characters of each token; "
            "the tokens of an answer couldn't be distinguished from the others"
        )
    limit = min(length, tokenizer.model_max_length)
    if limit < 2:
        raise InputError(f"length: expected at least 2 tokens, found {limit}: there would be no next token to predict")
    if any(isinstance(chat, PromptCompletion) for chat in chats):
        require_end_token(tokenizer)
    needs_template = any(isinstance(chat, Turns) for chat in chats)
    return limit, read_template(tokenizer, config.template) if needs_template else ""


def is_empty(chat: Chat) -> bool:
    """Returns whether a chat contains no text."""
    if isinstance(chat, PromptCompletion):
        return not (chat.prompt + chat.completion).strip()
    return all(is_blank(message) for message in chat.messages)


def _render_chat(tokenizer: PreTrainedTokenizerBase, chat: Chat, template: str, turns: str, where: str) -> RenderedText:
    if isinstance(chat, Turns):
        return render_turns(tokenizer, chat, template, turns == "last", where)
    text = chat.prompt + chat.completion
    return RenderedText(text, [(len(chat.prompt), len(text))] if chat.completion.strip() else [], True)


def _tokenize(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[RenderedText]
) -> list[tuple[np.ndarray, np.ndarray, int]]:
    """Returns for each text (ids, mask of target tokens, number of spans that share a token with other text).

    Plain text starts with the tokenizer's bos token if it adds one, and ends with an end token if it has targets.
    """
    rows = []
    first = find_first_ids(tokenizer)
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        chunk = texts[start : start + TEXTS_AT_ONCE]
        encoded = tokenizer(
            [each.text for each in chunk], add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        for each, ids, offsets in zip(chunk, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            mask, shared = mask_targets(np.asarray(offsets, np.int64).reshape(-1, 2), each.spans)
            row = np.asarray(ids, np.int64)
            if each.plain:
                last = [require_end_token(tokenizer)] if each.spans else []
                row = np.concatenate([first, row, last]).astype(np.int64)
                mask = np.concatenate([[False] * len(first), mask, [True] * len(last)]).astype(bool)
            rows.append((row, mask, shared))
    return rows


def mask_targets(offsets: np.ndarray, spans: Sequence[tuple[int, int]]) -> tuple[np.ndarray, int]:
    """Returns the mask of tokens with a character in any span, bool [tokens], and a count.

    The count is the number of spans with a token that also has characters outside the span.

    Args:
        offsets: First character of each token and the one after its last [tokens, 2].
        spans: The same for each span.
    """
    starts, ends = offsets.T
    before = np.maximum.accumulate(np.concatenate([[0], ends]))[:-1]
    starts = np.where(starts < ends, starts, before)  # byte-level: a token of blanks may have no characters
    mask, shared = np.zeros(len(ends), bool), 0
    for first, last in spans:
        inside = (starts < last) & (ends > first)
        mask |= inside
        shared += bool((inside & ((starts < first) | (ends > last))).any())
    return mask, shared
