"""Export of static students for Sentence Transformers."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.export.common.quiet import quiet
from compress.export.static_vectors.table import build_static_table, copy_backend


def export_static_embedding(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes a folder that `SentenceTransformer` loads, with the modules StaticEmbedding and Normalize.

    A classifier's head isn't written.

    Raises:
        ExportError: As in `build_static_table`.
    """
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Normalize, StaticEmbedding

    table = torch.from_numpy(build_static_table(model, tokenizer, "static-embedding"))
    with quiet():
        modules = [StaticEmbedding(copy_backend(tokenizer), embedding_weights=table), Normalize()]
        SentenceTransformer(modules=modules, device="cpu").save(str(folder))


class StaticEmbeddingModel:
    """An exported folder in Sentence Transformers: texts to vectors."""

    def __init__(self, folder: Path):
        from sentence_transformers import SentenceTransformer

        self.model = SentenceTransformer(str(folder), device="cpu")

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Returns the vectors of whole texts, float32 [texts, width]."""
        vectors: np.ndarray = self.model.encode(list(texts), show_progress_bar=False)
        return vectors
