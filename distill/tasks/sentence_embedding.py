"""Sentence embedding: one vector per text, such that texts of similar meaning have vectors of similar direction."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from distill.checkpoint.auto_class import AutoClass
from distill.checkpoint.config import load_config
from distill.checkpoint.sentence_folder import read_form
from distill.checkpoint.weights import load_model
from distill.data.batches.encode import Batch, Encoded
from distill.data.config import DataConfig
from distill.data.rows.sentences import encode_sentences, load_all_sentences, load_sentences
from distill.data.splits.examples import Examples, Splits
from distill.losses.logits import IGNORED
from distill.losses.teacher_signals import TeacherSignals
from distill.models.sentence_encoder import PooledModel, check_projections, find_encoder_class
from distill.tasks.correlation import pearson, spearman
from distill.tasks.logit_rows import OutputRows
from distill.tasks.scorer import Scorer, concatenate_state
from distill.tasks.task import Task


class VectorRows(OutputRows):
    """Rows of sentence embedding: a text's vector [rows, width] replaces the logits.

    Labels [rows, 2] are the index of the text's pair and the pair's similarity score.
    """

    def logits(self, batch: Batch, values: Tensor) -> Tensor:
        """Returns the vectors unchanged [rows, width]."""
        return values

    def labels(self, batch: Batch) -> Tensor:
        """Returns the index of the text's pair and the pair's similarity score [rows, 2]."""
        return batch["labels"]

    def signals(self, batch: Batch, signals: TeacherSignals) -> TeacherSignals:
        """Returns the vectors as `logits`; a cache stores them as `embedding`."""
        return {"logits": signals["logits"] if "logits" in signals else signals["embedding"]}

    def counts(self, batch: Batch) -> list[int]:
        """Returns one row for each text."""
        return [1] * len(batch["labels"])

    def distance(self, student: Tensor, teacher: TeacherSignals, labels: Tensor, temperature: float) -> Tensor:
        """Returns the mean squared distance of the unit vectors, 2 · (1 - cosine)."""
        return 2 - 2 * cosine_similarity(student, teacher["logits"]).mean()

    def to_comparable(self, values: Tensor) -> Tensor:
        """Returns the unit vectors in float32 [rows, width]."""
        return normalize(values.float(), dim=-1)


@dataclass(frozen=True)
class SentenceEmbedding(Task):
    """Training on plain text to match a teacher's vectors, scored by the rank correlation of cosines on text pairs."""

    name: ClassVar[str] = "sentence-embedding"
    head: ClassVar[str] = "PooledModel"  # suffix of no stock class: every body can be pooled
    metric_name: ClassVar[str] = "Spearman"
    output_rows: ClassVar[OutputRows] = VectorRows()
    needs_teacher_width: ClassVar[bool] = True

    @classmethod
    def read(cls, config: DataConfig, seed: int) -> Splits:
        """Loads sentences to train on, and scored pairs for evaluation; see `load_sentences`."""
        return load_sentences(config, seed)

    @classmethod
    def read_unlabelled(cls, config: DataConfig) -> Examples:
        """Loads every training sentence, and the unlabelled ones."""
        return load_all_sentences(config)

    def encode(self, tokenizer: PreTrainedTokenizerBase, part: Examples, max_length: int) -> Encoded:
        """Returns one row per text, two for a pair; see `encode_sentences`."""
        return encode_sentences(tokenizer, part, max_length)

    @property
    def auto(self) -> AutoClass:
        """`PooledModel`, which is used like an auto class."""
        return cast(AutoClass, PooledModel)

    @classmethod
    def check(cls, config: PretrainedConfig, path: str) -> None:
        """Checks that the checkpoint at `path` fits this task.

        Raises:
            InputError: The checkpoint was trained for another task, its body can't be pooled, or its folder requires an
                unsupported computation.
        """
        super().check(config, path)
        find_encoder_class(config)
        if Path(path).is_dir():
            read_form(Path(path))

    def configure_tokenizer(self, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
        """Limits texts to the maximum length in the folder's sentence form, if it has one."""
        form = read_form(folder)
        if form is not None and form.max_length is not None:
            tokenizer.model_max_length = min(tokenizer.model_max_length, form.max_length)

    def head_rows(self, config: PretrainedConfig) -> list[int] | None:
        """Returns no rows, as there is no head to match: a body without modules.json is mean-pooled."""
        return []

    def load(self, path: str, seed: int) -> PreTrainedModel:
        """Loads the encoder as it is; `seed` has no effect, since there is no new head."""
        self.config(path)
        return self.load_with_head(path, [])

    def load_with_head(self, path: str, rows: Sequence[int]) -> PreTrainedModel:
        """Loads the encoder as it is, in float32."""
        model: PreTrainedModel = load_model(self.auto, path, new_head=True, dtype=torch.float32)
        return model

    def load_checkpoint(self, folder: Path, *, new_head: bool = False) -> PreTrainedModel:
        """Loads the encoder; the body's own pooler may be missing, as it is not used."""
        return super().load_checkpoint(folder, new_head=True)

    def check_weights(self, folder: Path, role: str, *, new_head: bool = False, finite: bool = True) -> None:
        """Checks the weights of the body except its own pooler, which is not used, and those of the Dense modules.

        Raises:
            InputError: As in `Task.check_weights` and `check_projections`.
        """
        super().check_weights(folder, role, new_head=True, finite=finite)
        check_projections(folder, load_config(folder))

    def missing_head(self, folder: Path) -> str:
        """Returns an empty string, as there is no head."""
        return ""

    def scorer(self, rows: Encoded | None = None) -> Scorer:
        """Returns the scorer of pairs."""
        return PairScorer(rows)


class PairScorer(Scorer):
    """Spearman's and, of the recorded samples, Pearson's correlation of the cosines of text pairs with their scores.

    In validation, vectors are stored until the end, since the two texts of a pair may be in different batches or on
    different processes.
    """

    vectors: list[Tensor]
    labels: list[Tensor]

    def __init__(self, rows: Encoded | None = None):
        super().__init__()
        for name in ("vectors", "labels"):
            self.add_state(name, [], dist_reduce_fx="cat")
        self.similarities = rows.labels[::2, 1].astype(np.float64) if rows is not None else np.zeros(0)
        self.recorded: list[np.ndarray] = [np.zeros(0)] * (len(rows) if rows is not None else 0)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Adds the vectors of paired texts [rows, width]; labels [rows, 2] as in `VectorRows`."""
        labelled = labels[:, 0] != IGNORED
        self.vectors.append(logits[labelled].float())
        self.labels.append(labels[labelled])

    def compute(self) -> Tensor:
        """Returns Spearman's correlation over complete pairs; 0 for fewer than two pairs."""
        vectors, labels = concatenate_state(self.vectors), concatenate_state(self.labels)
        if not len(labels):
            return vectors.new_zeros(())
        _, pairs, counts = labels[:, 0].unique(return_inverse=True, return_counts=True)
        complete = (counts[pairs] == 2).nonzero()[:, 0]
        order = complete[labels[complete, 0].argsort()]
        if len(order) < 4:
            return vectors.new_zeros(())
        ordered = vectors[order].double().cpu().numpy()
        cosines = compute_cosines(ordered[::2], ordered[1::2])
        correlation = spearman(cosines, labels[order[::2], 1].double().cpu().numpy())
        return vectors.new_tensor(np.nan_to_num(correlation))

    def record(self, rows: np.ndarray, batch: dict[str, Tensor], logits: Tensor) -> None:
        """Adds the vectors of texts [batch, width]."""
        for row, vector in zip(rows, logits.double().numpy(), strict=True):
            self.recorded[row] = vector

    def cosines(self) -> np.ndarray:
        """Returns the cosines of the recorded pairs [pairs]."""
        return compute_cosines(np.stack(self.recorded[::2]), np.stack(self.recorded[1::2]))

    def scores(self) -> dict[str, float]:
        """Returns Spearman's and Pearson's correlation of the recorded pairs."""
        cosines = self.cosines()
        return {"Spearman": spearman(cosines, self.similarities), "Pearson": pearson(cosines, self.similarities)}

    def decisions(self) -> np.ndarray:
        """Returns the cosines rounded to one decimal [pairs]."""
        return self.cosines().round(1)


def compute_cosines(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns the cosines of vectors [pairs, width], 0 where a vector is 0.

    They are rounded to six decimals, so that rounding errors do not rank equal pairs.
    """
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    cosines: np.ndarray = (first * second).sum(1) / np.maximum(lengths, 1e-12)
    return cosines.round(6)
