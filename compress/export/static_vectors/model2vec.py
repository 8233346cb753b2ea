"""Export of static students for model2vec."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.export.common.quiet import quiet
from compress.export.static_vectors.table import build_static_table, copy_backend


def export_model2vec(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes a folder that `model2vec.StaticModel.from_pretrained` loads; its vectors have length 1.

    A classifier's head isn't written.

    Raises:
        ExportError: As in `build_static_table`.
    """
    from model2vec import StaticModel

    table = build_static_table(model, tokenizer, "model2vec")
    folder.mkdir(parents=True, exist_ok=True)
    with quiet():
        StaticModel(table, copy_backend(tokenizer), normalize=True).save_pretrained(folder)


class Model2VecModel:
    """An exported folder in model2vec: texts to vectors."""

    def __init__(self, folder: Path):
        from model2vec import StaticModel

        self.model = StaticModel.from_pretrained(folder)

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Returns the vectors of whole texts, float32 [texts, width]."""
        vectors: np.ndarray = self.model.encode(list(texts), max_length=None).astype(np.float32)
        return vectors
