"""Question answering data: questions, contexts, answer spans, and windows over long contexts."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from distill.data.batches.encode import IGNORED, TokenRows
from distill.data.config import DataConfig
from distill.data.sources.answer_cells import Answer, answers_of, is_out_of_context, placed_in
from distill.data.sources.columns import check_distinct, check_readable, check_text, first_of, missing, named
from distill.data.sources.tables import read_splits, read_table
from distill.data.sources.text_column import iterate_cells
from distill.data.splits.evaluated import label_column, read_evaluated
from distill.data.splits.findings import Findings
from distill.data.splits.holdout import drawn, hold_out_missing
from distill.data.splits.labelled import Splits
from distill.data.splits.overlap import report_overlap
from distill.errors import InputError

QUESTION, CONTEXT, ANSWERS = ("question", "query"), ("context", "passage", "paragraph"), ("answers", "answer")
WINDOW_SHARE = 3  # windows over a long context overlap by a third of their length, like BERT's 128 of 384


@dataclass(frozen=True)
class Questions:
    """Questions and contexts with all accepted answers: none if the context has no answer; no `labels` if unknown."""

    texts: list[str]
    pairs: list[str]
    labels: list[list[Answer]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.texts)

    def table(self) -> pa.Table:
        """Returns the questions as a table; the inverse of `from_table`."""
        columns: dict[str, Any] = {"text": pa.array(self.texts, pa.string()), "text_pair": pa.array(self.pairs)}
        if self.labels:
            answers = pa.list_(pa.struct({"text": pa.string(), "start": pa.int64()}))
            columns["label"] = pa.array([[asdict(each) for each in row] for row in self.labels], answers)
        return pa.table(columns)

    @classmethod
    def from_table(cls, table: pa.Table) -> "Questions":
        columns = {name: table[name].to_pylist() for name in table.column_names}
        labels = [[Answer(**each) for each in row] for row in columns.get("label", [])]
        return cls(columns["text"], columns["text_pair"], labels)


def load_questions(config: DataConfig, seed: int = 0) -> Splits:
    """Reads, checks and splits a data set of questions in SQuAD's format: question, context, and answers with lists
    `text` and `answer_start`.

    Answers that are not at their given start are relocated to their first occurrence in the context; questions with
    no answer in the context are counted in every split. They are left out of train, but stay in validation and test,
    where every prediction for them is wrong: no span is the full answer, and neither is "no answer".

    Raises:
        InputError: A column is missing, answers have another format, or train has no answers in its contexts.
    """
    findings = Findings()
    tables = read_evaluated(config, findings, partial(has_answers, config))
    rows = {name: read_questions(table, config, name, findings) for name, table in tables.items()}
    check_answered(rows["train"], config)
    hold_out_missing(rows, findings, config, partial(by_context, seed))
    for split, part in rows.items():
        lost = sum(is_out_of_context(answers) for *_, answers in part)
        becomes = "are left out" if split == "train" else "stay, and can't be answered rightly"
        remark = f"{split}: of {lost:,} of {len(part):,} questions no answer stands in the context; they {becomes}"
        findings.add(f"{split}_answers_not_in_context", lost, remark)
    rows["train"] = [row for row in rows["train"] if not is_out_of_context(row[2])]
    check_answered(rows["train"], config)
    parts: dict[str, Any] = {
        split: Questions([q for q, *_ in part], [c for _, c, _ in part], [answers for *_, answers in part])
        for split, part in rows.items()
    }
    unlabelled = unlabelled_questions(config, findings)
    kept = report_overlap(parts | {"unlabelled": unlabelled}, findings, "questions")
    unlabelled = Questions([unlabelled.texts[i] for i in kept], [unlabelled.pairs[i] for i in kept])
    return Splits((), parts["train"], parts["validation"], parts["test"], unlabelled, findings.counts, findings.remarks)


def has_answers(config: DataConfig, tables: dict[str, pa.Table], split: str) -> bool:
    """Returns whether a split has labels: a column with answers, which may all be empty if train has unanswered
    questions too.
    """
    own, trained = (label_column(tables[each], config, ANSWERS) for each in (split, "train"))
    if own is None or trained is None:
        return trained is None

    def answered(name: str, column: str) -> list[bool]:
        cells = enumerate(iterate_cells(tables[name][column]), 1)
        return [bool(answers_of(cell, f"data {config.path!r}, {name}: row {row}")) for row, cell in cells]

    return any(answered(split, own)) or not all(answered("train", trained))


Row = tuple[str, str, list[Answer]]  # question, context, answers


def check_answered(train: Sequence[Row], config: DataConfig) -> None:
    if all(is_out_of_context(answers) or not answers for *_, answers in train):
        raise InputError(f"data {config.path!r}, train: expected answers in their contexts, found none")


def read_questions(table: pa.Table, config: DataConfig, split: str, findings: Findings) -> list[Row]:
    where = f"data {config.path!r}, {split}"
    cells = zip(*(iterate_cells(table[name]) for name in columns_of(table, config, where)), strict=True)
    rows: list[Row] = []
    dropped = 0
    for number, (question, context, given) in enumerate(cells, 1):
        question, context = (str(each or "").rstrip("\n") for each in (question, context))
        if not question.strip() or not context.strip():
            dropped += 1
            continue
        answers = answers_of(given, f"{where}: row {number}")
        rows.append((question, context, [placed_in(context, each) or Answer(each.text, -1) for each in answers]))
    if not rows:
        raise InputError(f"{where}: expected questions with contexts, found none in {dropped} rows")
    findings.add_dropped_empty(split, dropped, len(table))
    return rows


def columns_of(table: pa.Table, config: DataConfig, where: str, *, labelled: bool = True) -> list[str]:
    """Returns the names of the columns with the questions, their contexts and, if `labelled`, the answers."""
    wanted = [("text", config.text, QUESTION), ("text_pair", config.text_pair, CONTEXT)]
    wanted += [("label", config.label, ANSWERS)] if labelled else []
    found = []
    for flag, name, known in wanted:
        column = named(table, name, flag, where) or first_of(table, known)
        if column is None:
            raise missing(flag, known, table, where)
        (check_readable if flag == "label" else check_text)(table, column, where)
        found.append(column)
    check_distinct(where, **dict(zip((flag for flag, *_ in wanted), found, strict=True)))
    return found


def by_context(seed: int, rows: list[Row], fraction: float) -> tuple[list[Row], list[Row], str]:
    """Holds out whole contexts: a question on a context seen in training would be partly known to the model."""
    contexts = sorted({context for _, context, *_ in rows})
    apart = {contexts[i] for i in drawn(len(contexts), fraction, seed, "contexts")}
    kept, held = [row for row in rows if row[1] not in apart], [row for row in rows if row[1] in apart]
    return kept, held, f"the questions on {fraction:.0%} of train's contexts, seed {seed}"


def unlabelled_questions(config: DataConfig, findings: Findings) -> Questions:
    if config.unlabelled is None:
        return Questions([], [])
    table = read_table(Path(config.unlabelled).expanduser())
    found = bare_questions(table, config, f"unlabelled text {config.unlabelled!r}")
    findings.add_dropped_empty("unlabelled", len(table) - len(found), len(table))
    return found


def load_bare_questions(config: DataConfig) -> Questions:
    """Returns every training question, held out later or not, and the unlabelled ones; answers are not read."""
    table = read_splits(config.path, config.subset)["train"]
    train = bare_questions(table, config, f"data {config.path!r}, train")
    more = unlabelled_questions(config, Findings())
    return Questions(train.texts + more.texts, train.pairs + more.pairs)


def bare_questions(table: pa.Table, config: DataConfig, where: str) -> Questions:
    columns = [
        [str(each or "").rstrip("\n") for each in iterate_cells(table[name])]
        for name in columns_of(table, config, where, labelled=False)
    ]
    rows = [row for row in zip(*columns, strict=True) if all(each.strip() for each in row)]
    return Questions([question for question, _ in rows], [context for _, context in rows])


@dataclass(frozen=True)
class Windows(TokenRows):
    """Unpadded token ids of windows, each with a question and a part of its context.

    Args:
        input_ids, token_type_ids: As in `Encoded`.
        allowed: Positions at which an answer may start or end, bool [length]: the context's tokens, and the first
            token, which stands for "no answer".
        starts, ends: Positions of the first and the last token of the first answer that lies entirely in the window, 0
            if there is none; IGNORED if no answers are known or none is in the context.
        owners: Index of each window's question.
        offsets: Start and end character of each token in the context [length, 2].
        part: The questions.
        truncated: Number of questions whose context takes more than one window.
    """

    input_ids: list[np.ndarray]
    token_type_ids: list[np.ndarray] | None
    allowed: list[np.ndarray]
    starts: np.ndarray
    ends: np.ndarray
    owners: np.ndarray
    offsets: list[np.ndarray]
    part: Questions
    truncated: int

    @property
    def positions(self) -> list[np.ndarray]:
        return self.allowed

    @property
    def notes(self) -> dict[str, int]:
        lost = sum(map(is_out_of_context, self.part.labels))
        counted = {"in several windows": self.truncated, "whose answer isn't in its context": lost}
        return {what: count for what, count in counted.items() if count}

    def joined(self, other: "Windows") -> "Windows":
        """Returns the windows of both, in order."""
        if not len(other):
            return self
        known = [self.part.labels or [[]] * len(self.part), other.part.labels or [[]] * len(other.part)]
        return Windows(
            *self.tokens_joined(other),
            self.allowed + other.allowed,
            np.concatenate([self.starts, other.starts]),
            np.concatenate([self.ends, other.ends]),
            np.concatenate([self.owners, other.owners + len(self.part)]),
            self.offsets + other.offsets,
            Questions(self.part.texts + other.part.texts, self.part.pairs + other.part.pairs, known[0] + known[1]),
            self.truncated + other.truncated,
        )

    def collate(self, rows: Sequence[int] | np.ndarray, pad_id: int, epoch: int = 0) -> dict[str, Tensor]:
        """Pads rows to the longest: int64 [batch, length], `positions` bool, `labels` (starts) and `ends` [batch]."""
        spans = {"labels": self.starts, "ends": self.ends}
        return self.tokens(rows, pad_id) | {
            name: torch.from_numpy(each[np.asarray(rows)]) for name, each in spans.items()
        }


def encode_questions(tokenizer: PreTrainedTokenizerBase, part: Questions, max_length: int) -> Windows:
    """Encodes each question with its context, in as many windows as the context takes.

    Raises:
        InputError: The tokenizer does not provide character offsets, or a question fills a window.
    """
    if not tokenizer.is_fast:
        raise InputError(
            f"tokenizer {type(tokenizer).__name__}: expected a fast one, which knows the characters of each token; "
            "answers couldn't be found again"
        )
    empty = np.zeros(0, np.int64)
    if not len(part):
        return Windows([], None, [], empty, empty, empty, [], part, 0)
    limit = min(max_length, tokenizer.model_max_length)
    stride = limit // WINDOW_SHARE
    longest = max(len(ids) for ids in tokenizer(part.texts, add_special_tokens=False)["input_ids"])
    if longest + tokenizer.num_special_tokens_to_add(pair=True) + stride >= limit:
        raise InputError(
            f"data.max_length {limit}: expected room for a question and more of its context than windows overlap by, "
            f"found a question of {longest} tokens; take a larger one"
        )
    made = tokenizer(
        part.texts, part.pairs, truncation="only_second", max_length=limit, stride=stride,
        return_overflowing_tokens=True, return_offsets_mapping=True,
    )  # fmt: skip
    owners = np.asarray(made["overflow_to_sample_mapping"], np.int64)
    allowed, offsets, spans = [], [], []
    for row, owner in enumerate(owners):
        inside = np.array([each == 1 for each in made.sequence_ids(row)])
        places = np.asarray(made["offset_mapping"][row], np.int64)
        known = part.labels and not is_out_of_context(part.labels[owner])
        spans.append(span_in(part.labels[owner], inside, places) if known else (IGNORED, IGNORED))
        inside[0] = True
        allowed.append(inside)
        offsets.append(places)
    types = made.get("token_type_ids")
    starts, ends = np.asarray(spans, np.int64).T
    return Windows(
        [np.asarray(row, np.int64) for row in made["input_ids"]],
        [np.asarray(row, np.int64) for row in types] if types is not None else None,
        allowed,
        starts,
        ends,
        owners,
        offsets,
        part,
        int((np.bincount(owners) > 1).sum()),
    )


def span_in(answers: Sequence[Answer], inside: np.ndarray, offsets: np.ndarray) -> tuple[int, int]:
    """Returns the first and last token of the first answer that lies entirely `inside`; (0, 0) if there is none."""
    places = np.flatnonzero(inside)
    for answer in answers:
        end = answer.start + len(answer.text)
        outside = not len(places) or offsets[places[0], 0] > answer.start or offsets[places[-1], 1] < end
        if outside or answer.start < 0:
            continue
        touched = places[(offsets[places, 1] > answer.start) & (offsets[places, 0] < end)]
        if len(touched):
            return int(touched[0]), int(touched[-1])
    return 0, 0
