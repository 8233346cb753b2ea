"""Training objectives: pure functions on tensors, and their weighted sum.

Public names are imported on first use, so that importing this package loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distill.losses.compose import (
        compute_gradient_shares,
        compute_loss_terms,
        distribution_loss,
        fused_distribution_loss,
        fused_label_loss,
        scale_by_share,
        weighted_sum,
    )
    from distill.losses.config import LayerPairs, LayerSizes, LossConfig, match_layers
    from distill.losses.cross_tokenizer import cross_tokenizer_loss, sorted_distance
    from distill.losses.cross_tokenizer_config import CrossTokenizerConfig
    from distill.losses.features import (
        attention_kl,
        attention_mse,
        attention_scores,
        embedding_cosine,
        embedding_mse,
        hidden_cosine,
        hidden_mse,
        hidden_normalized_mse,
        relation_kl,
        similarity_kl,
        similarity_mse,
    )
    from distill.losses.fused import fused_sampled_cross_entropy, fused_topk_kl
    from distill.losses.logits import (
        cross_entropy,
        decoupled_kl,
        forward_kl,
        jensen_shannon,
        label_loss,
        logit_cosine,
        logit_mse,
        reverse_kl,
        skewed_kl,
        skewed_reverse_kl,
        soft_cross_entropy,
        squared_error,
        total_variation,
    )
    from distill.losses.sparse import sampled_cross_entropy, topk_kl
    from distill.losses.teacher_signals import SignalSource, TeacherSignals
    from distill.losses.teachers import confidence_weights, constant_weights, mix_logits

EXPORTS = {
    "CrossTokenizerConfig": "cross_tokenizer_config",
    "LayerPairs": "config",
    "LayerSizes": "config",
    "LossConfig": "config",
    "SignalSource": "teacher_signals",
    "TeacherSignals": "teacher_signals",
    "cross_tokenizer_loss": "cross_tokenizer",
    "attention_kl": "features",
    "attention_mse": "features",
    "attention_scores": "features",
    "compute_gradient_shares": "compose",
    "compute_loss_terms": "compose",
    "confidence_weights": "teachers",
    "constant_weights": "teachers",
    "cross_entropy": "logits",
    "decoupled_kl": "logits",
    "distribution_loss": "compose",
    "embedding_cosine": "features",
    "embedding_mse": "features",
    "forward_kl": "logits",
    "fused_distribution_loss": "compose",
    "fused_label_loss": "compose",
    "fused_sampled_cross_entropy": "fused",
    "fused_topk_kl": "fused",
    "hidden_cosine": "features",
    "hidden_mse": "features",
    "hidden_normalized_mse": "features",
    "jensen_shannon": "logits",
    "label_loss": "logits",
    "logit_cosine": "logits",
    "logit_mse": "logits",
    "match_layers": "config",
    "mix_logits": "teachers",
    "relation_kl": "features",
    "reverse_kl": "logits",
    "sampled_cross_entropy": "sparse",
    "scale_by_share": "compose",
    "similarity_kl": "features",
    "similarity_mse": "features",
    "skewed_kl": "logits",
    "skewed_reverse_kl": "logits",
    "soft_cross_entropy": "logits",
    "sorted_distance": "cross_tokenizer",
    "squared_error": "logits",
    "topk_kl": "sparse",
    "total_variation": "logits",
    "weighted_sum": "compose",
}
__all__ = [
    "CrossTokenizerConfig",
    "LayerPairs",
    "LayerSizes",
    "LossConfig",
    "SignalSource",
    "TeacherSignals",
    "cross_tokenizer_loss",
    "attention_kl",
    "attention_mse",
    "attention_scores",
    "compute_gradient_shares",
    "compute_loss_terms",
    "confidence_weights",
    "constant_weights",
    "cross_entropy",
    "decoupled_kl",
    "distribution_loss",
    "embedding_cosine",
    "embedding_mse",
    "forward_kl",
    "fused_distribution_loss",
    "fused_label_loss",
    "fused_sampled_cross_entropy",
    "fused_topk_kl",
    "hidden_cosine",
    "hidden_mse",
    "hidden_normalized_mse",
    "jensen_shannon",
    "label_loss",
    "logit_cosine",
    "logit_mse",
    "match_layers",
    "mix_logits",
    "relation_kl",
    "reverse_kl",
    "sampled_cross_entropy",
    "scale_by_share",
    "similarity_kl",
    "similarity_mse",
    "skewed_kl",
    "skewed_reverse_kl",
    "soft_cross_entropy",
    "sorted_distance",
    "squared_error",
    "topk_kl",
    "total_variation",
    "weighted_sum",
]


def __getattr__(name: str) -> object:
    if name in EXPORTS:
        return getattr(import_module(f"{__name__}.{EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
