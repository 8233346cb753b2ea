"""Cleaning of the splits of a data set: which rows are changed, which are dropped, and why."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from distill.data.clean.config import CleanConfig, CleaningStep
from distill.data.clean.filters import Reason, build_language_filter, build_length_filter, build_symbol_filter
from distill.data.clean.near_duplicates import find_near_duplicates, find_similar, pair_equal_keys
from distill.data.clean.spelling import Dictionary, Speller
from distill.data.clean.text_steps import Change, TextChanges, clean_column
from distill.data.sources.stored_texts import StoredTexts
from distill.data.sources.text_column import TextColumn, select_texts
from distill.data.splits.examples import Splits, take_rows
from distill.data.splits.overlap import iterate_text_keys

NO_TEXT = CleaningStep("empty", "")  # what other steps leave without text
_SHOWN = 80  # characters of an example
KEPT_FROM = 50_000  # rows of a part from which on the results of steps are kept, so that a stopped run goes on
TRAINED, EVALUATED = ("train", "unlabelled"), ("validation", "test")


class CleanedRow(NamedTuple):
    """A row that was changed or dropped.

    Args:
        split: Its split.
        row: Its number in the split before cleaning, from 0.
        before: Its text; of a pair, both texts with a line break between them.
        after: The text that takes its place; None if the row was dropped.
        why: The steps that changed it, or the step that dropped it and the reason.
    """

    split: str
    row: int
    before: str
    after: str | None
    why: str


@dataclass
class Cleaning:
    """The cleaning of a data set.

    Args:
        config: The steps.
        listed: Words that spelling takes for right.
        record: Called with every row that is changed or dropped.
        scratch: Folder for texts that may not fit into memory.
        processes: Number of processes beside this one that clean texts; 0 for none.
        prepared: Name -> change of the step names; that of spelling is added when its words are known.
        advance: Called with the number of texts that a step, or a group of steps, is done with; see `count_work`.
    """

    config: CleanConfig
    listed: frozenset[str]
    record: Callable[[CleanedRow], None]
    scratch: Path
    processes: int = 0
    prepared: dict[str, Change] = field(default_factory=dict)
    advance: Callable[[int], object] = lambda count: None
    counts: Counter[str] = field(default_factory=Counter)  # of changed and dropped rows, by split and step
    examples: dict[str, CleanedRow] = field(default_factory=dict)  # the first row of each count
    speller: Speller | None = None
    numbers: dict[str, np.ndarray] = field(default_factory=dict)  # split -> rows that stay, before cleaning
    _waiting: TextIO | None = None  # receives the rows of the work that is under way, if its result is kept

    def count_work(self, splits: Splits) -> int:
        """Returns the number of texts times the steps, or groups of steps, that go through them."""
        steps = self.config.find_steps()
        groups = {step.name == "spelling" for step in steps if step.is_text_step}
        passes = len(groups) + sum(1 for step in steps if not step.is_text_step and step.name != "labels")
        evaluated = sum(len(getattr(splits, name)) for name in EVALUATED) if self.config.find_deployed() else 0
        return passes * sum(len(getattr(splits, name)) for name in TRAINED) + evaluated

    def clean(self, splits: Splits) -> Splits:
        """Returns the splits with cleaned texts and without the rows that steps drop.

        Rows of validation and test are never dropped, and their texts are changed only by the steps of deployment.
        Labels are never changed here.
        """
        parts = {name: getattr(splits, name) for name in (*TRAINED, *EVALUATED)}
        steps = [step for step in self.config.find_steps() if step.is_text_step]
        before = [step for step in steps if step.name != "spelling"]
        for name in TRAINED:
            parts[name] = self._resume_or_run(
                f"{name}-texts", parts[name], self._clean_texts, name, parts[name], before
            )
        spelling = [step for step in steps if step.name == "spelling"]
        if spelling:
            texts = chain.from_iterable(_iterate_texts(parts[name]) for name in TRAINED)
            self.speller = Speller.build(Dictionary.build(texts, self.listed), int(spelling[0].value))
            self.prepared["spelling"] = self.speller.correct
            for name in TRAINED:
                part = parts[name]
                parts[name] = self._resume_or_run(f"{name}-spelling", part, self._clean_texts, name, part, spelling)
        deployed = self.config.find_deployed()
        parts |= {name: self._clean_texts(name, parts[name], deployed) for name in EVALUATED}
        parts |= {
            name: self._resume_or_run(f"{name}-rows", parts[name], self._drop_rows, name, parts) for name in TRAINED
        }
        return replace(splits, **parts, notes=splits.notes | self.name_counts())

    def _resume_or_run(self, name: str, part: Any, work: Callable[..., Any], *arguments: Any) -> Any:
        """Returns the result of `work` on a large part as it was kept in `scratch`, also before an earlier stop."""
        if len(part) < KEPT_FROM:
            return work(*arguments)
        result, rows, numbers = (self.scratch / f"{name}.{end}" for end in ("result.parquet", "rows.jsonl", "npy"))
        split = name.partition("-")[0]
        if not result.exists():
            self.scratch.mkdir(parents=True, exist_ok=True)
            with rows.open("w") as self._waiting:
                done = work(*arguments)
            self._waiting = None
            np.save(numbers, self.numbers.get(split, np.zeros(0, np.int64)))
            _write_part(done, result)
        with rows.open() as lines:
            for line in lines:
                self._take(CleanedRow(*json.loads(line)))
        self.numbers[split] = np.load(numbers)
        return _read_part(part, result)

    def _clean_texts(self, split: str, part: Any, steps: Sequence[CleaningStep]) -> Any:
        """Returns the part with the steps applied to each of its texts, of a tagger to its words."""
        if not steps or not len(part):
            return part
        cleaned = self._clean_words if _is_tagged(part) else self._clean_columns
        done = cleaned(split, part, steps)
        if not self._is_streamed(part):
            self.advance(len(part))
        return done

    def _is_streamed(self, part: Any) -> bool:
        """Returns whether `_clean_single` cleans the part, which reports its progress itself."""
        return not _is_tagged(part) and part.pairs is None

    def _clean_words(self, split: str, part: Any, steps: Sequence[CleaningStep]) -> Any:
        """Returns a tagger's sentences with each word cleaned on its own, but for spelling, which needs its neighbors.

        A word that would vanish or become several stays as it is: its tag would have no place.
        """
        # Words start with the space before them (distill.data.rows.tagged), which isn't theirs to clean.
        old_rows = [[word.lstrip() for word in row] for row in part.texts]
        if steps[0].name == "spelling":
            joined, changes = self._run([" ".join(row) for row in old_rows], steps)
            rows = [text.split(" ") for text in joined]
            why = changes.steps
        else:
            words = [word for row in old_rows for word in row]
            cleaned, changes = self._run(words, steps)
            corrected = [new if len(new.split()) == 1 else old for new, old in zip(cleaned, words, strict=True)]
            ends = np.cumsum([len(row) for row in old_rows]).tolist()
            rows = [corrected[end - len(row) : end] for row, end in zip(old_rows, ends, strict=True)]
            why = {}
            for word, names in sorted(changes.steps.items()):
                row_steps = why.setdefault(int(np.searchsorted(ends, word, "right")), [])
                row_steps += [name for name in names if name not in row_steps]
        rows = [new if len(new) == len(old) else old for new, old in zip(rows, old_rows, strict=True)]
        for row, names in why.items():
            if rows[row] != old_rows[row]:
                self._add(split, row, " ".join(old_rows[row]), " ".join(rows[row]), names)
        return replace(part, texts=[put_spaces_back(*pair) for pair in zip(part.texts, rows, strict=True)])

    def _clean_columns(self, split: str, part: Any, steps: Sequence[CleaningStep]) -> Any:
        if part.pairs is None:
            return replace(part, texts=self._clean_single(split, part.texts, steps))
        (texts, changes), (pairs, others) = (self._run(each, steps) for each in (part.texts, part.pairs))
        for row in sorted(changes.steps.keys() | others.steps.keys()):
            old = (changes.before.get(row, part.texts[row]), others.before.get(row, part.pairs[row]))
            names = dict.fromkeys(chain(changes.steps.get(row, ()), others.steps.get(row, ())))
            self._add(split, row, "\n".join(old), f"{texts[row]}\n{pairs[row]}", names)
        return replace(part, texts=texts, pairs=pairs)

    def _clean_single(self, split: str, texts: Sequence[str], steps: Sequence[CleaningStep]) -> Sequence[str]:
        """Returns the cleaned texts, in memory or, as they were, in a file; few thousand are held at a time."""

        def iterate() -> Iterator[pa.Array]:
            first = 0
            for array, changes in clean_column(texts, steps, self.prepared, processes=self.processes):
                for row, names in changes.steps.items():
                    self._add(split, row, changes.before[row], array[row - first].as_py(), names)
                first += len(array)
                self.advance(len(array))
                yield array

        if isinstance(texts, StoredTexts):
            self.scratch.mkdir(parents=True, exist_ok=True)
            file = self.scratch / f"{split}-{steps[0].name}.parquet"
            return StoredTexts.write(file, chain.from_iterable(array.to_pylist() for array in iterate()))
        return TextColumn(pa.chunked_array([*iterate()], pa.string()))

    def _run(self, texts: Sequence[str], steps: Sequence[CleaningStep]) -> tuple[TextColumn, TextChanges]:
        changes, arrays = TextChanges(), []
        for array, part_changes in clean_column(texts, steps, self.prepared, processes=self.processes):
            arrays.append(array)
            changes.before |= part_changes.before
            changes.steps |= part_changes.steps
        return TextColumn(pa.chunked_array(arrays, pa.string())), changes

    def _add(self, split: str, row: int, before: str, after: str | None, why: Iterable[str], reason: str = "") -> None:
        cleaned = CleanedRow(split, row, before, after, ", ".join(why) + (f": {reason}" if reason else ""))
        if self._waiting is None:
            self._take(cleaned)
        else:
            self._waiting.write(json.dumps(cleaned) + "\n")

    def _take(self, row: CleanedRow) -> None:
        """Counts and records a row that was changed or dropped by steps."""
        kind = "dropped" if row.after is None else "changed"
        for name in row.why.partition(":")[0].split(", "):
            self._count(f"{row.split}_{kind}_{name}", row)
        self.record(row)

    def _count(self, name: str, row: CleanedRow) -> None:
        self.counts[name] += 1
        self.examples.setdefault(name, row)

    def describe(self) -> list[str]:
        """Returns a sentence for each kind of change, with its count and an example."""
        return [
            f"clean: {name.replace('_', ', ', 1).replace('_', ' by ')}: {count:,} rows, such as "
            f"{_describe_change(self.examples[name])}"
            for name, count in sorted(self.counts.items())
        ]

    def name_counts(self) -> dict[str, int | str]:
        """Returns the counts by their names in notes and metrics."""
        return {f"clean_{name}": count for name, count in sorted(self.counts.items())}

    def add_label(
        self, row: int, part: Any, label: Any, better: Any, names: Sequence[str], how: str, doubt: float
    ) -> None:
        """Records a row of the cleaned train whose label is wrong with the probability `doubt`.

        `how` is the value of the step labels.
        """
        current, suggested = (describe_label(each, names) for each in (label, better))
        kind = {"report": "doubtful", "drop": "dropped", "unlabel": "withheld", "relabel": "changed"}[how]
        text = _join_row(part, row)
        reason = f"labels: {current} is wrong with a probability of {doubt:.0%}, most likely it is {suggested}"
        reason += ", left as it is" if how == "report" else ""
        cleaned = CleanedRow("train", int(self.numbers["train"][row]), text, None if how == "drop" else text, reason)
        self._count(f"train_{kind}_labels", cleaned)
        self.record(cleaned)

    def _drop_rows(self, split: str, parts: dict[str, Any]) -> Any:
        """Returns a part without the rows that its filters drop; each filter judges what the ones before it left."""
        part = parts[split]
        numbers = np.arange(len(part))
        filters = [step for step in self.config.find_steps() if not step.is_text_step and step.name != "labels"]
        for step in [NO_TEXT, *filters]:
            dropped = self._find_dropped(step, part, parts) if len(part) else {}
            if step is not NO_TEXT:
                self.advance(len(parts[split]))
            if dropped:
                texts = JoinedTexts(part).take(np.array(sorted(dropped)))
                for (row, reason), text in zip(sorted(dropped.items()), texts, strict=True):
                    self._add(split, int(numbers[row]), text, None, [step.name], reason)
                remaining = np.setdiff1d(np.arange(len(part)), np.fromiter(dropped, np.int64, len(dropped)))
                part, numbers = take_rows(part, remaining), numbers[remaining]
        self.numbers[split] = numbers
        return part

    def _find_dropped(self, step: CleaningStep, part: Any, parts: dict[str, Any]) -> dict[int, str]:
        """Returns row -> reason for the rows that a step drops."""
        texts = JoinedTexts(part)
        if step is NO_TEXT:
            return {row: "no text is left" for row, text in enumerate(texts) if not text.strip()}
        if step.name == "duplicates":
            return find_duplicates(part)
        if step.name == "near-duplicates":
            return _describe(find_near_duplicates(texts, float(step.value)), "nearly equals row {}", texts)
        if step.name == "overlap":
            reasons: dict[int, str] = {}
            for split in EVALUATED:
                if len(parts[split]):
                    others = JoinedTexts(parts[split])
                    similar = find_similar(texts, others, float(step.value))
                    reasons = _describe(similar, f"nearly equals a row of {split}: {{}}", others) | reasons
            return reasons
        judge = self._build_filter(step, texts)
        judged = ((row, judge(text)) for row, text in enumerate(texts))
        return {row: reason for row, reason in judged if reason}

    def _build_filter(self, step: CleaningStep, texts: Iterable[str]) -> Reason:
        if step.name == "language":
            return build_language_filter(texts, step.value)
        return build_length_filter(step.value) if step.name == "length" else build_symbol_filter(step.value)


@dataclass(frozen=True)
class JoinedTexts(Sequence[str]):
    """The texts of a part as one text per row: of pairs both, and of a tagger the words with blanks between them."""

    part: Any
    pairs: None = None

    @property
    def texts(self) -> "JoinedTexts":
        """The texts themselves, as of a part."""
        return self

    def __len__(self) -> int:
        return len(self.part)

    def __getitem__(self, row: Any) -> Any:
        return _join_row(self.part, row)

    def __iter__(self) -> Iterator[str]:
        return _iterate_texts(self.part)

    def take(self, rows: np.ndarray) -> list[str]:
        """Returns the texts of some rows."""
        if self.part.pairs is None and not _is_tagged(self.part):
            return list(select_texts(self.part.texts, rows))
        return [_join_row(self.part, row) for row in rows.tolist()]


def find_duplicates(part: Any) -> dict[int, str]:
    """Returns row -> reason for rows whose text equals an earlier one's without case and punctuation."""
    texts = JoinedTexts(part)
    keys = [np.frombuffer(each.buffers()[1], np.uint64)[::2] for each in iterate_text_keys(texts)]
    pairs = pair_equal_keys(np.concatenate(keys))
    pairs = pairs[: len(pairs) // 2]  # each with the first of its key
    reasons = {}
    for (first, row), earlier in zip(pairs.tolist(), texts.take(pairs[:, 0]), strict=True):
        differs = len(part.labels) and part.labels[first] != part.labels[row]
        reasons[row] = f"equals {earlier!r}" + (", which has another label" if differs else "")
    return reasons


def _write_part(part: Any, file: Path) -> None:
    fresh = file.with_suffix(".new")
    if isinstance(part.texts, StoredTexts):
        part.texts.copy_to(fresh)
    else:
        pa.parquet.write_table(part.table(), fresh)
    fresh.replace(file)


def _read_part(like: Any, file: Path) -> Any:
    if isinstance(like.texts, StoredTexts):
        return replace(like, texts=StoredTexts(file))
    return type(like).from_table(pa.parquet.read_table(file))


def _describe_change(row: CleanedRow) -> str:
    before, after = (text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…" for text in (row.before, row.after or ""))
    return f"{before!r} to {after!r}" if after and after != before else f"{before!r} ({row.why.partition(': ')[2]})"


def describe_label(label: Any, names: Sequence[str]) -> str:
    """Returns the name of a label, or the names of several."""
    if isinstance(label, list):
        return " and ".join(name for name, is_set in zip(names, label, strict=True) if is_set) or "no label"
    return str(names[label])


def _describe(matches: np.ndarray, reason: str, others: Sequence[str]) -> dict[int, str]:
    return {row: reason.format(repr(others[int(matches[row])])) for row in np.flatnonzero(matches >= 0).tolist()}


def put_spaces_back(old: Sequence[str], words: Sequence[str]) -> list[str]:
    """Returns the words, each after the spaces that the old word in its place starts with."""
    return [each[: len(each) - len(each.lstrip())] + word for each, word in zip(old, words, strict=True)]


def _is_tagged(part: Any) -> bool:
    return len(part.texts) > 0 and not isinstance(part.texts[0], str)


def _join_row(part: Any, row: int) -> str:
    text = part.texts[row]
    text = text if isinstance(text, str) else " ".join(text)
    return text if part.pairs is None else f"{text}\n{part.pairs[row]}"


def _iterate_texts(part: Any) -> Iterator[str]:
    texts = (text if isinstance(text, str) else " ".join(text) for text in part.texts)
    if part.pairs is None:
        yield from texts
    else:
        yield from ("\n".join(pair) for pair in zip(texts, part.pairs, strict=True))
