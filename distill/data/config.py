"""Where the text comes from and how it is read."""

from dataclasses import dataclass
from typing import Literal

from distill.errors import InputError


@dataclass(frozen=True)
class DataConfig:
    """What to read and how to cut it.

    Args:
        path: A folder (with one train file, and optionally one validation or dev and one test file), one file (csv,
            tsv, json, jsonl, parquet, conll, or any of these compressed as .gz) or the id of a data set on the Hugging
            Face hub.
        text: Column with the text; found by name when left out.
        text_pair: Column with the second text of a pair; found by name when left out.
        label: Column with the label; found by name when left out, for numbers also as `score`.
        unlabelled: File with more text of the same kind, without labels, to distil on.
        subset: Name of the hub data set's configuration.
        validation_fraction: Share of train held out, stratified by label, when there is no validation split.
        test_fraction: Share of the rows held out for the final report when there is no test split.
        test_split: The split that the report is about: the data set's `test`, or its `validation`, as where the test
            split has no labels; rows of train are then held out for validation.
        unknown_labels: What becomes of rows of validation and test whose label train lacks: an `error`, or `drop`
            leaves them out and counts them.
        max_length: Longest text in tokens; longer ones are cut and counted.
        packing: Rows that a language model is trained on: `stream` joins documents and cuts blocks; `documents`
            packs whole ones, none of which sees another; `none` makes each a row. `auto` is stream for plain text and
            documents for conversations, which become rows where the student writes itself.
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
    max_length: int = 256
    packing: Literal["auto", "stream", "documents", "none"] = "auto"

    def __post_init__(self) -> None:
        for name in ("validation_fraction", "test_fraction"):
            value = getattr(self, name)
            if not 0 < value < 1:
                raise InputError(f"data.{name}: expected a share between 0 and 1, found {value}: no rows would be left")
        if self.max_length < 4:
            raise InputError(
                f"data.max_length: expected at least 4 tokens, found {self.max_length}: "
                "special tokens alone would fill every text"
            )
