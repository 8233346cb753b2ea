"""Low-rank token embeddings: a narrow table and a projection to the hidden width."""

import re

from distill.slicing.factorize import factorize_table
from distill.slicing.weights import Weights

_TABLES = r"(?:^|\.)embeddings\.\w+_embeddings\.weight$"


def factorize_all_tables(weights: Weights, projection: str, rank: int) -> Weights:
    """Returns the weights with all embedding tables reduced to width `rank`, and `projection` back to full width."""
    tables = {name: weight for name, weight in weights.items() if re.search(_TABLES, name)}
    word_table = next(name for name in tables if name.endswith("word_embeddings.weight"))
    before = weights.get(projection)
    wide = {name: table if before is None else table @ before.T for name, table in tables.items()}
    _, directions = factorize_table(wide[word_table], rank)
    narrow = {name: table @ directions.T for name, table in wide.items()}
    return weights | narrow | {projection: directions.T.contiguous()}
