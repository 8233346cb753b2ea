"""Tiny models of every family that pruning supports, a padded batch for each, and random shapes to prune to."""

import random
from collections.abc import Mapping, Sequence
from functools import cache

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from distill.slicing import Axis, Shape, Traced, trace
from support.tiny_models import build_model, draw_weights

SIZES = {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 60, "pad_token_id": 0}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64}
GROUPED = {"num_key_value_heads": 2, "intermediate_size": 40}

# name -> (stock class, settings of its config beside SIZES and IDS)
CAUSAL = {
    "llama": ("LlamaForCausalLM", GROUPED),
    "llama-classifier": ("LlamaForSequenceClassification", GROUPED),
    "qwen2": ("Qwen2ForCausalLM", GROUPED | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", GROUPED | {"head_dim": 12}),
    "gemma": ("GemmaForCausalLM", GROUPED | {"head_dim": 8}),
    "gpt2": ("GPT2LMHeadModel", {"n_inner": 40}),
}
FURTHER = CAUSAL | {
    "modernbert": (
        "ModernBertForSequenceClassification",
        {"intermediate_size": 40, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 4, "num_labels": 5},
    )
}
ENCODERS = ("bert", "roberta", "xlm-roberta", "electra", "electra-projected", "distilbert")
FAMILIES = (*ENCODERS, "bert-words", "modernbert", *CAUSAL)  # bert-words has a masked-LM head, tied to its embeddings


def build(family: str, **changes: object) -> PreTrainedModel:
    """Returns a seeded float32 model in eval mode; `changes` are passed to its config."""
    if family not in FURTHER:
        count = {"n_layers" if family == "distilbert" else "num_hidden_layers": 3}
        head = "ForMaskedLM" if family == "bert-words" else "ForSequenceClassification"
        return build_model(family.removesuffix("-words"), head, **(count | changes))
    name, settings = FURTHER[family]
    kind = getattr(transformers, name)
    config = kind.config_class(**(SIZES | IDS | settings | changes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234)
        model = kind(config)
        draw_weights(model)
    return model.eval()


@cache
def model_of(family: str) -> PreTrainedModel:
    """Returns the same model on every call, for tests that don't modify it."""
    return build(family)


@cache
def traced(family: str) -> Traced:
    return trace(model_of(family))


def axes_of(family: str) -> tuple[Axis, ...]:
    return traced(family).axes


def auto_class(model: PreTrainedModel) -> str:
    name = type(model).__name__
    task = next((task for task in ("ForSequenceClassification", "ForMaskedLM") if name.endswith(task)), "ForCausalLM")
    return f"AutoModel{task}"


def padded_batch(model: PreTrainedModel) -> dict[str, Tensor]:
    """Returns input_ids and attention_mask, int64 [4, 9], with rows of 9, 7, 4 and 2 ids."""
    mask = (torch.arange(9) < torch.tensor([9, 7, 4, 2])[:, None]).long()
    ids = torch.randint(5, 60, (4, 9), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids * mask + (1 - mask) * model.config.pad_token_id, "attention_mask": mask}


@torch.no_grad()
def logits(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> Tensor:
    """Returns the logits of each text, or of each token that isn't padding."""
    output = model(**batch).logits
    return output[batch["attention_mask"].bool()] if output.dim() == 3 else output


def random_shape(
    axes: Sequence[Axis], seed: int, kinds: Sequence[str], layers: Sequence[int], largest: float = 1.0
) -> Shape:
    """Returns a shape with random units of each axis of `kinds`: at least one, at most the share `largest`."""
    rng = random.Random(seed)
    kept_units = {}
    for axis in (axis for axis in axes if axis.kind in kinds):
        count = rng.randint(1, max(1, int(axis.units * largest)))
        kept_units[axis.name] = torch.tensor(sorted(rng.sample(range(axis.units), count)))
    return Shape(tuple(layers), kept_units)


def last(axes: Sequence[Axis], layers: Sequence[int], **units: int) -> Shape:
    """Returns a shape that keeps the given number of last units of each kind, the same in all layers."""
    kept_units = {
        axis.name: torch.arange(axis.units - units[axis.kind], axis.units) for axis in axes if axis.kind in units
    }
    return Shape(tuple(layers), kept_units)
