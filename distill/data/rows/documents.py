"""Data sets of plain text: documents to train on, and held-out documents."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from distill.data.config import DataConfig
from distill.data.sources.stored_texts import StoredTexts
from distill.data.sources.text_batches import find_large_text, stream_texts
from distill.data.sources.text_files import read_texts, split_names
from distill.data.splits.evaluated import choose_test
from distill.data.splits.examples import Examples, Splits
from distill.data.splits.findings import Findings
from distill.data.splits.holdout import draw_held_out, hold_out_missing, split_at_random
from distill.data.splits.overlap import report_overlap
from distill.errors import InputError


def load_documents(config: DataConfig, seed: int = 0, scratch: Path | None = None) -> Splits:
    """Reads the documents of every split.

    For a missing validation or test split, documents are held out of train, or the end of the only document. With a
    folder `scratch`, splits that may not fit into memory (see `find_large_text`) are `StoredTexts` in files there.

    Raises:
        InputError: `read_texts` fails, or a label column, a text pair column or an unlabelled file is set.
    """
    check_text_settings(config)
    findings = Findings()
    names = choose_test({name: name for name in split_names(config.path, config.subset)}, config, findings)
    texts = {split: _read_documents(config, name, scratch) for split, name in names.items()}
    hold_out_missing(texts, findings, config, partial(_hold_out_documents, seed))
    findings.counts["characters"] = sum(map(len, texts["train"]))
    parts = {name: Examples(texts[name], None) for name in ("train", "validation", "test")}
    report_overlap(parts, findings, "documents")
    return Splits((), **parts, unlabelled=Examples([], None), notes=findings.counts, remarks=findings.remarks)


def _read_documents(config: DataConfig, split: str, scratch: Path | None) -> Sequence[str]:
    if scratch is None or find_large_text(config.path, split, config.subset) is None:
        return read_texts(config.path, config.text, split=split, subset=config.subset)
    texts = stream_texts(config.path, config.text, split=split, subset=config.subset)
    return StoredTexts.write(scratch / f"{split}.parquet", texts)


def load_all_documents(config: DataConfig) -> Examples:
    """Returns every training document."""
    return Examples(read_texts(config.path, config.text, subset=config.subset), None)


def check_text_settings(config: DataConfig) -> None:
    """Checks that no settings are set that plain text and conversations don't have.

    Raises:
        InputError: A label column, a text pair column or an unlabelled file is set.
    """
    for name in ("label", "text_pair", "unlabelled"):
        value = getattr(config, name)
        if value is not None:
            raise InputError(
                f"data.{name}: expected none for a language model, found {value!r}: it is trained on the text of the "
                "training split alone"
            )


def _hold_out_documents(seed: int, texts: Sequence[str], fraction: float) -> tuple[Sequence[str], Sequence[str], str]:
    """Returns (kept, held, remark): documents drawn by the seed, or the last lines of a single document.

    Raises:
        InputError: A single document has no line break to split it at.
    """
    if len(texts) > 1:
        remaining, held_out = _split_documents(seed, texts, fraction)
        return remaining, held_out, f"{len(held_out)} documents held out of train, seed {seed}"
    cut = texts[0].rfind("\n", 0, round(len(texts[0]) * (1 - fraction))) + 1
    if not texts[0][:cut].strip() or not texts[0][cut:].strip():
        raise InputError(
            "data: expected several documents or lines, found a single line: nothing could be held out for evaluation"
        )
    return [texts[0][:cut]], [texts[0][cut:]], f"{fraction:.0%} of the document, its end, held out of train"


def _split_documents(seed: int, texts: Sequence[str], fraction: float) -> tuple[Sequence[str], Sequence[str]]:
    if not isinstance(texts, StoredTexts):
        return split_at_random(list(texts), fraction, seed, "documents")
    held_out = np.zeros(len(texts), bool)
    held_out[list(draw_held_out(len(texts), fraction, seed, "documents"))] = True
    return texts.separate(held_out)
