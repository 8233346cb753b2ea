"""Data sets of questions with contexts and accepted answers."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import pyarrow as pa

from distill.data.config import DataConfig
from distill.data.sources.answer_cells import Answer, is_out_of_context, locate_answer, parse_answers
from distill.data.sources.columns import (
    check_distinct,
    check_readable,
    check_text,
    find_column,
    missing_column_error,
    require_column,
)
from distill.data.sources.tables import read_splits, read_table
from distill.data.sources.text_column import iterate_cells
from distill.data.splits.evaluated import find_label_column, read_evaluated
from distill.data.splits.examples import Splits
from distill.data.splits.findings import Findings
from distill.data.splits.holdout import draw_held_out, hold_out_missing
from distill.data.splits.overlap import report_overlap
from distill.errors import InputError

QUESTION, CONTEXT, ANSWERS = ("question", "query"), ("context", "passage", "paragraph"), ("answers", "answer")
QuestionRow = tuple[str, str, list[Answer]]  # question, context, answers


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
        columns = {"text": pa.array(self.texts, pa.string()), "text_pair": pa.array(self.pairs)}
        if self.labels:
            answers = pa.list_(pa.struct({"text": pa.string(), "start": pa.int64()}))
            columns["label"] = pa.array([[asdict(each) for each in row] for row in self.labels], answers)
        return pa.table(columns)

    @classmethod
    def from_table(cls, table: pa.Table) -> "Questions":
        """Returns the questions of a table that `table` returned."""
        columns = {name: table[name].to_pylist() for name in table.column_names}
        labels = [[Answer(**each) for each in row] for row in columns.get("label", [])]
        return cls(columns["text"], columns["text_pair"], labels)


def load_questions(config: DataConfig, seed: int = 0) -> Splits:
    """Reads, checks and splits a data set of questions in SQuAD's format.

    Its columns are question, context, and answers with lists `text` and `answer_start`.

    Answers that are not at their recorded start are relocated to their first occurrence in the context; questions with
    no answer in the context are counted in every split. They are left out of train, but stay in validation and test,
    where every prediction for them is wrong: no span is the full answer, and neither is "no answer".

    Raises:
        InputError: A column is missing, answers have another format, or train has no answers in its contexts.
    """
    findings = Findings()
    tables = read_evaluated(config, findings, partial(_has_answers, config))
    rows = {name: _read_questions(table, config, name, findings) for name, table in tables.items()}
    _check_answered(rows["train"], config)
    hold_out_missing(rows, findings, config, partial(_hold_out_contexts, seed))
    for split, part in rows.items():
        lost = sum(is_out_of_context(answers) for *_, answers in part)
        effect = "are left out" if split == "train" else "stay, and can't be answered correctly"
        remark = f"{split}: {lost:,} of {len(part):,} questions have no answer in their context; they {effect}"
        findings.add(f"{split}_answers_not_in_context", lost, remark)
    rows["train"] = [row for row in rows["train"] if not is_out_of_context(row[2])]
    _check_answered(rows["train"], config)
    parts = {
        split: Questions([q for q, *_ in part], [c for _, c, _ in part], [answers for *_, answers in part])
        for split, part in rows.items()
    }
    unlabelled = _load_unlabelled_questions(config, findings)
    remaining = report_overlap(parts | {"unlabelled": unlabelled}, findings, "questions")
    unlabelled = Questions([unlabelled.texts[i] for i in remaining], [unlabelled.pairs[i] for i in remaining])
    return Splits((), parts["train"], parts["validation"], parts["test"], unlabelled, findings.counts, findings.remarks)


def _has_answers(config: DataConfig, tables: dict[str, pa.Table], split: str) -> bool:
    """Returns whether a split has labels: a column with answers.

    All of them may be empty if train has unanswered questions too.
    """
    column, train_column = (find_label_column(tables[each], config, ANSWERS) for each in (split, "train"))
    if column is None or train_column is None:
        return train_column is None

    def find_answered(name: str, column: str) -> list[bool]:
        cells = enumerate(iterate_cells(tables[name][column]), 1)
        return [bool(parse_answers(cell, f"data {config.path!r}, {name}: row {row}")) for row, cell in cells]

    return any(find_answered(split, column)) or not all(find_answered("train", train_column))


def _check_answered(train: Sequence[QuestionRow], config: DataConfig) -> None:
    if all(is_out_of_context(answers) or not answers for *_, answers in train):
        raise InputError(f"data {config.path!r}, train: expected answers in their contexts, found none")


def _read_questions(table: pa.Table, config: DataConfig, split: str, findings: Findings) -> list[QuestionRow]:
    where = f"data {config.path!r}, {split}"
    cells = zip(*(iterate_cells(table[name]) for name in _find_columns(table, config, where)), strict=True)
    rows: list[QuestionRow] = []
    dropped = 0
    for number, (question, context, cell) in enumerate(cells, 1):
        question, context = (str(each or "").rstrip("\n") for each in (question, context))
        if not question.strip() or not context.strip():
            dropped += 1
            continue
        answers = parse_answers(cell, f"{where}: row {number}")
        rows.append((question, context, [locate_answer(context, each) or Answer(each.text, -1) for each in answers]))
    if not rows:
        raise InputError(f"{where}: expected questions with contexts, found none in {dropped} rows")
    findings.add_dropped_empty(split, dropped, len(table))
    return rows


def _find_columns(table: pa.Table, config: DataConfig, where: str, *, labelled: bool = True) -> list[str]:
    """Returns the names of the columns with the questions, their contexts and, if `labelled`, the answers."""
    settings = [("text", config.text, QUESTION), ("text_pair", config.text_pair, CONTEXT)]
    settings += [("label", config.label, ANSWERS)] if labelled else []
    columns = []
    for flag, name, known in settings:
        column = require_column(table, name, flag, where) or find_column(table, known)
        if column is None:
            raise missing_column_error(flag, known, table, where)
        (check_readable if flag == "label" else check_text)(table, column, where)
        columns.append(column)
    check_distinct(where, **dict(zip((flag for flag, *_ in settings), columns, strict=True)))
    return columns


def _hold_out_contexts(
    seed: int, rows: list[QuestionRow], fraction: float
) -> tuple[list[QuestionRow], list[QuestionRow], str]:
    """Holds out whole contexts: a question on a context seen in training would be partly known to the model."""
    contexts = sorted({context for _, context, *_ in rows})
    drawn = {contexts[i] for i in draw_held_out(len(contexts), fraction, seed, "contexts")}
    remaining, held_out = [row for row in rows if row[1] not in drawn], [row for row in rows if row[1] in drawn]
    return remaining, held_out, f"the questions on {fraction:.0%} of train's contexts, seed {seed}"


def _load_unlabelled_questions(config: DataConfig, findings: Findings) -> Questions:
    if config.unlabelled is None:
        return Questions([], [])
    table = read_table(Path(config.unlabelled).expanduser())
    questions = _read_unanswered(table, config, f"unlabelled text {config.unlabelled!r}")
    findings.add_dropped_empty("unlabelled", len(table) - len(questions), len(table))
    return questions


def load_all_questions(config: DataConfig) -> Questions:
    """Returns every training question, held out later or not, and the unlabelled ones; answers are not read."""
    table = read_splits(config.path, config.subset)["train"]
    train = _read_unanswered(table, config, f"data {config.path!r}, train")
    more = _load_unlabelled_questions(config, Findings())
    return Questions(train.texts + more.texts, train.pairs + more.pairs)


def _read_unanswered(table: pa.Table, config: DataConfig, where: str) -> Questions:
    """Returns the questions and contexts of a table without answers and without empty rows."""
    columns = [
        [str(each or "").rstrip("\n") for each in iterate_cells(table[name])]
        for name in _find_columns(table, config, where, labelled=False)
    ]
    rows = [row for row in zip(*columns, strict=True) if all(each.strip() for each in row)]
    return Questions([question for question, _ in rows], [context for _, context in rows])
