"""Settings for the data set and how it is read."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from distill.errors import InputError

Packing: TypeAlias = Literal["auto", "stream", "documents", "none"]

USUAL_LENGTH, SHORTEST = 256, 4  # default and minimum of the maximum text length, in tokens


@dataclass(frozen=True)
class DataConfig:
    """Which data set to read, and how to split and truncate it.

    Args:
        path: A folder (with one train file, and optionally one validation or dev and one test file), one file (csv,
            tsv, json, jsonl, parquet, conll, or any of these compressed as .gz), for language models also a txt file or
            a folder of them, or the id of a data set on the Hugging Face hub.
        text: Column with the text; found by its name if not set.
        text_pair: Column with the second text of a pair; found by its name if not set.
        label: Column with the label; found by its name if not set, for numbers also as `score`.
        unlabelled: File with more text of the same kind, without labels, to distill on.
        subset: Name of the hub data set's configuration.
        validation_fraction: Share of train held out, stratified by label, if there is no validation split.
        test_fraction: Share of the rows held out for the final report if there is no test split.
        test_split: The split that the report evaluates: the data set's `test`, or its `validation` (for example if the
            test split has no labels); rows of train are then held out for validation.
        unknown_labels: How to treat rows of validation and test whose label is not in train: `error` raises, `drop`
            leaves them out and counts them.
        max_length: Maximum text length in tokens; longer texts are truncated and counted. 0: 256, or the number of
            positions of the models if that is smaller.
        packing: How documents become the training rows of a language model: `stream` joins them and splits the result
            into blocks; `documents` packs whole documents, which don't attend to each other; `none` makes each a row.
            `auto` is `stream` for plain text and `documents` for conversations, or `none` for conversations if the
            student generates text during training.
    """

    path: str = ""
    text: str | None = None
    text_pair: str | None = None
    label: str | None = None
    unlabelled: str | None = None
    subset: str | None = None
    validation_fraction: float = 0.1
    test_fraction: float = 0.1
    test_split: Literal["test", "validation"] = "test"
    unknown_labels: Literal["error", "drop"] = "error"
    max_length: int = 0
    packing: Packing = "auto"

    def __post_init__(self) -> None:
        for name in ("validation_fraction", "test_fraction"):
            value = getattr(self, name)
            if not 0 < value < 1:
                raise InputError(f"data.{name}: expected a share between 0 and 1, found {value}: no rows would be left")
        if self.max_length != 0 and self.max_length < SHORTEST:
            raise InputError(
                f"data.max_length: expected at least {SHORTEST} tokens, found {self.max_length}: "
                "special tokens alone would fill every text"
            )
