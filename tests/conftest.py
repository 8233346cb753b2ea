"""What the tests share: tiny seeded models, a tokenizer, teacher folders and a data set, all made on the spot.

Nothing here touches the network or a device. Sizes: 4 layers, width 32, 4 heads, feed-forward 64, 5 classes, about 200
words, texts of at most 64 tokens. See each fixture's docstring for what it returns.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["MKL_CBWR"] = "AUTO,STRICT"  # as the commands set it

import csv
import random
import shutil
import string
from collections.abc import Callable
from itertools import product
from pathlib import Path

import jaxtyping
import pytest
import torch
import transformers
from torch import nn
from transformers import BertTokenizerFast, PreTrainedModel, PreTrainedTokenizerBase

torch.set_num_threads(1)  # tests share the machine, and one thread sums in one order
transformers.utils.logging.disable_progress_bar()  # saving a fixture must not write into a test's stderr

# Shapes and types in the losses' signatures are checked at every call of every test. `config` is left out on purpose:
# LossConfig has its own errors, and they are what its tests are about.
CHECKED = [
    f"distill.losses.{name}"
    for name in ("logits", "features", "sparse", "compose", "matching", "teachers", "across", "spans")
]
jaxtyping.install_import_hook(CHECKED, "beartype.beartype")

SIZES = {"layers": 4, "hidden": 32, "heads": 4, "ffn": 64}
MAX_LENGTH = 64
LABELS = ("billing", "delivery", "login", "refund", "weather")  # in the order of the logits
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]

# 5 x 5 words that tell the class, 101 that don't: two syllables each, no two the same.
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
    "electra-projected": ("Electra", {"embedding_size": 24}),  # as ELECTRA-small: embeddings narrower than the layers
    "distilbert": ("DistilBert", {}),
}


def build_model(family: str, head: str = "ForSequenceClassification", **changes: object) -> PreTrainedModel:
    """A tiny model of one of MODELS in eval mode; `changes` go to its config."""
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
        scatter(model)
    return model.eval()


def scatter(model: nn.Module) -> None:
    """Weights large enough that logits differ from text to text; no bias is 0 and no norm's weight 1."""
    for name, parameter in model.named_parameters():
        spread = 0.5 if "classifier" in name else 0.2
        centre = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
        nn.init.normal_(parameter, mean=centre, std=spread)


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., PreTrainedModel]:
    """`tiny_model(family, head="ForSequenceClassification", **config_changes)` -> a new float32 model in eval mode.

    `family` is one of bert, roberta, xlm-roberta, distilbert, electra, electra-projected (narrow embeddings);
    `head="Model"` gives the plain body. The same arguments give the same weights. Its 5 labels are conftest.LABELS.
    """
    return build_model


@pytest.fixture(params=list(MODELS))
def teacher(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A tiny classifier; the test runs once for each family of `tiny_model`."""
    return build_model(request.param)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """A BertTokenizerFast (WordPiece, lower case, token types, pad id 0, at most 64 tokens) that knows VOCABULARY."""
    return BertTokenizerFast(vocab={word: i for i, word in enumerate(VOCABULARY)}, model_max_length=MAX_LENGTH)


@pytest.fixture
def token_batch() -> dict[str, torch.Tensor]:
    """A padded batch for any tiny model: input_ids, attention_mask int64 [6, 11]; rows of 11, 9, 7, 5, 3 and 2 ids."""
    lengths = torch.tensor([11, 9, 7, 5, 3, 2])
    mask = (torch.arange(11) < lengths[:, None]).long()
    ids = torch.randint(len(SPECIAL), len(VOCABULARY), (6, 11), generator=torch.Generator().manual_seed(5))
    return {"input_ids": ids * mask, "attention_mask": mask}


@pytest.fixture
def body_folder(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    """`tmp_path/"body"`: a checkpoint of a plain BertModel, no head, with its tokenizer."""
    return saved(build_model("bert", "Model"), tokenizer, tmp_path / "body")


@pytest.fixture
def headed_folder(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    """`tmp_path/"headed"`: a checkpoint of a BertForSequenceClassification with labels LABELS, with its tokenizer."""
    return saved(build_model("bert"), tokenizer, tmp_path / "headed")


def saved(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_rows(count: int, seed: int) -> list[tuple[str, str]]:
    """(text, label) rows, the classes in turn; three words of each text tell its class, 2 to 9 don't."""
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        label = LABELS[i % len(LABELS)]
        words = rng.sample(CLUES[label], 3) + rng.choices(FILLERS, k=rng.randint(2, 9))
        rng.shuffle(words)
        rows.append((" ".join(words), label))
    return rows


@pytest.fixture
def data_folder(tmp_path: Path) -> Path:
    """`tmp_path/"data"`: train.csv (120 rows) and test.csv (40 rows), columns text and label, LABELS evenly."""
    folder = tmp_path / "data"
    folder.mkdir()
    for split, count, seed in (("train", 120, 1), ("test", 40, 2)):
        with (folder / f"{split}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("text", "label"), *make_rows(count, seed)])
    return folder


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Path:
    """A folder with whole checkpoints of a tiny bert, `headed`, `body` and `masked`, and `data`, 60 and 20 rows."""
    place = tmp_path_factory.mktemp("checkpoints")
    for name, head in (("headed", "ForSequenceClassification"), ("body", "Model"), ("masked", "ForMaskedLM")):
        saved(build_model("bert", head), tokenizer, place / name)
    (place / "data").mkdir()
    for split, count, seed in (("train", 60, 1), ("test", 20, 2)):
        with (place / "data" / f"{split}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("text", "label"), *make_rows(count, seed)])
    return place


@pytest.fixture
def changed_copy(checkpoints: Path, tmp_path: Path) -> Callable[[str, Callable[[Path], None]], Path]:
    """`changed_copy(name, change)` -> a copy of one of `checkpoints`, with its files changed."""

    def copy(name: str, change: Callable[[Path], None]) -> Path:
        folder = tmp_path / f"broken-{name}"
        shutil.copytree(checkpoints / name, folder)
        change(folder)
        return folder

    return copy
