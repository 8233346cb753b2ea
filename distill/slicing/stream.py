"""The residual stream of encoders that norm what each sublayer has added to it: its norms and the products around them.

In these families (BERT and those that share its layers, DistilBERT) a norm's result is read by linear layers only, and
by the sum of the next sublayer. A scale and a shift of each feature after a norm can therefore move into weights.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.checkpoint.stock_type import CUSTOM_NORMS

_BERT = ("bert", "roberta", "xlm-roberta", "electra")


@dataclass(frozen=True)
class ResidualSegment:
    """The stream from one norm to the next; names are those of modules in the base model.

    Args:
        norm: The norm at its start; empty where the stream starts with a linear layer.
        readers: Linear layers that read it.
        writer: Linear layer that adds to it before the next norm; empty where the stream ends.
    """

    norm: str
    readers: tuple[str, ...] = ()
    writer: str = ""


def find_residual_segments(model: PreTrainedModel) -> list[ResidualSegment]:
    """Returns the stream of a model from the embeddings to the last norm; empty for other families.

    The last segment has neither readers nor a writer: what reads the result depends on the head.
    """
    kind, count = model.config.model_type.removeprefix(CUSTOM_NORMS), model.config.num_hidden_layers
    begun = [ResidualSegment("embeddings.LayerNorm")]
    if kind == "distilbert":
        sublayers = [each for i in range(count) for each in _distilbert_sublayers(f"transformer.layer.{i}")]
    elif kind in _BERT:
        sublayers = [each for i in range(count) for each in _bert_sublayers(f"encoder.layer.{i}")]
        if hasattr(model.base_model, "embeddings_project"):
            begun = [ResidualSegment("embeddings.LayerNorm", ("embeddings_project",)), ResidualSegment("")]
    else:
        return []
    norms = [begun[-1].norm, *(norm for _, _, norm in sublayers)]
    between = [ResidualSegment(norm, *sublayer[:2]) for norm, sublayer in zip(norms[:-1], sublayers, strict=True)]
    return [*begun[:-1], *between, ResidualSegment(norms[-1])]


def _bert_sublayers(layer: str) -> list[tuple[tuple[str, ...], str, str]]:
    """Returns (readers, writer, norm) of attention and feed-forward network."""
    attention, output = f"{layer}.attention", f"{layer}.output"
    read = tuple(f"{attention}.self.{name}" for name in ("query", "key", "value"))
    return [
        (read, f"{attention}.output.dense", f"{attention}.output.LayerNorm"),
        ((f"{layer}.intermediate.dense",), f"{output}.dense", f"{output}.LayerNorm"),
    ]


def _distilbert_sublayers(layer: str) -> list[tuple[tuple[str, ...], str, str]]:
    """Returns (readers, writer, norm) of attention and feed-forward network."""
    read = tuple(f"{layer}.attention.{name}" for name in ("q_lin", "k_lin", "v_lin"))
    return [
        (read, f"{layer}.attention.out_lin", f"{layer}.sa_layer_norm"),
        ((f"{layer}.ffn.lin1",), f"{layer}.ffn.lin2", f"{layer}.output_layer_norm"),
    ]


@torch.no_grad()
def absorb_scale_and_shift(body: nn.Module, segment: ResidualSegment, scale: Tensor, shift: Tensor) -> None:
    """Moves a scale and a shift of the stream into the weights around it, exactly up to rounding.

    With y = scale * s + shift, readers get W y + b as (W scale) s + (W shift + b), and the sum y + V h + c becomes
    scale * (s + (V h + c + shift) / scale): the next norm has to multiply by `scale`.

    Args:
        body: The base model, changed in place.
        segment: Where in the stream.
        scale, shift: [width]; no scale is 0.
    """
    for name in segment.readers:
        reader = body.get_submodule(name)
        reader.bias += reader.weight @ shift  # type: ignore[operator]
        reader.weight *= scale  # type: ignore[operator]
    if segment.writer:
        writer = body.get_submodule(segment.writer)
        writer.bias.add_(shift).div_(scale)  # type: ignore[operator]
        writer.weight.div_(scale[:, None])  # type: ignore[operator]
