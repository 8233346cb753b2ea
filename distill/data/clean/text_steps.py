"""Steps that change a text on its own, and their application to columns of texts."""

import re
import signal
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context

import numpy as np
import pyarrow as pa
import pyarrow.compute

from distill.data.batches.prefetch import Prefetcher
from distill.data.clean.config import CleaningStep
from distill.data.clean.identifiers import DIGITS, EMAIL, URL, USER, replace_personal
from distill.data.clean.markup import remove_html, remove_markdown
from distill.data.sources.stored_texts import StoredTexts
from distill.data.sources.text_column import TextColumn
from distill.errors import InputError

CLEANED_AT_ONCE = 8192  # cleaned together
INVISIBLE = dict.fromkeys((0x200B, 0x2060, 0xFEFF, 0x00AD))  # zero-width and soft characters
_WORD = re.compile(r"(?<!\w)[^\W\d_]{4,}(?!\w)")
_REPEATED = re.compile(r"([^\W\d_])\1{2,}")
# Runs of blanks, but for one or two plain ones, which stand after a full stop in some texts.
_GAP = re.compile(r"\s{3,}|[^\S ]\s?|\s[^\S ]")
Change = Callable[[str], str]
PREPARED_STEPS = ("names", "spelling")  # need a model, or the words of all texts
NOTHING: Mapping[str, Change] = {}


@dataclass(frozen=True)
class TextStep:
    """A step that changes texts.

    Args:
        name: Its name.
        suspects: Regular expression in the syntax of RE2; texts without a match are left as they are.
        change: Returns the changed text.
    """

    name: str
    suspects: str
    change: Change


@dataclass
class TextChanges:
    """Texts that were changed.

    Args:
        before: Row -> the text before the first step that changed it.
        steps: Row -> the names of the steps that changed it, in order.
    """

    before: dict[int, str] = field(default_factory=dict)
    steps: dict[int, list[str]] = field(default_factory=dict)

    def add(self, row: int, before: str, step: str) -> None:
        """Records that a step changed a row's text."""
        self.before.setdefault(row, before)
        self.steps.setdefault(row, []).append(step)


def build_text_step(step: CleaningStep) -> TextStep:
    """Returns a step that needs no data.

    Raises:
        InputError: The package that a step needs isn't installed.
    """
    name, value = step
    mask = f"<{name.removesuffix('s')}>" if value == "mask" else ""
    built: dict[str, Callable[[], tuple[str, Change]]] = {
        "encoding": lambda: (r"[^\x20-\x7e]", build_repair()),
        "html": lambda: ("[<&]", remove_html),
        "markdown": lambda: (r"[*_`~#>\[]", remove_markdown),
        "unicode": lambda: (r"[^\x00-\x7f]", normalize_fully if value == "nfkc" else normalize),
        "urls": lambda: (r"(?i)https?://|www\.", partial(URL.sub, mask)),
        "emails": lambda: ("@", partial(EMAIL.sub, mask)),
        "users": lambda: ("@", partial(USER.sub, mask)),
        "personal": lambda: (r"\d", replace_personal(value == "mask")),
        "numbers": lambda: (r"\d", partial(DIGITS.sub, mask)),
        "case": lambda: (r"[A-Z]|[^\x00-\x7f]", str.lower),
        "elongations": lambda: (r"\pL\pL\pL", lambda text: shorten_elongations(text, int(value))),
        "whitespace": lambda: (
            r"^\s|\s$|\s\s\s|[\t\n\v\f\r\x1c-\x1f]|[^\x00-\x7f]",
            collapse_lines if value == "lines" else collapse_whitespace,
        ),
    }
    suspects, change = built[name]()
    return TextStep(name, suspects, change)


def build_repair() -> Change:
    """Returns a function that repairs text decoded in the wrong encoding, without changing its typography.

    Control characters and terminal escapes are removed. Source: ftfy (Speer 2019).

    Raises:
        InputError: ftfy isn't installed.
    """
    try:
        import ftfy
    except ImportError as error:
        raise InputError(
            "data.clean: step encoding: expected the package ftfy, found none: broken text can't be repaired; install "
            "it with pip install -e '.[clean]'"
        ) from error
    config = ftfy.TextFixerConfig(
        unescape_html=False,
        uncurl_quotes=False,
        fix_latin_ligatures=False,
        fix_character_width=False,
        normalization=None,
    )
    return lambda text: str(ftfy.fix_text(text, config))


def normalize(text: str) -> str:
    """Returns the text in Unicode's composed normal form."""
    return unicodedata.normalize("NFC", text)


def normalize_fully(text: str) -> str:
    """Returns the text in the composed normal form in which variants of a character, such as ligatures, are one."""
    return unicodedata.normalize("NFKC", text)


def shorten_elongations(text: str, limit: int) -> str:
    """Returns the text with at most `limit` of a letter that a word repeats three times or more.

    Abbreviations in capitals and words of a single letter, such as www, stay.
    """

    def shorten(match: re.Match[str]) -> str:
        word = match[0]
        if word.isupper() or len(set(word.lower())) == 1:
            return word
        return _REPEATED.sub(lambda run: run[1] * limit, word)

    return _WORD.sub(shorten, text)


def collapse_whitespace(text: str) -> str:
    """Returns the text with a blank for each gap and without invisible characters."""
    return _GAP.sub(" ", text.translate(INVISIBLE)).strip()


def collapse_lines(text: str) -> str:
    """Returns the text with a blank for each gap in a line, and at most one empty line between two others."""
    lines = [_GAP.sub(" ", line).strip() for line in text.translate(INVISIBLE).splitlines()]
    return re.sub("\n{3,}", "\n\n", "\n".join(lines)).strip()


def clean_column(
    texts: Sequence[str], steps: Sequence[CleaningStep], prepared: Mapping[str, Change] = NOTHING, *, processes: int = 0
) -> Iterator[tuple[pa.Array, TextChanges]]:
    """Yields the texts after all steps, at most CLEANED_AT_ONCE at a time in their order, and what was changed.

    Args:
        texts: The texts.
        steps: The steps, in the order in which they are applied.
        prepared: See `build_text_steps`.
        processes: Number of processes that clean; 0: this one alone.

    Raises:
        InputError: A package that a step needs isn't installed.
    """
    if not processes:
        built = build_text_steps(steps, prepared)
        for first, array in iterate_arrays(texts):
            yield clean_array(array, built, first)
        return
    context = get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=_start_worker, initargs=(steps, prepared)) as pool:

        def clean(block: tuple[int, pa.Array]) -> tuple[pa.Array, TextChanges]:
            return pool.submit(_clean_in_worker, *block).result()

        yield from Prefetcher(clean, iterate_arrays(texts), threads=processes, depth=2 * processes)


def build_text_steps(steps: Sequence[CleaningStep], prepared: Mapping[str, Change] = NOTHING) -> list[TextStep]:
    """Returns the steps, ready to be applied.

    Args:
        steps: The steps, in the order in which they are applied.
        prepared: Name -> change of each step that needs data or a model; those that aren't here are left out.

    Raises:
        InputError: A package that a step needs isn't installed.
    """
    return [
        TextStep(step.name, r"\pL", prepared[step.name]) if step.name in prepared else build_text_step(step)
        for step in steps
        if step.name in prepared or step.name not in PREPARED_STEPS
    ]


def clean_array(array: pa.Array, steps: Sequence[TextStep], first: int) -> tuple[pa.Array, TextChanges]:
    """Returns the texts after all steps, and what was changed; `first` is the number of the first row."""
    changes = TextChanges()
    for step in steps:
        array = _apply_step(array, step, first, changes)
    return array, changes


_worker_steps: list[TextStep] = []  # of a process that cleans for another


def _start_worker(steps: Sequence[CleaningStep], prepared: Mapping[str, Change]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the other one ends this one
    _worker_steps[:] = build_text_steps(steps, prepared)


def _clean_in_worker(first: int, array: pa.Array) -> tuple[pa.Array, TextChanges]:
    return clean_array(array, _worker_steps, first)


def _apply_step(array: pa.Array, step: TextStep, first: int, changes: TextChanges) -> pa.Array:
    suspected = pa.compute.match_substring_regex(array, step.suspects)
    rows = np.flatnonzero(suspected.to_numpy(zero_copy_only=False))
    if not len(rows):
        return array
    before = array.take(pa.array(rows)).to_pylist()
    after = [step.change(text) for text in before]
    for row, old, new in zip(rows.tolist(), before, after, strict=True):
        if new != old:
            changes.add(first + row, old, step.name)
    return pa.compute.replace_with_mask(array, suspected, pa.array(after, pa.string()))


def iterate_arrays(texts: Sequence[str]) -> Iterator[tuple[int, pa.Array]]:
    """Yields (number of the first text, Arrow array of at most CLEANED_AT_ONCE texts)."""
    first = 0
    if isinstance(texts, StoredTexts):
        for array in texts.iterate_arrays():
            yield first, array
            first += len(array)
        return
    for first in range(0, len(texts), CLEANED_AT_ONCE):
        part = texts[first : first + CLEANED_AT_ONCE]
        yield first, part.array.combine_chunks() if isinstance(part, TextColumn) else pa.array(part, pa.string())
