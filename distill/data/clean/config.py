"""Settings of cleaning: which steps change or drop rows, and with which values."""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

from distill.data.named_values import parse_named_values
from distill.errors import InputError

STANDARD = "encoding,html,unicode,whitespace,language,duplicates,near-duplicates"


class StepKind(NamedTuple):
    """What a step may be set to.

    Args:
        default: Its value if only its name is given.
        values: The values that it may have; empty for a number or another form.
    """

    default: str
    values: tuple[str, ...]


# In the order in which they are applied.
TEXT_STEPS = {
    "encoding": StepKind("", ()),
    "html": StepKind("", ()),
    "markdown": StepKind("", ()),
    "unicode": StepKind("nfc", ("nfc", "nfkc")),
    "urls": StepKind("mask", ("mask", "drop")),
    "emails": StepKind("mask", ("mask", "drop")),
    "users": StepKind("mask", ("mask", "drop")),
    "personal": StepKind("mask", ("mask", "drop")),
    "names": StepKind("mask", ("mask", "drop")),
    "numbers": StepKind("mask", ("mask", "drop")),
    "case": StepKind("lower", ("lower",)),
    "elongations": StepKind("2", ("1", "2", "3")),
    "whitespace": StepKind("all", ("all", "lines")),
    "spelling": StepKind("1", ("1", "2")),
}
ROW_STEPS = {
    "language": StepKind("", ()),
    "length": StepKind("1:", ()),
    "symbols": StepKind("0.5", ()),
    "duplicates": StepKind("", ()),
    "near-duplicates": StepKind("0.9", ()),
    "overlap": StepKind("0.8", ()),
    "labels": StepKind("report", ("report", "drop", "unlabel", "relabel")),
}
CLEANING_STEPS = TEXT_STEPS | ROW_STEPS
PERSON_LABELS = frozenset({"per", "person"})  # of a tagger, without B- and I-
STEP_PACKAGES = {"encoding": "ftfy", "spelling": "symspellpy", "language": "py3langid"}


class CleaningStep(NamedTuple):
    """A step with its value."""

    name: str
    value: str

    @property
    def is_text_step(self) -> bool:
        """Whether the step changes texts; other steps drop or report rows."""
        return self.name in TEXT_STEPS


@dataclass(frozen=True)
class CleanConfig:
    """Cleaning of the data before anything is trained on it.

    Args:
        steps: Cleaning steps, separated by commas, each optionally with a value, such as
            `standard,urls=mask,length=3:200`: encoding, html, markdown, unicode, urls, emails, users, personal, names,
            numbers, case, elongations, whitespace, spelling, language, length, symbols, duplicates, near-duplicates,
            overlap, labels; or the group standard, with `step=off` to leave one out.
        deploy: Steps that also run in deployment, only ones that change texts; validation and test are cleaned by these
            alone, and they are stored with the student.
        words: For spelling: file with additional known words, one per line.
        tagger: For names: token classifier that finds names of persons, a folder or hub id.
        folds: For labels: number of folds; for each, the teacher is trained on the others to predict its labels.
    """

    steps: str = ""
    deploy: str = ""
    words: str = ""
    tagger: str = ""
    folds: int = 3

    def __post_init__(self) -> None:
        steps, deployed = parse_steps(self.steps), parse_steps(self.deploy, "data.clean.deploy")
        for step in deployed:
            if not step.is_text_step:
                raise InputError(
                    f"data.clean.deploy: expected steps that change texts, found {step.name!r}: a deployed model has "
                    "to answer every text"
                )
            if step.name == "names":
                raise InputError(
                    "data.clean.deploy: expected steps that read the text alone, found 'names': every text would wait "
                    "for the tagger"
                )
            if step not in steps:
                raise InputError(
                    f"data.clean.deploy: expected steps of data.clean, found {format_step(step)!r}: the student would "
                    "be trained on other texts than it meets in deployment"
                )
        if bool(self.tagger) != any(step.name == "names" for step in steps):
            raise InputError(
                "data.clean: expected the step names and a tagger (--clean.tagger) together, found "
                + (
                    f"the tagger {self.tagger!r} alone: it would find nothing"
                    if self.tagger
                    else "the step alone: nothing would find names"
                )
            )
        if self.folds < 2:
            raise InputError(f"data.clean.folds: expected at least 2, found {self.folds}: no row would be held out")

    @property
    def requested(self) -> bool:
        """Whether any step is set."""
        return bool(parse_steps(self.steps))

    def find_steps(self) -> tuple[CleaningStep, ...]:
        """Returns the steps in the order in which they are applied."""
        return parse_steps(self.steps)

    def find_deployed(self) -> tuple[CleaningStep, ...]:
        """Returns the steps that also run in deployment, in order."""
        return parse_steps(self.deploy, "data.clean.deploy")


def parse_steps(text: str, setting: str = "data.clean") -> tuple[CleaningStep, ...]:
    """Returns the steps of a comma-separated list in the order in which they are applied.

    Raises:
        InputError: A step is unknown (names the nearest) or given twice, or a value is not one that it may have.
    """
    entries = parse_named_values(text, setting, "steps", CLEANING_STEPS, {"standard": STANDARD})
    values = {name: check_step(name, value, setting) for name, value in entries.items()}
    return tuple(CleaningStep(name, values[name]) for name in CLEANING_STEPS if values.get(name, "off") != "off")


def check_step(name: str, value: str, setting: str) -> str:
    """Returns the value of a step, or its default.

    Raises:
        InputError: The step can't have the value.
    """
    kind = CLEANING_STEPS[name]
    if value == "off" or not value:
        return value or kind.default
    if kind.values and value not in kind.values:
        raise InputError(f"{setting}: step {name}: expected {' or '.join(kind.values)}, found {value!r}")
    if name in READERS:
        READERS[name](value)
    elif not kind.values and name != "language":
        raise InputError(f"{setting}: step {name}: expected no value, found {value!r}: it would be ignored")
    return value


def check_clean_packages(steps: Iterable[CleaningStep]) -> None:
    """Checks that the packages of steps are installed.

    Raises:
        InputError: One isn't.
    """
    for step in steps:
        package = STEP_PACKAGES.get(step.name)
        if package and find_spec(package) is None:
            raise InputError(
                f"data.clean: step {step.name}: expected the package {package}, found none; install it with "
                "pip install '.[clean]', or leave the step out"
            )


def is_person(label: str) -> bool:
    """Returns whether a tagger's label, such as B-PER or person, is that of a person."""
    return label.lower().removeprefix("b-").removeprefix("i-") in PERSON_LABELS


def format_step(step: CleaningStep) -> str:
    """Returns the step as it is written in a list."""
    return f"{step.name}={step.value}" if step.value != CLEANING_STEPS[step.name].default else step.name


def read_length(value: str) -> tuple[int, int | None]:
    """Returns the smallest and the largest number of words, such as (3, 200) of `3:200`; None for no limit.

    Raises:
        InputError: The value has another form, or no row could pass.
    """
    first, colon, last = value.partition(":")
    if not colon or not all(each.isdigit() or not each for each in (first, last)):
        raise InputError(f"data.clean: step length: expected MIN:MAX words, such as 3:200, found {value!r}")
    limits = int(first or 1), int(last) if last else None
    if limits[1] is not None and limits[1] < limits[0]:
        raise InputError(
            f"data.clean: step length: expected MIN:MAX words, such as 3:200, found {value!r}: no row would be left"
        )
    return limits


def read_share(value: str, name: str, least: float) -> float:
    """Returns a share.

    Raises:
        InputError: The value is no number from `least` to 1.
    """
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if not least <= share <= 1:
        raise InputError(f"data.clean: step {name}: expected a number from {least:g} to 1, found {value!r}")
    return share


LEAST_SIMILAR = 0.5  # below it, bands of MinHash signatures miss more than a quarter of the pairs
READERS = {
    "length": read_length,
    "symbols": lambda value: read_share(value, "symbols", 0.0),
    "near-duplicates": lambda value: read_share(value, "near-duplicates", LEAST_SIMILAR),
    "overlap": lambda value: read_share(value, "overlap", LEAST_SIMILAR),
}
