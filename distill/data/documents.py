"""Plain text as a data set: documents to train on, and others held out."""

from collections.abc import Sequence

import numpy as np

from distill.data.config import DataConfig
from distill.data.language import read_texts, split_names
from distill.data.splits import Examples, Splits
from distill.errors import InputError


def load_documents(config: DataConfig, seed: int = 0) -> Splits:
    """Reads the documents of every split; where there is no validation or test split, documents are held out of train,
    or the end of the only one.

    Raises:
        InputError: What `read_texts` raises, a column named for labels, or unlabelled text beside it.
    """
    check_plain(config)
    names = split_names(config.path, config.subset)
    texts = {name: read_texts(config.path, config.text, split=name, subset=config.subset) for name in names}
    notes: dict[str, int | str] = {}
    for split, fraction in (("test", config.test_fraction), ("validation", config.validation_fraction)):
        notes[f"{split}_from"] = "the data set"
        if split not in texts:
            whole = len(texts["train"]) > 1
            texts["train"], texts[split] = held_out(texts["train"], fraction, seed)
            held = f"{len(texts[split])} documents" if whole else f"{fraction:.0%} of the document, its end,"
            notes[f"{split}_from"] = f"{held} held out of train, seed {seed}"
    notes["characters"] = sum(map(len, texts["train"]))
    parts = {name: Examples(texts[name], None) for name in ("train", "validation", "test")}
    return Splits((), **parts, unlabelled=Examples([], None), notes=notes)


def load_bare_documents(config: DataConfig) -> Examples:
    """Every training document."""
    return Examples(read_texts(config.path, config.text, subset=config.subset), None)


def check_plain(config: DataConfig) -> None:
    for name in ("label", "text_pair", "unlabelled"):
        found = getattr(config, name)
        if found is not None:
            raise InputError(
                f"data.{name}: expected none for a language model, found {found!r}: it learns from plain text, all of "
                "it in the training split"
            )


def held_out(texts: Sequence[str], fraction: float, seed: int) -> tuple[list[str], list[str]]:
    """(kept, held): documents drawn by the seed; of a single one the lines at its end.

    Raises:
        InputError: A single document without a line's end to cut it at.
    """
    if len(texts) > 1:
        count = min(len(texts) - 1, max(1, round(len(texts) * fraction)))
        held = set(np.random.default_rng(seed).permutation(len(texts))[:count].tolist())
        return [text for i, text in enumerate(texts) if i not in held], [texts[i] for i in sorted(held)]
    cut = texts[0].rfind("\n", 0, round(len(texts[0]) * (1 - fraction))) + 1
    if not texts[0][:cut].strip() or not texts[0][cut:].strip():
        raise InputError(
            "data: expected several documents or lines, found a single line: nothing could be held out to measure on"
        )
    return [texts[0][:cut]], [texts[0][cut:]]
