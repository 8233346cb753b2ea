"""Token embeddings of a lower rank: a narrow table and a map to the hidden width."""

import re

import torch
from torch import Tensor

Weights = dict[str, Tensor]
TABLES = r"(?:^|\.)embeddings\.\w+_embeddings\.weight$"


def narrowed(table: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """A table [words, width] as the product of [words, rank] and [rank, width], the nearest there is.

    The second has orthonormal rows: the directions in which the table's words lie furthest apart.

    Source: Eckart and Young 1936; the eigenvectors of the small Gram matrix instead of a decomposition of the table.
    """
    wide = table.double()
    directions = torch.linalg.eigh(wide.T @ wide).eigenvectors[:, -rank:].flip(1).T.contiguous()
    # A direction's sign is free, and libraries choose differently.
    directions = directions * torch.where(directions.gather(1, directions.abs().argmax(1)[:, None]) < 0, -1.0, 1.0)
    return (wide @ directions.T).to(table), directions.to(table)


def factorised(weights: Weights, projection: str, rank: int) -> Weights:
    """The weights with every table of the embeddings `rank` wide, and `projection` from there to the hidden width."""
    tables = {name: weight for name, weight in weights.items() if re.search(TABLES, name)}
    words = next(name for name in tables if name.endswith("word_embeddings.weight"))
    before = weights.get(projection)
    wide = {name: table if before is None else table @ before.T for name, table in tables.items()}
    _, directions = narrowed(wide[words], rank)
    narrow = {name: table @ directions.T for name, table in wide.items()}
    return weights | narrow | {projection: directions.T.contiguous()}
