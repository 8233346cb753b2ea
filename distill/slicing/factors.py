"""The two factors of a low-rank token embedding among a model's weights."""

from collections.abc import Mapping

from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.slicing.config import WeightShapes
from distill.slicing.weights import Weights


def find_factor_names(model: PreTrainedModel) -> tuple[str, str]:
    """Returns the names of the token embedding's weight and its projection's, whether or not the latter exists."""
    table = model.get_input_embeddings()
    name = next(name for name, module in model.named_modules() if module is table)
    return f"{name}.weight", f"{name}.projection.weight"


def find_kept_rank(model: PreTrainedModel, shapes: WeightShapes) -> int:
    """Returns the rank of the token embedding in these shapes, 0 if it isn't factorized."""
    table, projection = find_factor_names(model)
    return shapes[table][1] if projection in shapes else 0


def merge_factor_shapes(model: PreTrainedModel, shapes: WeightShapes) -> dict[str, tuple[int, ...]]:
    """Returns the shapes, with the factors merged into one table if they save nothing at the pruned width."""
    if not find_kept_rank(model, shapes):
        return dict(shapes)
    table, projection = find_factor_names(model)
    (tokens, rank), (width, _) = shapes[table], shapes[projection]
    if count_factor_parameters(tokens, rank, width) < tokens * width:
        return dict(shapes)
    return {name: shape for name, shape in shapes.items() if name != projection} | {table: (tokens, width)}


def merge_factors(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> Weights:
    """Returns the weights with the two factors of the embedding merged into one table."""
    table, projection = find_factor_names(model)
    rest = {name: weight for name, weight in weights.items() if name != projection}
    return rest | {table: nn.functional.linear(weights[table], weights[projection])}


def count_factor_parameters(tokens: int, rank: int, width: int) -> int:
    """Returns the number of parameters of a table and its projection."""
    return rank * (tokens + width)
