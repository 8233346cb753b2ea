"""Texts that occur in more than one split: counted, and left out if they are unlabelled."""

import hashlib
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from distill.data.splits.findings import Findings

KEYS_AT_ONCE = 1 << 20
_KEY_BYTES = 16
_KEPT = ("L", "M", "N", "Sc", "Sm", "So")  # letters, combining marks, digits, currencies, operators, emoji


class _Folding(dict[int, int | str]):
    """A translation table that keeps characters of the categories in _KEPT and maps all others to a blank."""

    def __missing__(self, code: int) -> int | str:
        self[code] = code if unicodedata.category(chr(code)).startswith(_KEPT) else " "
        return self[code]


FOLDING = _Folding()


def normalize_text(text: str) -> str:
    """Returns the text without case and punctuation; unchanged but stripped if nothing else would be left."""
    return " ".join(text.casefold().translate(FOLDING).split()) or text.strip()


def iterate_text_keys(part: Any) -> Iterator[pa.Array]:
    """Yields the digests of a split's rows, of at most KEYS_AT_ONCE rows at a time; see `compute_text_keys`."""
    texts, pairs = iter(part.texts), None if part.pairs is None else iter(part.pairs)
    for _ in range(0, len(part.texts), KEYS_AT_ONCE):
        yield compute_text_keys(islice(texts, KEYS_AT_ONCE), None if pairs is None else islice(pairs, KEYS_AT_ONCE))


def compute_text_keys(texts: Iterable[str], pairs: Iterable[str] | None = None) -> pa.Array:
    """Returns a digest of 16 bytes of each normalized text, or pair of texts."""
    rows = zip(texts, pairs, strict=True) if pairs is not None else zip(texts, strict=True)
    digests = bytearray()
    for row in rows:
        joined = "\n".join(normalize_text(each) for each in row)
        digests += hashlib.blake2b(joined.encode(errors="surrogatepass"), digest_size=_KEY_BYTES).digest()
    count = len(digests) // _KEY_BYTES
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(_KEY_BYTES), count, [None, pa.py_buffer(digests)])


def are_in(keys: pa.Array, others: pa.Array) -> np.ndarray:
    """Returns which keys are among the others, bool [keys]."""
    return np.asarray(pa.compute.is_in(keys, others).to_numpy(zero_copy_only=False), bool)


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
    keys = {name: compute_text_keys(part.texts, part.pairs) for name, part in parts.items() if name != "train"}
    in_train = {name: np.zeros(len(each), bool) for name, each in keys.items()}
    for block in iterate_text_keys(parts["train"]):  # the keys of all training texts may not fit into memory
        for name, split_keys in keys.items():
            in_train[name] |= are_in(split_keys, block)
    for split, other in (("test", "train"), ("validation", "train"), ("test", "validation")):
        count = int((in_train[split] if other == "train" else are_in(keys[split], keys[other])).sum())
        remark = f"{split}: {count:,} of {len(keys[split]):,} {what} also occur in {other}, and stay in both"
        findings.add(f"{split}_texts_also_in_{other}", count, remark)
    unlabelled = keys.get("unlabelled", ())
    if not len(unlabelled):
        return []
    shared = {split: are_in(unlabelled, keys[split]) for split in ("test", "validation")}
    for split in ("test", "validation"):
        count = int(shared[split].sum())
        remark = f"unlabelled: {count:,} of {len(unlabelled):,} {what} were left out, because they occur in {split}"
        findings.add(f"unlabelled_dropped_in_{split}", count, remark)
    count = int(in_train["unlabelled"].sum())
    remark = f"unlabelled: {count:,} of {len(unlabelled):,} {what} also occur in train, and stay in both"
    findings.add("unlabelled_texts_also_in_train", count, remark)
    remaining: list[int] = np.flatnonzero(~(shared["test"] | shared["validation"])).tolist()
    return remaining
