"""Texts that occur in more than one split: counted, and left out if they are unlabelled."""

import hashlib
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from distill.data.splits.findings import Findings


class Folding(dict[int, int | str]):
    """A translation table that keeps letters, combining marks and digits, and maps other characters to a blank."""

    def __missing__(self, code: int) -> int | str:
        self[code] = code if unicodedata.category(chr(code))[0] in "LMN" else " "
        return self[code]


FOLDING = Folding()


def normalise(text: str) -> str:
    """Returns the text without case and punctuation; unchanged but stripped if nothing else would be left."""
    return " ".join(text.casefold().translate(FOLDING).split()) or text.strip()


def keys_of(texts: Sequence[str], pairs: Sequence[str] | None = None) -> list[bytes]:
    """Returns a digest of each normalised text, or pair of texts; its size doesn't depend on the text's length."""
    rows = zip(texts, pairs, strict=True) if pairs is not None else zip(texts, strict=True)
    joined = ("\n".join(normalise(each) for each in row) for row in rows)
    return [hashlib.blake2b(each.encode(errors="surrogatepass"), digest_size=16).digest() for each in joined]


def report_overlap(parts: Mapping[str, Any], findings: Findings, what: str = "texts") -> list[int]:
    """Counts the texts of a split that also occur in another, after case and punctuation are removed.

    Labelled rows are counted but kept: published scores refer to a data set's own splits. Unlabelled rows that occur in
    test or validation should be left out, since the student would otherwise train on the texts that it is evaluated on.

    Args:
        parts: `texts` and `pairs` of train, validation, test and, if there are any, unlabelled rows.
        findings: Receives the counts and remarks.
        what: Noun for the rows in the remarks.

    Returns:
        Indices of the unlabelled rows that occur in neither test nor validation.
    """
    keys = {name: keys_of(part.texts, part.pairs) for name, part in parts.items()}
    seen = {name: set(rows) for name, rows in keys.items()}
    for split, other in (("test", "train"), ("validation", "train"), ("test", "validation")):
        count = sum(key in seen[other] for key in keys[split])
        remark = f"{split}: {count:,} of {len(keys[split]):,} {what} also occur in {other}, and stay in both"
        findings.add(f"{split}_texts_also_in_{other}", count, remark)
    unlabelled = keys.get("unlabelled", [])
    if not unlabelled:
        return []
    for split in ("test", "validation"):
        count = sum(key in seen[split] for key in unlabelled)
        remark = f"unlabelled: {count:,} of {len(unlabelled):,} {what} were left out, because they occur in {split}"
        findings.add(f"unlabelled_dropped_in_{split}", count, remark)
    count = sum(key in seen["train"] for key in unlabelled)
    remark = f"unlabelled: {count:,} of {len(unlabelled):,} {what} also occur in train, and stay in both"
    findings.add("unlabelled_texts_also_in_train", count, remark)
    measured = seen["test"] | seen["validation"]
    return [i for i, key in enumerate(unlabelled) if key not in measured]
