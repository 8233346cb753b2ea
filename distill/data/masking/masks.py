"""Deterministic masks for masked language models: a function of the sample, the seed and the epoch."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from transformers import PreTrainedTokenizerBase

from distill.data.batches.encode import Batch, pad_rows, pad_tokens
from distill.data.batches.token_blocks import LanguageBlocks
from distill.data.masking.config import MaskConfig
from distill.errors import InputError
from distill.losses.logits import IGNORED


def mask_tokens(
    ids: np.ndarray,
    epoch: int,
    config: MaskConfig,
    *,
    mask_id: int,
    vocabulary: int,
    special_ids: Sequence[int] | np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Masks tokens of one unpadded sample, as a function only of its ids, the settings and `epoch` % passes.

    Every token that is not special is chosen with probability `rate`; if none is chosen, the token with the smallest
    draw is.

    Args:
        ids: Token ids [length], unpadded: with padding the mask of a sample would depend on its batch.
        epoch: Number of the epoch, from 0.
        config: Rates, seed and passes.
        mask_id: Id of the mask token; counts as special.
        vocabulary: Random tokens are drawn from the ids below this number.
        special_ids: Ids that are neither chosen nor drawn.

    Returns:
        The masked input ids, int64 [length], and the positions to predict, bool [length].

    Raises:
        InputError: The epoch is negative, the mask id is outside the vocabulary, or every id that random tokens could
            be drawn from is special.

    Source: BERT (Devlin et al. 2019, section 3.1); we choose each token independently, not a fixed number per sample.
    """
    special = np.union1d(np.asarray(special_ids, np.int64), [mask_id])
    special = special[(special >= 0) & (special < vocabulary)]
    check_mask_inputs(epoch, config, mask_id, vocabulary, special)
    choice_bits, kind_bits, token_bits = draw_bits(ids, epoch % config.passes, config.seed)
    kind = to_uniform(kind_bits)
    draw = np.where(np.isin(ids, special), np.inf, to_uniform(choice_bits))
    positions = draw < config.rate
    if not positions.any() and np.isfinite(draw).any():
        positions[draw.argmin()] = True
    masked = np.asarray(ids, np.int64).copy()
    masked[positions & (kind < config.replaced)] = mask_id
    randomized = positions & (kind >= config.replaced) & (kind < config.replaced + config.random)
    masked[randomized] = to_regular_ids(token_bits[randomized], vocabulary, special)
    return masked, positions


def check_mask_inputs(epoch: int, config: MaskConfig, mask_id: int, vocabulary: int, special: np.ndarray) -> None:
    """Checks that a mask can be drawn.

    Raises:
        InputError: The epoch is negative, the mask id is outside the vocabulary, or every id that random tokens could
            be drawn from is special.
    """
    if epoch < 0:
        raise InputError(f"epoch: expected 0 or more, found {epoch}: no epoch of a training uses its mask")
    if not 0 <= mask_id < vocabulary:
        raise InputError(
            f"mask id: expected an id from 0 to {vocabulary - 1}, found {mask_id}: the model has no embedding for it"
        )
    if config.random > 0 and len(special) == vocabulary:
        raise InputError(
            f"masking.random: expected ids to draw from, found {vocabulary} ids, all special: "
            "no token could replace another"
        )


def draw_bits(ids: np.ndarray, number: int, seed: int) -> np.ndarray:
    """Returns random 64-bit integers for mask `number` of a sample: uint64 [3, length].

    They are raw because NumPy keeps Philox's output stable across versions, but not that of Generator's methods, and a
    cache must stay valid after an upgrade.
    """
    head = struct.pack("<qq", seed, number)
    name = blake2b(head + np.asarray(ids).astype("<i4").tobytes(), digest_size=16, person=b"language mask")
    key = np.frombuffer(name.digest(), "<u8").astype(np.uint64)
    return np.random.Philox(key=key).random_raw(3 * len(ids)).reshape(3, len(ids))


def to_uniform(bits: np.ndarray) -> np.ndarray:
    """Converts random 64-bit integers to float64 in [0, 1)."""
    return (bits >> np.uint64(11)) * 2.0**-53  # 53 bits: all 64 could round up to 1


def to_regular_ids(bits: np.ndarray, vocabulary: int, special: np.ndarray) -> np.ndarray:
    """Maps random integers uniformly to the ids below `vocabulary` that are not special (sorted, no id twice)."""
    if not len(bits):
        return np.zeros(0, np.int64)
    ranks = (bits % np.uint64(vocabulary - len(special))).astype(np.int64)
    # The id of rank r is r plus the number of special ids before it; the j-th special id precedes ranks >= its id - j.
    return ranks + np.searchsorted(special - np.arange(len(special)), ranks, side="right")


@dataclass(frozen=True)
class MaskedBlocks:
    """Blocks whose batches are masked; see `mask_tokens` for the fields."""

    blocks: LanguageBlocks
    config: MaskConfig
    mask_id: int
    vocabulary: int
    special_ids: tuple[int, ...]

    @classmethod
    def build(cls, blocks: LanguageBlocks, config: MaskConfig, tokenizer: PreTrainedTokenizerBase) -> "MaskedBlocks":
        """Creates masked blocks with the mask token, vocabulary size and special ids of the tokenizer.

        Raises:
            InputError: The tokenizer has no mask token.
        """
        if tokenizer.mask_token_id is None:
            raise InputError(
                "tokenizer: expected a mask token, found none: no token could be masked; "
                "the tokenizer is not one of a masked language model"
            )
        # len(tokenizer), not the number of embedding rows: padded embeddings end in rows that no token uses.
        return cls(blocks, config, int(tokenizer.mask_token_id), len(tokenizer), tuple(tokenizer.all_special_ids))

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each block, int64 [blocks]."""
        return self.blocks.lengths

    @property
    def notes(self) -> dict[str, int]:
        """The blocks' counts of what was truncated or left out."""
        return self.blocks.notes

    def collate(self, rows: Sequence[int] | np.ndarray, pad_id: int, epoch: int = 0) -> Batch:
        """Masks the rows for `epoch` and pads them to the longest, [batch, length] each.

        input_ids (masked), attention_mask and labels (the true id at the positions, else IGNORED) are int64, positions
        is bool.
        """
        ids = [self.blocks.input_ids[i] for i in rows]
        sizes = {"mask_id": self.mask_id, "vocabulary": self.vocabulary}
        masked = [mask_tokens(row, epoch, self.config, special_ids=self.special_ids, **sizes) for row in ids]
        labels = [np.where(positions, row, IGNORED) for row, (_, positions) in zip(ids, masked, strict=True)]
        return pad_tokens([row for row, _ in masked], pad_id) | {
            "positions": pad_rows([positions for _, positions in masked], 0).bool(),
            "labels": pad_rows(labels, IGNORED),
        }
