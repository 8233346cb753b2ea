"""The tokens stage: text is tokenized once, whole or not at all, and training on it equals training from memory."""

import json
import random
from collections.abc import Iterator

import numpy as np
import pytest

from distill.data.sources import text_batches
from distill.data.stored.tokens import HEADER
from pipelines.runs.console import Console
from pipelines.runs.stage import Run
from pipelines.settings.distill_config import GeneralConfig
from pipelines.stages.prepare.tokens import tokens_stage
from pipelines.stages.train.general import read_blocks, store_blocks
from support.tiny_models import WORDS


def documents(count: int, seed: int = 1) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(0, 60))) for _ in range(count)]


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "run", 3, Console())


@pytest.fixture(autouse=True)
def _few_processes(monkeypatch):
    monkeypatch.setattr("distill.data.stored.encoding.count_processors", lambda: 0)


def refuse_reading() -> Iterator[str]:
    raise AssertionError("the texts were read again")
    yield ""


def test_text_is_tokenized_once_for_all_runs_of_an_output(tokenizer, run, tmp_path):
    first = tokens_stage(run, tokenizer, "abc", lambda: iter(documents(9)), 9)
    again = tokens_stage(run, tokenizer, "abc", refuse_reading, 9)
    assert np.array_equal(first.ids, again.ids)
    run._lock.close()
    later = tokens_stage(Run(tmp_path / "run", 8, Console()), tokenizer, "abc", refuse_reading, 9)
    assert np.array_equal(first.ids, later.ids)
    other = tokens_stage(Run(tmp_path / "other", 3, Console()), tokenizer, "abd", lambda: iter(documents(2)), 2)
    assert len(other) == 2


def test_an_interrupted_tokenization_leaves_nothing_that_is_taken_for_complete(tokenizer, run):
    def fail() -> Iterator[str]:
        yield from documents(5000, seed=2)  # more than a chunk, so that some ids are written
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        tokens_stage(run, tokenizer, "abc", fail, 9)
    assert not list((run.output / "tokens").glob(f"*/{HEADER}"))
    found = tokens_stage(run, tokenizer, "abc", lambda: iter(documents(9)), 9)
    assert len(found) == 9
    (folder,) = (run.output / "tokens").iterdir()
    assert json.loads((folder / "manifest.json").read_text())["metrics"]["texts"] == 9


@pytest.mark.parametrize("blocks", [0, 20])
@pytest.mark.parametrize("validation", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_blocks_of_large_text_equal_those_read_at_once(
    tokenizer, run, tmp_path, monkeypatch, blocks, validation, masked
):
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents(90)))
    if validation:
        (folder / "dev.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents(30, seed=5)))
    changes = {"loss": GeneralConfig().loss.__class__(kl=1)} if masked else {}
    general = GeneralConfig(data=str(folder), length=16, blocks=blocks, **changes)
    expected = read_blocks(general, tokenizer, 3)
    monkeypatch.setattr(text_batches, "LARGE", 1)
    found = store_blocks(run, general, tokenizer, "digest")
    for own, other in zip(found, expected, strict=True):
        assert len(own) == len(other)
        assert own.lengths.tolist() == other.lengths.tolist()
        batch, plain = (each.collate(range(len(other)), 0, 1) for each in (own, other))
        assert batch.keys() == plain.keys()
        assert all(batch[name].equal(value) for name, value in plain.items())
