"""Blocks of tokens for general distillation, from plain text of any size."""

from collections.abc import Sequence
from functools import partial
from typing import TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from distill.data.batches.batches import EncodedRows
from distill.data.batches.token_blocks import LanguageBlocks, token_blocks
from distill.data.masking.masks import MaskedBlocks
from distill.data.sources.text_batches import find_large_text, stream_texts
from distill.data.sources.text_files import read_texts, split_names
from distill.data.stored.rows import StreamBlocks
from distill.data.stored.tokens import StoredTokens
from distill.errors import InputError
from pipelines.runs.stage import Run
from pipelines.settings.commands.distill import GeneralConfig
from pipelines.stages.prepare.tokens import tokens_stage

HELD_OUT = 256  # maximum number of validation blocks; of a small data set one block in eleven
ORDER_STREAM = 7  # random stream for the order of the texts
_Blocks = TypeVar("_Blocks", list[np.ndarray], StreamBlocks)


def load_blocks(
    run: Run, general: GeneralConfig, tokenizer: PreTrainedTokenizerBase, digest: str
) -> tuple[EncodedRows, EncodedRows]:
    """Returns training and held-out blocks of tokens; those of text that may not fit into memory stay in files.

    Args:
        run: The run.
        general: The text, and the number and the length of the blocks.
        tokenizer: Both models' tokenizer.
        digest: Hash of the text.

    Raises:
        InputError: The text doesn't fill more than one block.
    """
    if tokenizer.is_fast and find_large_text(general.data) is not None:
        return store_blocks(run, general, tokenizer, digest)
    return read_blocks(general, tokenizer, run.seed)


def read_blocks(
    general: GeneralConfig, tokenizer: PreTrainedTokenizerBase, seed: int
) -> tuple[EncodedRows, EncodedRows]:
    """Returns training and held-out blocks of tokens.

    Held-out blocks come from the validation split if there is one, otherwise from the end of the shuffled texts.

    Raises:
        InputError: The text doesn't fill more than one block.
    """
    texts = read_texts(general.data, general.text)
    shuffled = [texts[i] for i in np.random.default_rng([seed, ORDER_STREAM]).permutation(len(texts))]
    if "validation" in split_names(general.data):
        validation = read_texts(general.data, general.text, split="validation")
        held_out = token_blocks(tokenizer, validation, general.length, limit=HELD_OUT)
        blocks = token_blocks(tokenizer, shuffled, general.length, limit=general.blocks)
    else:
        limit = limit_with_held_out(general)
        blocks, held_out = hold_out_end(token_blocks(tokenizer, shuffled, general.length, limit=limit))
    return build_rows(general, tokenizer, blocks, held_out)


def store_blocks(
    run: Run, general: GeneralConfig, tokenizer: PreTrainedTokenizerBase, digest: str
) -> tuple[EncodedRows, EncodedRows]:
    """Returns the blocks of `read_blocks` for text that is larger than memory: read from the `tokens` stage.

    All of the training text is tokenized, also for a few blocks of it.

    Raises:
        InputError: As in `read_blocks`.
    """

    def tokenize(split: str) -> StoredTokens:
        large = find_large_text(general.data, split)
        texts = partial(stream_texts, general.data, general.text, split=split)
        count = 0 if large is None else large.count_rows()
        return tokens_stage(run, tokenizer, f"{digest}, {split}, column {general.text}", texts, count)

    tokens = tokenize("train")
    order = np.random.default_rng([run.seed, ORDER_STREAM]).permutation(len(tokens))
    held_out: Sequence[np.ndarray]
    if "validation" in split_names(general.data):
        held_out = StreamBlocks.build(tokenize("validation"), tokenizer, general.length, limit=HELD_OUT)
        blocks = StreamBlocks.build(tokens, tokenizer, general.length, order=order, limit=general.blocks)
    else:
        limit = limit_with_held_out(general)
        blocks, held_out = hold_out_end(StreamBlocks.build(tokens, tokenizer, general.length, order=order, limit=limit))
    return build_rows(general, tokenizer, blocks, held_out)


def limit_with_held_out(general: GeneralConfig) -> int:
    """Returns the maximum number of blocks including those held out; 0 for all."""
    return general.blocks and general.blocks + min(HELD_OUT, max(1, general.blocks // 10))


def hold_out_end(blocks: _Blocks) -> tuple[_Blocks, _Blocks]:
    """Returns (the first blocks, the last ones): one block in eleven, at most HELD_OUT."""
    count = min(HELD_OUT, max(1, len(blocks) // 11))
    return blocks[:-count], blocks[-count:]


def build_rows(
    general: GeneralConfig,
    tokenizer: PreTrainedTokenizerBase,
    blocks: Sequence[np.ndarray],
    held_out: Sequence[np.ndarray],
) -> tuple[EncodedRows, EncodedRows]:
    """Returns the training and the held-out blocks in the form that the loss terms need.

    Raises:
        InputError: There are no blocks to train on.
    """
    if not len(blocks):
        raise InputError(
            f"general.data {general.data!r}: expected more than one block of {general.length} tokens, found fewer"
        )
    rows = [LanguageBlocks(each) for each in (blocks, held_out)]
    if general.loss.uses_outputs:
        return tuple(MaskedBlocks.build(each, general.masking, tokenizer) for each in rows)  # type: ignore[return-value]
    return rows[0], rows[1]
