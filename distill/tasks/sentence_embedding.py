"""Sentence embedding: one vector per text, such that texts of similar meaning have vectors of similar direction."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize
from torchmetrics import Metric
from torchmetrics.functional import spearman_corrcoef
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from distill.checkpoint.config import load_config
from distill.checkpoint.sentence_folder import read_form
from distill.checkpoint.weights import load_model
from distill.data.batches.encode import IGNORED, Encoded
from distill.data.config import DataConfig
from distill.data.rows.sentences import encode_sentences, load_bare_sentences, load_sentences
from distill.data.splits.labelled import Examples, Splits
from distill.models.sentence_encoder import PooledModel, check_projections, pooled_class
from distill.tasks.logit_rows import Batch, OutputRows
from distill.tasks.task import Scorer, Task


class VectorRows(OutputRows):
    """Rows of sentence embedding: a text's vector [rows, width] replaces the logits.

    Labels [rows, 2] are the index of the text's pair and the pair's similarity score.
    """

    def logits(self, batch: Batch, values: Tensor) -> Tensor:
        return values

    def labels(self, batch: Batch) -> Tensor:
        return batch["labels"]

    def signals(self, batch: Batch, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the vectors as `logits`; a cache stores them as `embedding`."""
        return {"logits": given["logits"] if "logits" in given else given["embedding"]}

    def counts(self, batch: Batch) -> list[int]:
        return [1] * len(batch["labels"])

    def distance(self, own: Tensor, given: Mapping[str, Any], labels: Tensor, temperature: float) -> Tensor:
        """Returns the mean squared distance of the unit vectors, 2 · (1 - cosine)."""
        return 2 - 2 * cosine_similarity(own, given["logits"]).mean()

    def point(self, values: Tensor) -> Tensor:
        return normalize(values.float(), dim=-1)


@dataclass(frozen=True)
class SentenceEmbedding(Task):
    """Training on plain text to match a teacher's vectors, scored by the rank correlation of cosines on text pairs."""

    name: ClassVar[str] = "sentence-embedding"
    head: ClassVar[str] = "PooledModel"  # suffix of no stock class: every body can be pooled
    metric_name: ClassVar[str] = "Spearman"
    answers: ClassVar[OutputRows] = VectorRows()
    kept: ClassVar[str] = "embedding"
    keeps_width: ClassVar[bool] = True

    @classmethod
    def read(cls, config: DataConfig, seed: int) -> Splits:
        return load_sentences(config, seed)

    @classmethod
    def read_bare(cls, config: DataConfig) -> Examples:
        return load_bare_sentences(config)

    def encode(self, tokenizer: PreTrainedTokenizerBase, part: Any, max_length: int) -> Encoded:
        return encode_sentences(tokenizer, part, max_length)

    @property
    def auto(self) -> Any:
        return PooledModel

    @classmethod
    def check(cls, config: PretrainedConfig, path: str) -> None:
        """Checks that the checkpoint at `path` fits this task.

        Raises:
            InputError: The checkpoint was trained for another task, its body can't be pooled, or its folder requires an
                unsupported computation.
        """
        super().check(config, path)
        pooled_class(config)
        if Path(path).is_dir():
            read_form(Path(path))

    def settle_tokenizer(self, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
        form = read_form(folder)
        if form is not None and form.max_length is not None:
            tokenizer.model_max_length = min(tokenizer.model_max_length, form.max_length)

    def head_rows(self, config: PretrainedConfig) -> list[int] | None:
        """Returns no rows, as there is no head to match: a body without modules.json is mean-pooled."""
        return []

    def load(self, path: str, seed: int) -> Any:
        self.config(path)
        return self.load_headed(path, [])

    def load_headed(self, path: str, rows: Sequence[int]) -> Any:
        return load_model(PooledModel, path, new_head=True, dtype=torch.float32)

    def whole(self, folder: Path, *, new_head: bool = False) -> Any:
        return super().whole(folder, new_head=True)

    def check_weights(self, folder: Path, role: str, *, new_head: bool = False, finite: bool = True) -> None:
        super().check_weights(folder, role, new_head=True, finite=finite)  # the body's own pooler is not used
        check_projections(folder, load_config(folder))

    def missing_head(self, folder: Path) -> str:
        return ""

    def metric(self) -> Metric:
        return PairRanks()

    def scorer(self, rows: Encoded) -> Scorer:
        return PairScorer(rows)


class PairRanks(Metric):
    """Spearman's correlation of the cosines of text pairs with their similarity scores.

    Vectors are stored until the end, since the two texts of a pair may be in different batches or on different
    processes.
    """

    higher_is_better = True
    full_state_update = False
    vectors: list[Tensor]
    labels: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        for name in ("vectors", "labels"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        known = labels[:, 0] != IGNORED
        self.vectors.append(logits[known].float())
        self.labels.append(labels[known])

    def compute(self) -> Tensor:
        """Returns the correlation over complete pairs; 0 for fewer than two pairs."""
        # After synchronisation over processes a state is one tensor.
        vectors, labels = (torch.cat(each) if isinstance(each, list) else each for each in (self.vectors, self.labels))
        _, pairs, counts = labels[:, 0].unique(return_inverse=True, return_counts=True)
        whole = (counts[pairs] == 2).nonzero()[:, 0]
        order = whole[labels[whole, 0].argsort()]
        if len(order) < 4:
            return vectors.new_zeros(())
        first, second = vectors[order].unflatten(0, (-1, 2)).unbind(1)
        return spearman_corrcoef(cosine_similarity(first, second), labels[order[::2], 1])


class PairScorer:
    """Spearman's and Pearson's correlations of the cosines of text pairs with their similarity scores."""

    def __init__(self, rows: Encoded):
        self.numbers = rows.labels[::2, 1].astype(np.float64)
        self.said: list[np.ndarray] = [np.zeros(0)] * len(rows)

    def update(self, rows: np.ndarray, batch: dict[str, Tensor], logits: Tensor) -> None:
        for row, vector in zip(rows, logits.double().numpy(), strict=True):
            self.said[row] = vector

    def cosines(self) -> np.ndarray:
        """Returns the cosines [pairs], 0 where a vector is 0; rounded to six decimals, so that rounding errors do not
        rank equal pairs.
        """
        first, second = np.stack(self.said[::2]), np.stack(self.said[1::2])
        lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
        return ((first * second).sum(1) / np.maximum(lengths, 1e-12)).round(6)

    def scores(self) -> dict[str, float]:
        from scipy.stats import pearsonr, spearmanr

        said = self.cosines()
        return {
            "Spearman": float(spearmanr(said, self.numbers).statistic),
            "Pearson": float(pearsonr(said, self.numbers).statistic),
        }

    def decisions(self) -> np.ndarray:
        return self.cosines().round(1)
