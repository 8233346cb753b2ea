"""What students are trained on: texts, and the teacher's signals from a cache."""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from distill.cache import CacheReader
from distill.data.batches.batches import EncodedRows, Signals
from distill.data.batches.data_module import TextDataModule
from distill.data.batches.encode import Batch
from distill.data.batches.encode import encode_samples as encode_texts
from distill.data.sources.stored_texts import StoredTexts
from distill.data.splits.examples import Examples, Splits
from distill.losses.teacher_signals import SignalSource
from distill.tasks.task import Task
from pipelines.runs.stage import Artefact, Run
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.tokenizers import build_cross_tokenizer_rows
from pipelines.stages.cache.stage import CACHE
from pipelines.stages.prepare.tokens import SplitEncoder
from pipelines.stages.prepare.vocabulary import TOKENS_FILE, TranslatedSignals
from pipelines.stages.train.sampling import share_synthetic_rows
from pipelines.stages.train.student_start import StudentStart


def build_training_texts(
    run: Run,
    config: DistillConfig,
    splits: Splits,
    tokenizer: PreTrainedTokenizerBase,
    signals: Signals | None = None,
    task: Task | SplitEncoder | None = None,
    teacher_tokenizer: PreTrainedTokenizerBase | None = None,
) -> TextDataModule:
    """Returns the texts that the student trains on, including unlabelled ones if the loss needs the teacher.

    With `teacher_tokenizer`, a tokenizer that differs from the student's, each row has the text in both tokenizations.
    Stages that every process works on pass a `SplitEncoder` as task, for texts that may not fit into memory.
    """

    def encode_twice(tokenizer: PreTrainedTokenizerBase, part: Examples, length: int) -> EncodedRows:
        assert teacher_tokenizer is not None
        texts = part.texts.load() if isinstance(part.texts, StoredTexts) else part.texts
        return build_cross_tokenizer_rows(config, tokenizer, teacher_tokenizer, texts, length)

    encode_train = encode_twice if teacher_tokenizer is not None else task.encode_train if task else None
    texts = TextDataModule(
        splits,
        tokenizer,
        encode=task.encode if task else encode_texts,
        encode_train=encode_train,
        batch_size=config.train.rows,
        batch_tokens=config.train.batch_tokens,
        max_length=config.data.max_length,
        seed=run.seed,
        unlabelled=config.loss.needs_teacher,
        signals=signals,
    )
    texts.sampler = share_synthetic_rows(splits, len(texts.train), run.seed)
    return texts


def build_labelled_texts(
    run: Run, config: DistillConfig, splits: Splits, tokenizer: PreTrainedTokenizerBase, task: Task | SplitEncoder
) -> TextDataModule:
    """Returns the labelled texts alone, in the form in which they are scored."""
    length = config.data.max_length
    return TextDataModule(splits, tokenizer, encode=task.encode, max_length=length, seed=run.seed, unlabelled=False)


def draw_batches(texts: TextDataModule, count: int, seed: int, size: int) -> Iterator[Batch]:
    """Yields batches of `size` texts from at most `count` training texts, drawn by the seed."""
    rows = np.random.default_rng(seed).permutation(len(texts.train))[:count]
    for start in range(0, len(rows), size):
        yield texts.train.collate(rows[start : start + size], texts.pad_id)


@lru_cache(maxsize=1)
def open_reader(folder: Path) -> CacheReader:
    """Opens a finished cache; the stages of a run share the reader, so that the index is read once."""
    return CacheReader(folder)


def open_cached_signals(cache: Artefact, pruned: StudentStart | None = None) -> SignalSource:
    """Returns the cached signals; a student with fewer tokens queries them with its own tokenizer's ids."""
    reader = open_reader(cache.folder / CACHE)
    if pruned is None or pruned.tokens is None:
        return reader
    return TranslatedSignals(reader, np.load(pruned.tokens.folder / TOKENS_FILE))
