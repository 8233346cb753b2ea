"""Parsing of answers to questions, in all formats that data files use."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distill.data.sources.cells import parse_literal
from distill.errors import InputError


@dataclass(frozen=True)
class Answer:
    """An accepted answer: its text and the index of its first character in the context, -1 if it isn't there."""

    text: str
    start: int


def is_out_of_context(answers: Sequence[Answer]) -> bool:
    """Returns whether there are answers but none of them is in the context."""
    return bool(answers) and all(each.start < 0 for each in answers)


def parse_answers(cell: Any, where: str) -> list[Answer]:
    """Parses the answers in a cell: SQuAD's lists, one answer as text, or either as JSON."""
    if isinstance(cell, str) and cell.lstrip().startswith(("{", "[")):
        try:
            cell = parse_literal(cell)
        except ValueError:
            raise InputError(f"{where}: expected answers as JSON or text, found {cell[:60]!r}") from None
    if cell is None or cell == "":
        return []
    if isinstance(cell, str):
        return [Answer(cell, -1)]
    if isinstance(cell, list):
        return [answer for part in cell for answer in parse_answers(part, where)]
    if not isinstance(cell, dict) or "text" not in cell:
        raise InputError(
            f"{where}: expected answers with text and answer_start, found {str(cell)[:60]!r}: their positions are "
            "unknown"
        )
    texts = cell["text"] if isinstance(cell["text"], list) else [cell["text"]]
    starts = cell.get("answer_start", cell.get("start", [-1] * len(texts)))
    starts = starts if isinstance(starts, list) else [starts]
    if len(texts) != len(starts):
        raise InputError(f"{where}: expected a start for each answer, found {len(texts)} answers, {len(starts)} starts")
    answers = [(text, start) for text, start in zip(texts, starts, strict=True) if text is not None]
    return [Answer(str(text), _parse_start(start, where)) for text, start in answers if str(text).strip()]


def _parse_start(cell: Any, where: str) -> int:
    """Parses the start of an answer; -1 if unknown."""
    try:
        return -1 if cell is None else int(cell)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{where}: expected a whole number for an answer's start, found {str(cell)[:60]!r}") from None


def locate_answer(context: str, answer: Answer) -> Answer | None:
    """Returns the answer at its own start if it is there, else at its first occurrence; None if there is none."""
    if answer.start >= 0 and context.startswith(answer.text, answer.start):
        return answer
    start = context.find(answer.text)
    return Answer(answer.text, start) if start >= 0 else None
