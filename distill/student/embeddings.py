"""Low-rank token embeddings: a narrow table and a projection to the hidden width."""

import re

import torch
from torch import Tensor

from distill.slicing.weights import Weights

_TABLES = r"(?:^|\.)embeddings\.\w+_embeddings\.weight$"


def approximate_table(table: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Returns the best rank-`rank` approximation of a table [words, width] as factors [words, rank] and [rank, width].

    The second factor has orthonormal rows: the table's principal directions.

    Source: Eckart and Young 1936; computed from the eigenvectors of the small Gram matrix instead of a decomposition of
    the table.
    """
    wide = table.double()
    directions = torch.linalg.eigh(wide.T @ wide).eigenvectors[:, -rank:].flip(1).T.contiguous()
    # The sign of a direction is arbitrary and differs between libraries, so it is fixed here.
    directions = directions * torch.where(directions.gather(1, directions.abs().argmax(1)[:, None]) < 0, -1.0, 1.0)
    return (wide @ directions.T).to(table), directions.to(table)


def factorise_all_tables(weights: Weights, projection: str, rank: int) -> Weights:
    """Returns the weights with all embedding tables reduced to width `rank`, and `projection` back to full width."""
    tables = {name: weight for name, weight in weights.items() if re.search(_TABLES, name)}
    words = next(name for name in tables if name.endswith("word_embeddings.weight"))
    before = weights.get(projection)
    wide = {name: table if before is None else table @ before.T for name, table in tables.items()}
    _, directions = approximate_table(wide[words], rank)
    narrow = {name: table @ directions.T for name, table in wide.items()}
    return weights | narrow | {projection: directions.T.contiguous()}
