"""Lightning data modules of a run."""

from collections.abc import Callable, Iterator
from typing import Any

import lightning
import torch
from transformers import PreTrainedTokenizerBase

from distill.data.batches.batches import WHOLE_ROWS, EncodedRows, EvalBatches, Signals, TrainBatches
from distill.data.batches.claimed import ClaimedBatches, Claims
from distill.data.batches.encode import Batch
from distill.data.batches.encode import encode_samples as encode_texts
from distill.data.batches.packing import find_padding_id
from distill.data.batches.rank_speeds import RankSpeeds
from distill.data.batches.sampling import RowSampler
from distill.data.splits.examples import Splits


class RowsDataModule(lightning.LightningDataModule):
    """A data module for padded batches of rows that are already encoded.

    Args:
        train, validation: The rows: `Encoded`, `LanguageBlocks` or `MaskedBlocks`.
        pad_id: Id of the padding.
        batch_size: Rows per batch, over all processes.
        batch_tokens: Tokens with padding per training batch instead of rows; 0 counts rows.
        seed: Seed of the order of training batches.
        signals: A `CacheReader`: training batches contain the teacher's signals, read ahead of the step.
        threads: Threads that collate batches, and read their signals, ahead of the step; 0 collates them in the step.
    """

    def __init__(
        self,
        train: EncodedRows,
        validation: EncodedRows,
        *,
        pad_id: int = 0,
        batch_size: int = 32,
        batch_tokens: int = 0,
        seed: int = 0,
        signals: Signals | None = None,
        threads: int = 1,
    ):
        super().__init__()
        self.train, self.validation = train, validation
        self.pad_id, self.batch_size, self.batch_tokens, self.seed = pad_id, batch_size, batch_tokens, seed
        self.signals, self.threads = signals, threads
        self.sampler: RowSampler | None = None  # chooses the training rows of each epoch; None: every row once
        self.speeds: RankSpeeds | None = None  # of the processes, by which batches are divided; None: equal
        self.replica: tuple[int, int] | None = None  # (rank, number) of processes that aren't one for Lightning
        self.claims: Claims | None = None  # by which processes claim batches, instead of sharing each
        self.claimed_epochs, self.claimed_batches = 1, 1  # of the training; of a claim
        self.batches: TrainBatches | ClaimedBatches | None = None
        self.position = 0
        self.parts = 1  # micro-batches of a training batch; batches for evaluation are smaller by that factor
        self.wait_share = 0.0  # of the last fit's time, in which training waited for data

    @property
    def epoch_rows(self) -> int:
        """Number of rows of an epoch."""
        return len(self.train) if self.sampler is None else self.sampler.count

    def train_dataloader(self) -> TrainBatches | ClaimedBatches:
        """Returns this process's training batches, from the saved position on."""
        batches = self.build_train_batches()
        if self.claims is None:
            batches.position = self.position
            self.batches = batches
        else:
            self.batches = ClaimedBatches(batches, self.claims, self.claimed_epochs, self.claimed_batches)
        return self.batches

    def build_train_batches(self) -> TrainBatches:
        """Returns this process's training batches, from the first one on."""
        rank, ranks = self.find_rank()
        return TrainBatches(
            self.train,
            self.batch_size,
            self.pad_id,
            batch_tokens=self.batch_tokens,
            seed=self.seed,
            rank=rank,
            ranks=ranks,
            segment=self.find_segment(),
            signals=self.signals,
            threads=self.threads,
            sampler=self.sampler,
            pinned_for=self.find_gpu(),
            speeds=self.speeds,
        )

    def repeat_train_batches(self) -> Iterator[Batch]:
        """Yields this process's batches from the first one on, epoch after epoch; no position is kept."""
        batches = self.build_train_batches()
        while True:
            yield from batches

    def measure_wait_share(self) -> float:
        """Returns the share of the time since the last call in which training waited for data."""
        return self.batches.waiting.measure_share() if self.batches else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the training batches.

        It is saved here as well because a module that queries the number of steps while it builds its schedule makes
        Lightning set up the loader before the checkpoint is read, and the loader's own state is then ignored.
        """
        state = {"position": self.batches.position if self.batches else self.position}
        parts = {"sampler": self.sampler, "speeds": self.speeds}
        return state | {name: part.state_dict() for name, part in parts.items() if part is not None}

    def teardown(self, stage: str) -> None:
        """Resets the position, so that another fit with the same data starts at the first batch."""
        if self.batches is not None:
            self.wait_share = self.batches.waiting.measure_total_share()
        self.position, self.batches = 0, None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self.position = state["position"]
        if self.batches is not None:
            self.batches.position = self.position
        if self.sampler is not None:
            self.sampler.load_state_dict(state["sampler"])
        if self.speeds is not None and "speeds" in state:
            self.speeds.load_state_dict(state["speeds"])

    def find_rank(self) -> tuple[int, int]:
        """Returns the rank of this process among those that read different data, and their number."""
        if self.replica is not None:
            return self.replica
        if self.trainer is None:
            return 0, 1
        kwargs = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None)
        return (kwargs["rank"], kwargs["num_replicas"]) if kwargs else (0, 1)

    def find_segment(self) -> tuple[int, int]:
        """Returns the number of this process's segment of each row's positions, and the number of segments."""
        segment: tuple[int, int] = getattr(getattr(self.trainer, "strategy", None), "segment", WHOLE_ROWS)
        return segment

    def find_gpu(self) -> torch.device | None:
        """Returns the GPU that this process trains on; None on other devices."""
        device = None if self.trainer is None else self.trainer.strategy.root_device
        return device if device is not None and device.type == "cuda" else None

    def val_dataloader(self) -> EvalBatches:
        """Returns this process's batches of the validation split."""
        return self.build_eval_batches(self.validation)

    def build_eval_batches(self, rows: EncodedRows) -> EvalBatches:
        """Returns this process's batches of a split for evaluation, of twice the rows of a micro-batch."""
        rank, ranks = self.find_rank()
        size = max(1, 2 * self.batch_size // self.parts)
        return EvalBatches(rows, size, self.pad_id, rank=rank, ranks=ranks, segment=self.find_segment())


class TextDataModule(RowsDataModule):
    """A data module that encodes the splits with the teacher's tokenizer and provides padded batches.

    Args:
        splits: The result of `load_splits` or another loader.
        tokenizer: The teacher's tokenizer; the student shares it.
        encode: The task's function that encodes a split; encodes texts with a class each by default.
        encode_train: The task's function that encodes the training split, if different.
        max_length: Maximum text length in tokens.
        unlabelled: Also train on the unlabelled texts (their labels are ignored by losses).
        batch_size, batch_tokens, seed, signals, threads: As in `RowsDataModule`.
    """

    train: Any
    validation: Any

    def __init__(
        self,
        splits: Splits,
        tokenizer: PreTrainedTokenizerBase,
        *,
        encode: Callable[..., Any] = encode_texts,
        encode_train: Callable[..., Any] | None = None,
        batch_size: int = 32,
        batch_tokens: int = 0,
        max_length: int = 256,
        seed: int = 0,
        unlabelled: bool = True,
        signals: Signals | None = None,
        threads: int = 1,
    ):
        train = (encode_train or encode)(tokenizer, splits.train, max_length)
        if unlabelled and len(splits.unlabelled):
            train = train.join(encode(tokenizer, splits.unlabelled, max_length))
        super().__init__(
            train,
            encode(tokenizer, splits.validation, max_length),
            pad_id=find_padding_id(tokenizer),
            batch_size=batch_size,
            batch_tokens=batch_tokens,
            seed=seed,
            signals=signals,
            threads=threads,
        )
        self.splits = splits
        parts = {"train": train, "validation": self.validation}
        self.notes = {name: notes for name, part in parts.items() if (notes := getattr(part, "notes", {}))}
        self.test = encode(tokenizer, splits.test, max_length)

    def test_dataloader(self) -> EvalBatches:
        """Returns this process's batches of the test split."""
        return self.build_eval_batches(self.test)
