"""Fixtures shared by all tests: tiny seeded models, a tokenizer, teacher folders and a data set, built on demand.

Nothing here uses the network or a device. Sizes are defined in `support/tiny_models.py`.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["MKL_CBWR"] = "AUTO,STRICT"  # the commands set the same value

import csv
import gc
import shutil
from collections.abc import Callable
from pathlib import Path

import jaxtyping
import pytest
import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from support.tiny_models import MODELS, SPECIAL, VOCABULARY, build_model, make_rows, saved, word_tokenizer

torch.set_num_threads(1)  # tests share the machine, and a single thread sums in a fixed order
transformers.utils.logging.disable_progress_bar()  # saving a fixture must not write to a test's stderr

# Shapes and types in the losses' signatures are checked at every call in every test. `config` is left out on purpose:
# LossConfig raises its own errors, which its tests cover.
CHECKED = [
    f"distill.losses.{name}"
    for name in ("logits", "features", "sparse", "compose", "matching", "teachers", "cross_tokenizer", "spans")
]
jaxtyping.install_import_hook(CHECKED, "beartype.beartype")


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., PreTrainedModel]:
    """`tiny_model(family, head="ForSequenceClassification", **config_changes)` -> a new float32 model in eval mode.

    `family` is one of bert, roberta, xlm-roberta, distilbert, electra, electra-projected (narrow embeddings);
    `head="Model"` gives the plain body. The same arguments give the same weights. Its 5 labels are `LABELS`.
    """
    return build_model


def pytest_collection_finish() -> None:
    """Leaves what was imported out of garbage collections, of which every stage of a run makes one."""
    gc.collect()
    gc.freeze()


SIMILAR = ("xlm-roberta", "electra")  # to RoBERTa and BERT


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] * (name in SIMILAR)) for name in MODELS])
def teacher(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A tiny classifier; the test runs once for each family of `tiny_model`."""
    return build_model(request.param)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """A BertTokenizerFast (WordPiece, lower case, token types, pad id 0, at most 64 tokens) with VOCABULARY."""
    return word_tokenizer()


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


@pytest.fixture
def data_folder(tmp_path: Path) -> Path:
    """`tmp_path/"data"`: train.csv (120 rows) and test.csv (40 rows), columns text and label, with balanced LABELS."""
    folder = tmp_path / "data"
    folder.mkdir()
    for split, count, seed in (("train", 120, 1), ("test", 40, 2)):
        with (folder / f"{split}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("text", "label"), *make_rows(count, seed)])
    return folder


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Path:
    """A folder with intact checkpoints of a tiny BERT, `headed`, `body` and `masked`, and `data` of 60 and 20 rows."""
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
    """`changed_copy(name, change)` -> a copy of one of `checkpoints` whose files were changed by `change(folder)`."""

    def copy(name: str, change: Callable[[Path], None]) -> Path:
        folder = tmp_path / f"broken-{name}"
        shutil.copytree(checkpoints / name, folder)
        change(folder)
        return folder

    return copy
