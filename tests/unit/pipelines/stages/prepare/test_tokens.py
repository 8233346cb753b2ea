"""The tokens stage: text is tokenized once, whole or not at all, and training on it equals training from memory."""

import itertools
import json
import random
from collections.abc import Iterator

import numpy as np
import pytest

from distill.data.batches.data_module import TextDataModule
from distill.data.config import DataConfig
from distill.data.sources import text_batches
from distill.data.sources.stored_texts import StoredTexts
from distill.data.stored.tokens import HEADER
from pipelines.runs.console import Console
from pipelines.runs.stage import Run
from pipelines.settings.commands.distill import GeneralConfig
from pipelines.stages.prepare.data import data_stage, read_data, read_task
from pipelines.stages.prepare.tokens import SplitEncoder, tokens_stage
from pipelines.stages.train.text_blocks import read_blocks, store_blocks
from support.tiny_models import WORDS


def draw_documents(count: int, seed: int = 1) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(0, 60))) for _ in range(count)]


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "run", 3, Console())


@pytest.fixture(autouse=True)
def _few_processes(monkeypatch):
    monkeypatch.setattr("distill.data.stored.encoding.count_processors", lambda: 0)


def reject_reading() -> Iterator[str]:
    raise AssertionError("the texts were read again")
    yield ""


def test_text_is_tokenized_once_for_all_runs_of_an_output(tokenizer, run, tmp_path):
    first = tokens_stage(run, tokenizer, "abc", lambda: iter(draw_documents(9)), 9)
    again = tokens_stage(run, tokenizer, "abc", reject_reading, 9)
    assert np.array_equal(first.ids, again.ids)
    run._lock.close()
    later = tokens_stage(Run(tmp_path / "run", 8, Console()), tokenizer, "abc", reject_reading, 9)
    assert np.array_equal(first.ids, later.ids)
    other = tokens_stage(Run(tmp_path / "other", 3, Console()), tokenizer, "abd", lambda: iter(draw_documents(2)), 2)
    assert len(other) == 2


def test_an_interrupted_tokenization_leaves_nothing_that_is_taken_for_complete(tokenizer, run):
    def fail() -> Iterator[str]:
        yield from draw_documents(5000, seed=2)  # more than a chunk, so that some ids are written
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        tokens_stage(run, tokenizer, "abc", fail, 9)
    assert not list((run.output / "tokens").glob(f"*/{HEADER}"))
    tokens = tokens_stage(run, tokenizer, "abc", lambda: iter(draw_documents(9)), 9)
    assert len(tokens) == 9
    (folder,) = (run.output / "tokens").iterdir()
    assert json.loads((folder / "manifest.json").read_text())["metrics"]["texts"] == 9


QUICK = [(False, False, 0), (True, True, 20)]


@pytest.mark.parametrize(
    ("masked", "validation", "blocks"),
    [
        pytest.param(*each, marks=[] if each in QUICK else pytest.mark.slow)
        for each in itertools.product([False, True], [False, True], [0, 20])
    ],
)
def test_blocks_of_large_text_equal_those_read_at_once(
    tokenizer, run, tmp_path, monkeypatch, blocks, validation, masked
):
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in draw_documents(90)))
    if validation:
        (folder / "dev.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in draw_documents(30, seed=5))
        )
    changes = {"loss": GeneralConfig().loss.__class__(kl=1)} if masked else {}
    general = GeneralConfig(data=str(folder), length=16, blocks=blocks, **changes)
    expected = read_blocks(general, tokenizer, 3)
    monkeypatch.setattr(text_batches, "LARGE", 1)
    found = store_blocks(run, general, tokenizer, "digest")
    for stored, direct in zip(found, expected, strict=True):
        assert len(stored) == len(direct)
        assert stored.lengths.tolist() == direct.lengths.tolist()
        batch, plain = (each.collate(range(len(direct)), 0, 1) for each in (stored, direct))
        assert batch.keys() == plain.keys()
        assert all(batch[name].equal(value) for name, value in plain.items())


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["documents", "stream", "none"])
@pytest.mark.parametrize("task", ["causal-lm", "masked-lm"])
def test_a_language_model_is_trained_on_the_same_rows_of_large_text(tokenizer, tmp_path, monkeypatch, task, packing):
    source = tmp_path / "text.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in draw_documents(60)))
    arguments = {"packing": packing} | ({"masking": {}} if task == "masked-lm" else {})

    def encode(name: str) -> TextDataModule:
        run = Run(tmp_path / name, 3, Console())
        data = data_stage(run, DataConfig(str(source)), task, arguments)
        splits, encoder = read_data(data), SplitEncoder(run, read_task(data))
        assert isinstance(splits.train.texts, StoredTexts) == (name == "stored")
        settings = {"encode": encoder.encode, "encode_train": encoder.encode_train, "max_length": 16, "seed": 3}
        return TextDataModule(splits, tokenizer, **settings)

    expected = encode("memory")
    monkeypatch.setattr(text_batches, "LARGE", 1)
    found = encode("stored")
    assert len(list((tmp_path / "stored" / "tokens").iterdir())) == 3
    assert not (tmp_path / "memory" / "tokens").exists()
    for name in ("train", "validation", "test"):
        stored, direct = getattr(found, name), getattr(expected, name)
        assert stored.lengths.tolist() == direct.lengths.tolist()
        batch, plain = (each.collate(range(len(direct)), 0, 1) for each in (stored, direct))
        assert batch.keys() == plain.keys()
        assert all(batch[field].equal(value) for field, value in plain.items())
    assert found.notes == expected.notes
    for batch, plain in zip(found.train_dataloader(), expected.train_dataloader(), strict=True):
        assert all(batch[field].equal(value) for field, value in plain.items())
    for name in ("train", "validation", "test"):
        files = [next((tmp_path / run / "data").glob(f"*/{name}.parquet")) for run in ("memory", "stored")]
        assert files[0].read_bytes() == files[1].read_bytes()
