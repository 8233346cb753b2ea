"""Which families of students support which kinds of normalization; torch isn't imported here."""

import difflib
from typing import TYPE_CHECKING

from distill.checkpoint.norm_kinds import BATCHNORM, ELEMENTWISE, LAYERNORM, MOBILEBERT, NORM_KINDS, RMSNORM
from distill.errors import InputError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Family -> the kind of its stock class. Families that aren't listed keep theirs: DeBERTa norms relative positions too,
# ModernBERT and GPT-2 norm what a layer reads instead of what it writes, Gemma's scales are counted from 1.
STOCK_KINDS = dict.fromkeys(("bert", "roberta", "xlm-roberta", "electra", "distilbert"), LAYERNORM)
STOCK_KINDS |= dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), RMSNORM)
DECODERS = tuple(name for name, kind in STOCK_KINDS.items() if kind == RMSNORM)


def check_kind(kind: str, spec: str) -> None:
    """Checks that a kind of normalization exists.

    Raises:
        InputError: It doesn't; the message names the nearest one.
    """
    if kind not in NORM_KINDS:
        near = difflib.get_close_matches(kind, NORM_KINDS, 1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"student {spec!r}: expected norm={' or '.join(NORM_KINDS)}, found {kind!r}{hint}")


def check_family_kind(kind: str, model_type: str) -> None:
    """Checks that students of a family can have a kind of normalization.

    Raises:
        InputError: They can't.
    """
    if model_type not in (*STOCK_KINDS, "mobilebert"):
        raise InputError(
            f"student norm={kind}: expected a teacher among {', '.join(STOCK_KINDS)} and mobilebert, found "
            f"{model_type!r}: the normalizations of its layers can't be exchanged; leave norm out"
        )
    if kind in ELEMENTWISE and model_type in DECODERS:
        reason = (
            "its statistics would contain tokens that follow the one to be predicted"
            if kind == BATCHNORM
            else "its layers only add to the stream, and nothing else would bound it"
        )
        raise InputError(f"student norm={kind}: expected layernorm or rmsnorm for {model_type!r}: {reason}")


def stock_kind(config: "PretrainedConfig") -> str:
    """Returns the kind of normalization of a stock model."""
    return (
        MOBILEBERT[config.normalization_type] if config.model_type == "mobilebert" else STOCK_KINDS[config.model_type]
    )
