"""Access to transformers models: inputs, attention vectors, output heads, generation, sentence vectors.

Public names are imported on first use, so that importing this package loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distill.models.attention import capture_attention_vectors, read_attention_widths
    from distill.models.generation import Continuations, check_causal_lm, find_end_tokens, generate
    from distill.models.inputs import build_inputs, select_inputs
    from distill.models.layer_sizes import read_layer_sizes
    from distill.models.output_head import find_head, restrict_logits
    from distill.models.packed_inputs import build_packed_inputs, check_family_packing
    from distill.models.sentence_encoder import PooledModel, SentenceOutput, pool_states

EXPORTS = {
    "Continuations": "generation",
    "PooledModel": "sentence_encoder",
    "SentenceOutput": "sentence_encoder",
    "build_inputs": "inputs",
    "build_packed_inputs": "packed_inputs",
    "capture_attention_vectors": "attention",
    "check_causal_lm": "generation",
    "check_family_packing": "packed_inputs",
    "find_end_tokens": "generation",
    "find_head": "output_head",
    "generate": "generation",
    "pool_states": "sentence_encoder",
    "read_attention_widths": "attention",
    "read_layer_sizes": "layer_sizes",
    "restrict_logits": "output_head",
    "select_inputs": "inputs",
}
__all__ = [
    "Continuations",
    "PooledModel",
    "SentenceOutput",
    "build_inputs",
    "build_packed_inputs",
    "capture_attention_vectors",
    "check_causal_lm",
    "check_family_packing",
    "find_end_tokens",
    "find_head",
    "generate",
    "pool_states",
    "read_attention_widths",
    "read_layer_sizes",
    "restrict_logits",
    "select_inputs",
]


def __getattr__(name: str) -> object:
    if name in EXPORTS:
        return getattr(import_module(f"{__name__}.{EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
