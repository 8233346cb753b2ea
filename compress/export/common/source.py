"""A model that is handed over, and what it is compared with."""

import copy
from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.export.common.huggingface import TorchModel, input_names
from compress.export.common.rows import Layer, layers_of
from compress.quantize.prepare import Rounding, restore


@dataclass(frozen=True)
class Source:
    """A model to export.

    Args:
        model: In float32 and eval mode; with a rounding its weights are on their grids.
        tokenizer: Its tokenizer.
        rounding: The numbers that it is deployed with; None of a model that isn't quantized.
        reduced: ONNX Runtime's own int8 of a model that isn't quantized has weights of 7 bits.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    rounding: Rounding | None = None
    reduced: bool = False

    @property
    def inputs(self) -> list[str]:
        """Names of the tensors it reads, each [batch, length] int64."""
        return input_names(self.model.config)

    @property
    def longest(self) -> int:
        """Tokens that fit into the model's positions and the tokenizer's own limit."""
        config = self.model.config
        most = int(getattr(config, "max_position_embeddings", 512))
        first = (config.pad_token_id or 0) + 1 if config.model_type in ("roberta", "xlm-roberta") else 0
        return min(most - first, self.tokenizer.model_max_length)

    @property
    def in_7_bits(self) -> bool:
        """Whether weights have 7 bits for processors whose products saturate."""
        schemes = [each.scheme for each in (self.rounding or {}).values() if each.scheme is not None]
        return self.reduced or any(scheme.bits == 7 for scheme in schemes)

    @cached_property
    def layers(self) -> dict[str, Layer]:
        """The numbers of its rounded layers by name."""
        return layers_of(self.model, self.rounding or {})

    @cached_property
    def reference(self) -> PreTrainedModel:
        """The model as it was trained to compute."""
        made = copy.deepcopy(self.model).eval()
        if self.rounding is not None:
            restore(made, self.rounding)
        return made

    @cached_property
    def runner(self) -> TorchModel:
        """The reference, called like the other runtimes."""
        return TorchModel.of(self.reference)
