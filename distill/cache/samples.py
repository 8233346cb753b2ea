"""Builds the `Samples` of a cache from tokenized, masked or packed data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from distill.cache.format.key import sample_key, sample_keys
from distill.cache.plan import Samples
from distill.data.batches.batches import EncodedRows
from distill.data.batches.encode import TokenRows, pad_rows, pad_tokens
from distill.data.batches.packing import PackedRows
from distill.data.masking.masks import MaskedBlocks, mask_tokens

KEY_BATCH_ROWS = 256  # rows whose keys are computed together


def build_samples(data: TokenRows | MaskedBlocks | PackedRows, pad_id: int) -> Samples:
    """Returns the samples of the data; for masked text, each pass's masking of a document is a separate sample."""
    if isinstance(data, PackedRows):
        return from_batches(_repeat_masking(data) if isinstance(data.documents, MaskedBlocks) else data, pad_id)
    if isinstance(data, MaskedBlocks):
        masked_ids, positions = _mask_every_pass(data)
        return from_rows(masked_ids, None, positions, pad_id)
    return from_rows(data.input_ids, data.token_type_ids, data.positions, pad_id)


@dataclass(frozen=True)
class _MaskedDocuments(TokenRows):
    """Masked documents, ids int64, with the positions to predict, bool, [length] each."""

    input_ids: list[np.ndarray]
    masked: list[np.ndarray]
    token_type_ids: None = None

    @property
    def positions(self) -> list[np.ndarray]:
        """Positions to predict, bool [length] each."""
        return self.masked

    def collate(self, rows: Sequence[int] | np.ndarray, pad_id: int, epoch: int = 0) -> dict[str, Tensor]:
        """Pads the rows to a batch; they are masked already, so the epoch changes nothing."""
        return self.tokens(rows, pad_id)


def _repeat_masking(data: PackedRows) -> PackedRows:
    """Returns the packed rows of masked documents for every pass, one pass after another."""
    documents = data.documents
    assert isinstance(documents, MaskedBlocks)
    firsts = [number * len(documents) for number in range(documents.config.passes)]
    return PackedRows(
        _MaskedDocuments(*_mask_every_pass(documents)), [row + first for first in firsts for row in data.rows]
    )


def from_batches(data: EncodedRows, pad_id: int) -> Samples:
    """Builds samples of rows whose contents are available only as collated batches."""

    def batch(rows: Sequence[int]) -> Mapping[str, Tensor]:
        return {name: value for name, value in data.collate(rows, pad_id).items() if name != "labels"}

    parts = [range(first, min(first + KEY_BATCH_ROWS, len(data))) for first in range(0, len(data), KEY_BATCH_ROWS)]
    return Samples([key for part in parts for key in sample_keys(batch(part))], data.lengths, batch)


def from_rows(
    input_ids: Sequence[np.ndarray],
    token_type_ids: Sequence[np.ndarray] | None,
    positions: Sequence[np.ndarray] | None,
    pad_id: int,
) -> Samples:
    """Builds samples of unpadded rows: ids and types [length] integers, positions [length] booleans."""

    def batch(rows: Sequence[int]) -> Mapping[str, Tensor]:
        padded = pad_tokens([input_ids[i] for i in rows], pad_id)
        if token_type_ids is not None:
            padded["token_type_ids"] = pad_rows([token_type_ids[i] for i in rows], 0)
        if positions is not None:
            padded["positions"] = pad_rows([positions[i] for i in rows], 0).bool()
        return padded

    keys = [
        sample_key(
            ids,
            token_type_ids[i] if token_type_ids is not None else None,
            positions[i] if positions is not None else None,
        )
        for i, ids in enumerate(input_ids)
    ]
    return Samples(keys, np.fromiter(map(len, input_ids), np.int64, len(input_ids)), batch)


def _mask_every_pass(data: MaskedBlocks) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns the masked ids int64 and the positions to predict, bool, [length] each, one pass after another."""
    ids_of_vocabulary = {"mask_id": data.mask_id, "vocabulary": data.vocabulary, "special_ids": data.special_ids}
    masked = [
        mask_tokens(ids, epoch, data.config, **ids_of_vocabulary)  # type: ignore[arg-type]
        for epoch in range(data.config.passes)
        for ids in data.blocks.input_ids
    ]
    return [masked_ids for masked_ids, _ in masked], [positions for _, positions in masked]
