"""Tiny seeded models, the vocabulary of their tokenizer, and rows of a data set that they can learn.

Sizes: 4 layers, width 32, 4 heads, feed-forward 64, 5 classes, about 200 tokens, texts of at most 64 tokens.
"""

import random
import string
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import BertTokenizerFast, PreTrainedModel, PreTrainedTokenizerBase

SIZES = {"layers": 4, "hidden": 32, "heads": 4, "ffn": 64}
MAX_LENGTH = 64
LABELS = ("billing", "delivery", "login", "refund", "weather")  # in the order of the logits
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]

# 5 x 5 words that determine the class and 101 that don't: two syllables each, all different.
WORDS = [a + b for a, b in product(("ba", "de", "fi", "go", "lu", "me", "no", "pa", "ru"), ("ka", "le", "mi", "so"))]
WORDS += [a + b for a, b in product(("sha", "tre", "vi", "wo", "zu", "cle", "dri", "plo", "qua"), ("ber", "ton"))]
WORDS += [a + b for a, b in product(("an", "el", "in", "or", "us", "ar"), ("dra", "fen", "gul", "hib", "jot", "kex"))]
WORDS += [a + b for a, b in product(("mar", "nel", "pin", "sol", "tur", "wes"), ("da", "ki", "ro", "ty", "vu", "xa"))]
CLUES = {label: WORDS[5 * i : 5 * (i + 1)] for i, label in enumerate(LABELS)}
FILLERS = WORDS[5 * len(LABELS) :]
PIECES = [*string.ascii_lowercase, *(f"##{letter}" for letter in string.ascii_lowercase), *".,?!'-"]
VOCABULARY = [*SPECIAL, *PIECES, *WORDS]

MODELS = {
    "bert": ("Bert", {}),
    "roberta": ("Roberta", {"max_position_embeddings": MAX_LENGTH + 2}),
    "xlm-roberta": ("XLMRoberta", {"max_position_embeddings": MAX_LENGTH + 2}),
    "electra": ("Electra", {"embedding_size": SIZES["hidden"]}),
    "electra-projected": ("Electra", {"embedding_size": 24}),  # like ELECTRA-small: embeddings narrower than the layers
    "distilbert": ("DistilBert", {}),
}


def build_model(family: str, head: str = "ForSequenceClassification", **changes: object) -> PreTrainedModel:
    """Returns a tiny model of one of MODELS in eval mode; `changes` are passed to its config."""
    name, defaults = MODELS[family]
    sizes = ("n_layers", "dim", "n_heads", "hidden_dim")
    if name != "DistilBert":
        sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
    settings = dict(zip(sizes, SIZES.values(), strict=True)) | {
        "vocab_size": len(VOCABULARY),
        "max_position_embeddings": MAX_LENGTH,
        "pad_token_id": 0,
        "id2label": dict(enumerate(LABELS)),
        "label2id": {label: i for i, label in enumerate(LABELS)},
    }
    config = getattr(transformers, f"{name}Config")(**(settings | defaults | changes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234)
        model = getattr(transformers, f"{name}{head}")(config)
        draw_weights(model)
    return model.eval()


def draw_weights(model: nn.Module) -> None:
    """Draws weights large enough that logits differ between texts; no bias is 0 and no norm weight is 1."""
    for name, parameter in model.named_parameters():
        spread = 0.5 if "classifier" in name else 0.2
        centre = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
        nn.init.normal_(parameter, mean=centre, std=spread)


def word_tokenizer(words: Sequence[str] = VOCABULARY, **settings: object) -> BertTokenizerFast:
    """Returns a BertTokenizerFast (WordPiece, lower case, token types) for texts of at most MAX_LENGTH tokens.

    The position of a word is its id; `settings` are passed to the class.
    """
    return BertTokenizerFast(
        vocab={word: i for i, word in enumerate(words)}, **({"model_max_length": MAX_LENGTH} | settings)
    )


def saved(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_rows(count: int, seed: int) -> list[tuple[str, str]]:
    """Returns (text, label) rows, cycling through the classes; three words of each text are clues, 2 to 9 fillers."""
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        label = LABELS[i % len(LABELS)]
        words = rng.sample(CLUES[label], 3) + rng.choices(FILLERS, k=rng.randint(2, 9))
        rng.shuffle(words)
        rows.append((" ".join(words), label))
    return rows
