"""The model to export, and the reference it is compared with."""

import copy
from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.export.common.huggingface import TorchModel, input_names
from compress.export.common.rows import Layer, list_quantized_weights
from compress.quantize.prepare import ModelQuantization, requantize
from distill.checkpoint.positions import find_max_tokens


@dataclass(frozen=True)
class Source:
    """A model to export.

    Args:
        model: In float32 and eval mode; if it is quantized, its weights are on their grids.
        tokenizer: Its tokenizer.
        quantization: Schemes, scales and grids it is deployed with; None for a model that isn't quantized.
        reduce_range: Whether ONNX Runtime's own int8 of a model that isn't quantized uses 7-bit weights.
        trained: The model with the norms that it was trained with, if they are folded in `model`.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    quantization: ModelQuantization | None = None
    reduce_range: bool = False
    trained: PreTrainedModel | None = None

    @property
    def inputs(self) -> list[str]:
        """Names of the model's inputs, each [batch, length] int64."""
        return input_names(self.model.config)

    @property
    def longest(self) -> int:
        """Longest text in tokens that the model's positions and the tokenizer's limit allow."""
        config = self.model.config
        limit = find_max_tokens(config) or int(getattr(config, "max_position_embeddings", 512))
        return min(limit, self.tokenizer.model_max_length)

    @property
    def has_reduced_range(self) -> bool:
        """Whether weights have 7 bits for processors whose products saturate."""
        schemes = [each.scheme for each in (self.quantization or {}).values() if each.scheme is not None]
        return self.reduce_range or any(scheme.bits == 7 for scheme in schemes)

    @cached_property
    def layers(self) -> dict[str, Layer]:
        """Quantized weights by layer name."""
        return list_quantized_weights(self.model, self.quantization or {})

    @cached_property
    def reference(self) -> PreTrainedModel:
        """The model with the quantized arithmetic it was trained with."""
        model: PreTrainedModel = copy.deepcopy(self.model).eval()
        if self.quantization is not None:
            requantize(model, self.quantization)
        return model

    @cached_property
    def runner(self) -> TorchModel:
        """The reference with the interface of the other runtimes."""
        return TorchModel.of(self.reference)
