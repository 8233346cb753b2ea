"""Settings of augmentation: which synthetic examples are made, and how many."""

from dataclasses import dataclass
from typing import Literal

from distill.data.named_values import parse_named_values
from distill.errors import InputError

# Each with the share of words that it changes by default.
RULE_RATES = {"synonyms": 0.2, "contractions": 1.0, "numbers": 1.0, "names": 0.5, "fillers": 0.5}
STATISTICAL_RATES = {"templates": 1.0, "ngrams": 1.0, "masked": 0.4}
ORDER_RATES = {"swap": 0.1, "phrases": 1.0, "sentences": 1.0, "crop": 0.3}
NOISE_RATES = {"insert": 0.1, "delete": 0.1, "keyboard": 0.1, "ocr": 0.1, "case": 0.1, "punctuation": 0.3}
AUGMENT_KINDS = RULE_RATES | STATISTICAL_RATES | ORDER_RATES | NOISE_RATES
WHOLE = ("contractions", "phrases", "sentences", "templates", "ngrams")  # kinds without a share of words
DRAWN = ("templates", "ngrams")  # kinds whose rows aren't changed from one row
GROUPS = {
    "rules": "contractions,numbers",
    "order": ",".join(ORDER_RATES),
    "noise": ",".join(NOISE_RATES),
    "standard": ",".join(("contractions", "numbers", "swap", "crop", "insert", "delete", "keyboard")),
}


@dataclass(frozen=True)
class AugmentConfig:
    """Synthetic examples for the student, made from the training rows after the teacher is trained.

    Args:
        kinds: Kinds of augmentation, separated by commas, each optionally with a share of words to change, such as
            `noise,swap=0.2,masked`: synonyms, contractions, numbers, names, fillers, templates, ngrams, masked, swap,
            phrases, sentences, crop, insert, delete, keyboard, ocr, case, punctuation; or the groups rules, order,
            noise and standard, with `kind=off` to leave one out. Each synthetic row is made by one kind.
        times: Maximum number of synthetic rows per training row.
        ratio: Synthetic rows per training row in each epoch, different ones each time; 0: all.
        labels: What the student learns from a synthetic row: `teacher`, only the teacher's predictions; `row`, also the
            label of the row it was made from, whose tags and answers move with their words.
        agreement: Minimum overlap, from 0 to 1, of the teacher's predicted probabilities for a synthetic row and its
            original; rows below it are dropped. 0: none is.
        lexicon: For synonyms: file with a word and its synonyms on each line, separated by tabs.
        templates: For templates and fillers: YAML file with slots and templates. Empty: templates found in the data.
        model: For masked: folder of a masked language model. Empty: the teacher as it was before fine-tuning.
    """

    kinds: str = ""
    times: int = 10
    ratio: float = 0.0
    labels: Literal["teacher", "row"] = "teacher"
    agreement: float = 0.0
    lexicon: str = ""
    templates: str = ""
    model: str = ""

    def __post_init__(self) -> None:
        rates = self.find_rates()
        if self.times < 1:
            raise InputError(f"augment.times: expected at least 1, found {self.times}")
        if not 0 <= self.ratio <= self.times:
            raise InputError(
                f"augment.ratio: expected 0 to augment.times {self.times}, found {self.ratio:g}: an epoch can't use "
                "more synthetic rows than there are"
            )
        if not 0 <= self.agreement < 1:
            raise InputError(f"augment.agreement: expected at least 0 and less than 1, found {self.agreement:g}")
        for kind, setting in (("synonyms", "lexicon"), ("fillers", "templates")):
            if kind in rates and not getattr(self, setting):
                raise InputError(f"data.augment {kind}: expected a file in augment.{setting}, found none")
        for setting, kinds in (
            ("lexicon", ["synonyms"]),
            ("templates", ["templates", "fillers"]),
            ("model", ["masked"]),
        ):
            if getattr(self, setting) and not any(kind in rates for kind in kinds):
                raise InputError(
                    f"augment.{setting}: expected {' or '.join(kinds)} in data.augment, found "
                    f"{self.kinds or 'none'}: the {'folder' if setting == 'model' else 'file'} would be ignored"
                )

    @property
    def requested(self) -> bool:
        """Whether any kind is set."""
        return bool(self.find_rates())

    def find_rates(self) -> dict[str, float]:
        """Returns kind -> share of words that it changes, in the order of AUGMENT_KINDS."""
        return parse_kinds(self.kinds)


def parse_kinds(text: str) -> dict[str, float]:
    """Returns kind -> share of words, of a comma-separated list.

    Raises:
        InputError: A kind is unknown (names the nearest) or given twice, or a share isn't above 0 and at most 1.
    """
    values = parse_named_values(text, "data.augment", "kinds", AUGMENT_KINDS, GROUPS)
    return {
        kind: read_rate(values[kind], kind) if values[kind] else rate
        for kind, rate in AUGMENT_KINDS.items()
        if values.get(kind, "off") != "off"
    }


def read_rate(value: str, kind: str) -> float:
    """Returns the share of words that a kind changes.

    Raises:
        InputError: The value isn't a share, or the kind has none.
    """
    if kind in WHOLE:
        raise InputError(f"data.augment: {kind}: expected no value, found {value!r}: it would be ignored")
    try:
        rate = float(value)
    except ValueError:
        rate = 0.0
    if not 0 < rate <= 1:
        raise InputError(f"data.augment: {kind}: expected a share of words above 0 and at most 1, found {value!r}")
    return rate
