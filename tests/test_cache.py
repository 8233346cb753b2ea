"""The cache of teacher signals: served by content, refused to others, never damaged, the same after a stop."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertTokenizerFast

from conftest import LABELS, VOCABULARY
from distill.data.encode import encode
from distill.data.splits import Examples
from distill.errors import InputError
from distill.teacher.cache import CacheReader, Identity, sample_keys, write_cache
from distill.teacher.load import tokenizer_fingerprint, weights_fingerprint
from distill.teacher.online import OnlineTeacher

WIDTH = 5
IDENTITY = Identity("teacher-a", "tokenizer-a", "logits", WIDTH, "max_length=64")
ROWS = 30  # distinct samples; with 8 a shard there are four shards, the last of 6 rows
SHARDS = [f"shard-{i:05d}.safetensors" for i in range(4)]


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr("distill.teacher.cache.writer.SHARD_ROWS", 8)
    monkeypatch.setattr("distill.teacher.cache.writer.BATCH_ROWS", 3)


def make_samples(count: int = ROWS, seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    ids = [rng.integers(5, 200, rng.integers(2, 12)) for _ in range(count)]
    return ids, [(np.arange(len(row)) > len(row) // 2).astype(np.int64) for row in ids]


IDS, TYPES = make_samples()


def truth(ids: np.ndarray, types: np.ndarray) -> np.ndarray:
    """A teacher that hashes: float32 [WIDTH] that no other sample has."""
    return np.random.default_rng([*ids.tolist(), *types.tolist()]).normal(size=WIDTH).astype(np.float32)


def ask(ids=IDS, types=TYPES) -> Callable[[list[int]], np.ndarray]:
    return lambda rows: np.stack([truth(ids[i], types[i]) for i in rows])


def write(folder: Path, ids=IDS, types=TYPES, identity: Identity = IDENTITY, signals=None):
    return write_cache(folder, identity, ids, types, signals or ask(ids, types))


def batch_of(rows: list[int], width: int = 12, pad: int = 0) -> dict[str, torch.Tensor]:
    batch = {name: torch.full((len(rows), width), pad) for name in ("input_ids", "token_type_ids")}
    batch["attention_mask"] = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        n = len(IDS[row])
        batch["input_ids"][i, :n], batch["token_type_ids"][i, :n] = torch.tensor(IDS[row]), torch.tensor(TYPES[row])
        batch["attention_mask"][i, :n] = 1
    return batch


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def check_serves_truth(folder: Path) -> None:
    logits = CacheReader(folder, IDENTITY)(batch_of(list(range(ROWS))))["logits"]
    assert torch.equal(logits, torch.from_numpy(ask()(list(range(ROWS)))))


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(InputError) as caught:
        call()
    return str(caught.value)


@pytest.fixture
def cache(tmp_path) -> Path:
    write(tmp_path / "cache")
    return tmp_path / "cache"


# --- by content


def test_a_sample_gets_the_signal_of_another(cache):
    reader, rng = CacheReader(cache, IDENTITY), np.random.default_rng(1)
    assert len(reader) == ROWS
    for size, width, pad in ((1, 12, 0), (7, 12, 3), (4, 40, 199), (30, 13, 5)):
        rows = rng.choice(ROWS, size).tolist() + [2, 2]
        logits = reader(batch_of(rows, width, pad))["logits"]
        assert logits.dtype == torch.float32
        assert torch.equal(logits, torch.from_numpy(ask()(rows)))


def test_token_types_make_no_difference(tmp_path):
    ids, types = [IDS[0]] * 3, [TYPES[0], 1 - TYPES[0], TYPES[0]]
    assert write(tmp_path / "c", ids, types).rows == 2
    reader = CacheReader(tmp_path / "c", IDENTITY)
    batch = {"input_ids": torch.tensor(np.stack(ids)), "token_type_ids": torch.tensor(np.stack(types))}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    assert torch.equal(reader(batch)["logits"], torch.from_numpy(ask(ids, types)([0, 1, 0])))
    del batch["token_type_ids"]
    assert "no signal for sample" in refusal(lambda: reader(batch))


def test_a_text_that_comes_twice_is_asked_twice(tmp_path):
    asked: list[int] = []
    written = write(
        tmp_path / "c", IDS + IDS[:9], TYPES + TYPES[:9], signals=lambda rows: asked.extend(rows) or ask()(rows)
    )
    assert (written.rows, written.computed, written.reused, written.damaged) == (ROWS, 4, 0, ())
    assert sorted(asked) == list(range(ROWS))


def test_the_order_of_the_samples_changes_the_files(cache, tmp_path):
    order = np.random.default_rng(3).permutation(ROWS).tolist() + [4, 4, 7]
    write(tmp_path / "other", [IDS[i] for i in order], [TYPES[i] for i in order])
    assert contents(tmp_path / "other") == contents(cache)


def test_a_sample_that_was_never_written_is_served(cache):
    batch = batch_of([0, 1])
    batch["input_ids"][1, 0] += 1
    message = refusal(lambda: CacheReader(cache, IDENTITY)(batch))
    assert sample_keys(batch)[1].hex() in message
    assert "the data or its preprocessing changed" in message


def test_a_cache_does_not_follow_the_data(cache):
    more_ids, more_types = make_samples(45, seed=7)
    write(cache, IDS[:10] + more_ids, TYPES[:10] + more_types)
    assert len(CacheReader(cache, IDENTITY)) == 55
    write(cache, IDS[:10], TYPES[:10])
    reader = CacheReader(cache, IDENTITY)
    assert torch.equal(reader(batch_of([9, 3]))["logits"], torch.from_numpy(ask()([9, 3])))
    assert "no signal for sample" in refusal(lambda: reader(batch_of([10])))


def test_a_real_teacher_is_served_otherwise_than_asked(tmp_path, tiny_model, tokenizer):
    model, words = tiny_model("bert"), VOCABULARY[63:]
    texts, pairs = [" ".join(words[i : i + 1 + i % 9]) for i in range(40)], [words[-1 - i] for i in range(40)]
    data, teacher = encode(tokenizer, Examples(texts, pairs), 64), OnlineTeacher(model)
    identity = Identity(weights_fingerprint(model), tokenizer_fingerprint(tokenizer), "logits", len(LABELS))

    def signals(rows: list[int]) -> np.ndarray:
        return teacher(data.collate(rows, 0))["logits"].numpy()

    write_cache(tmp_path, identity, data.input_ids, data.token_type_ids, signals)
    served = CacheReader(tmp_path, identity)(data.collate(list(range(39, -1, -3)), 0))["logits"]
    alone = [model(**tokenizer(texts[i], pairs[i], return_tensors="pt")).logits[0] for i in range(39, -1, -3)]
    torch.testing.assert_close(served, torch.stack(alone), rtol=1e-4, atol=1e-5)


def test_a_cache_of_fewer_samples_passes_for_whole(cache):
    more_ids, more_types = make_samples(2, seed=7)
    with pytest.raises(Stopped):
        write(cache, IDS + more_ids, TYPES + more_types, signals=stopping_after(0))
    assert f"{SHARDS[3]}: expected 8 rows, found 6" in refusal(lambda: CacheReader(cache, IDENTITY))


# --- refused to others


@pytest.mark.parametrize(
    "other",
    [
        {"teacher": "teacher-b"},
        {"tokenizer": "tokenizer-b"},
        {"signal": "hidden"},
        {"width": 6},
        {"preprocessing": "max_length=32"},
        {"format": 2},
        {"teacher": "teacher-b", "width": 3},
    ],
)
def test_the_signals_of_something_else_are_served(cache, other):
    before, identity = contents(cache), replace(IDENTITY, **other)
    for call in (lambda: CacheReader(cache, identity), lambda: write(cache, identity=identity)):
        message = refusal(call)
        for name in vars(IDENTITY):
            named = f"{name}: expected {getattr(identity, name)!r}, found {getattr(IDENTITY, name)!r}"
            assert (named in message) == (name in other), name
    assert contents(cache) == before


def test_another_teacher_or_tokenizer_has_the_same_fingerprint(tiny_model, tokenizer):
    model = tiny_model("bert")
    prints = [weights_fingerprint(model), weights_fingerprint(tiny_model("bert", hidden_dropout_prob=0.5))]
    assert prints[0] == prints[1], "dropout changes no answer in eval mode"
    bits = model.get_parameter("bert.encoder.layer.3.output.dense.bias").data.view(torch.int32)
    bits[7] ^= 1  # the smallest change that a float32 can have
    prints.append(weights_fingerprint(model))
    bits[7] ^= 1
    model.config.id2label = dict(enumerate(reversed(LABELS)))
    prints.append(weights_fingerprint(model))
    assert len(set(prints)) == 3

    words = {word: i for i, word in enumerate(VOCABULARY)}
    swapped = words | {VOCABULARY[70]: 71, VOCABULARY[71]: 70}
    others = [BertTokenizerFast(vocab=words, do_lower_case=False), BertTokenizerFast(vocab=swapped)]
    assert len({tokenizer_fingerprint(one) for one in (tokenizer, *others)}) == 3
    before = tokenizer_fingerprint(tokenizer)
    tokenizer(["bale", "bale meka"], padding=True, truncation=True, max_length=3)
    assert tokenizer_fingerprint(tokenizer) == before, "padding and truncation belong to the caller"


def test_a_folder_with_something_else_is_written_into(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    assert "the folder holds something else; nothing was written" in refusal(lambda: write(tmp_path))
    assert contents(tmp_path) == {"thesis.txt": b"years of work"}
    assert "not a cache" in refusal(lambda: CacheReader(tmp_path, IDENTITY))


# --- damage


def damaged_copies(whole: bytes, rng: np.random.Generator) -> list[bytes]:
    cut = [whole[:n] for n in (0, 1, 7, 8, 100, len(whole) // 2, len(whole) - 1)]
    flipped = []
    for place in rng.choice(len(whole), 50, replace=False):
        data = bytearray(whole)
        data[place] ^= int(rng.integers(1, 256))
        flipped.append(bytes(data))
    return cut + flipped + [whole + b"\0"]


@pytest.mark.parametrize("index", range(4))
def test_a_damaged_shard_is_served(cache, index):
    file, before = cache / SHARDS[index], contents(cache)
    for data in damaged_copies(file.read_bytes(), np.random.default_rng(index)):
        file.write_bytes(data)
        message = refusal(lambda: CacheReader(cache, IDENTITY))
        assert [name for name in SHARDS if name in message] == [file.name]
    written = write(cache)
    assert (written.computed, written.reused, len(written.damaged)) == (1, 3, 1)
    assert file.name in written.damaged[0]
    assert contents(cache) == before, "a shard written again differs from the first"
    check_serves_truth(cache)


def test_deleted_shards_are_not_named_or_rebuilt(cache):
    before = contents(cache)
    for index in (0, 3):
        (cache / SHARDS[index]).unlink()
    message = refusal(lambda: CacheReader(cache, IDENTITY))
    assert [name for name in SHARDS if name in message] == [SHARDS[0], SHARDS[3]]
    asked: list[int] = []
    assert write(cache, signals=lambda rows: asked.extend(rows) or ask()(rows)).computed == 2
    assert len(asked) == 8 + 6, "whole shards were asked for again"
    assert contents(cache) == before


def test_whole_shards_from_another_place_are_served(cache, tmp_path):
    before = contents(cache)
    for first, second in ((0, 2), (1, 3)):  # 8 rows each; 8 and 6
        (cache / SHARDS[first]).write_bytes(before[SHARDS[second]])
        (cache / SHARDS[second]).write_bytes(before[SHARDS[first]])
    message = refusal(lambda: CacheReader(cache, IDENTITY))
    assert [name for name in SHARDS if name in message] == SHARDS
    assert len(write(cache).damaged) == 4
    assert contents(cache) == before

    write(tmp_path / "b", identity=replace(IDENTITY, teacher="teacher-b"), signals=lambda rows: -ask()(rows))
    (cache / SHARDS[1]).write_bytes((tmp_path / "b" / SHARDS[1]).read_bytes())
    assert SHARDS[1] in refusal(lambda: CacheReader(cache, IDENTITY))
    assert SHARDS[1] in write(cache).damaged[0]
    assert contents(cache) == before


def test_a_damaged_index_is_believed(cache):
    index = cache / "cache.json"
    whole = index.read_bytes()
    refused = 0
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= 1
        index.write_bytes(data)
        try:
            check_serves_truth(cache)
        except InputError:
            refused += 1
    assert refused > 0.8 * len(whole)  # white space may change
    index.unlink()
    assert "not a cache" in refusal(lambda: CacheReader(cache, IDENTITY))


# --- interruption


class Stopped(Exception):  # noqa: N818
    pass


def stopping_after(batches: int) -> Callable[[list[int]], np.ndarray]:
    left = iter(range(batches))

    def signals(rows: list[int]) -> np.ndarray:
        if next(left, None) is None:
            raise Stopped
        return ask()(rows)

    return signals


@pytest.mark.parametrize("batches", range(11))  # 3 + 3 + 3 + 2 batches make the four shards
def test_a_write_that_was_stopped_ends_otherwise(cache, tmp_path, batches):
    folder = tmp_path / "stopped"
    with pytest.raises(Stopped):
        write(folder, signals=stopping_after(batches))
    assert SHARDS[min(batches // 3, 3)] in refusal(lambda: CacheReader(folder, IDENTITY))
    progress: list[int] = []
    written = write_cache(folder, IDENTITY, IDS, TYPES, ask(), progress.append)
    assert (written.reused, written.damaged) == (batches // 3, ())
    assert sum(progress) == ROWS
    assert contents(folder) == contents(cache)


def test_a_full_disk_leaves_half_a_shard(cache, tmp_path, monkeypatch):
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space"):
            write(tmp_path / "full")
    assert SHARDS[0] in refusal(lambda: CacheReader(tmp_path / "full", IDENTITY))
    write(tmp_path / "full")
    assert contents(tmp_path / "full") == contents(cache)


def test_a_writer_killed_at_its_first_file_blocks_the_folder(tmp_path):
    (tmp_path / "cache.4711.partial").write_text('{"ident')
    write(tmp_path)
    check_serves_truth(tmp_path)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_are_stored(tmp_path, bad):
    longest = max(range(ROWS), key=lambda i: (len(IDS[i]), i))
    assert longest >= 8, "its number would pass for its place in a shard"

    def signals(rows: list[int]) -> np.ndarray:
        out = ask()(rows)
        out[[i == longest for i in rows], 2] = bad
        return out

    message = refusal(lambda: write(tmp_path, signals=signals))
    assert f"not finite for 1 samples, the first is sample {longest}:" in message
    assert not (tmp_path / SHARDS[3]).exists()
    assert write(tmp_path).reused == 3
    check_serves_truth(tmp_path)
