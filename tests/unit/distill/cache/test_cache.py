"""Tests the teacher-signal cache: lookup by content, growth, and rejection of another identity."""

import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import BertTokenizerFast

from distill.cache import CacheReader, Dense, Generated, Identity, sample_key, sample_keys, write_cache
from distill.cache import reader as cache_reader
from distill.cache.samples import build_samples as text_samples
from distill.data.batches.encode import encode_samples
from distill.data.batches.packing import PackedRows
from distill.data.batches.token_blocks import LanguageBlocks
from distill.data.splits.examples import Examples
from distill.errors import InputError
from distill.teacher.fingerprint import tokenizer_fingerprint, weights_fingerprint
from distill.teacher.online import OnlineTeacher
from support.cache_samples import (
    IDENTITY,
    WORDS,
    Teacher,
    equal,
    files_of,
    keys_of,
    make_rows,
    padded,
    read_rows,
    write,
)
from support.processes.forking import fork_server
from support.tiny_models import LABELS, VOCABULARY

ROWS = make_rows()
EXACT = Identity("teacher-a", "tokenizer-a", (Dense(width=WORDS, each="position"), Dense(width=3, of="embedding")))
TOKENS = "attention_mask"


def stored_output(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the part of the teacher's output that EXACT stores."""
    output = Teacher()(batch)
    return {"logits": output["logits"][batch[TOKENS].bool()], "embedding": output["embedding"]}


def check_truth(reader: Callable, batch: dict[str, torch.Tensor]) -> None:
    found, expected = reader(batch), stored_output(batch)
    assert found.keys() == expected.keys()
    for name in found:
        assert torch.equal(found[name], expected[name]), name


def rejection(call: Callable[[], object]) -> str:
    with pytest.raises(InputError) as caught:
        call()
    return str(caught.value)


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exact") / "cache"
    write(folder, ROWS, identity=EXACT)
    return folder


# --- lookup by content


def test_each_sample_is_served_its_own_signals(original):
    reader, rng = CacheReader(original, EXACT), np.random.default_rng(1)
    assert len(reader) == len(ROWS)
    for size, width, pad in ((1, 0, 0), (7, 16, 3), (4, 40, 95), (60, 17, 5)):
        chosen = [*rng.choice(len(ROWS), size, replace=False), 2, 2]
        check_truth(reader, padded([ROWS[i] for i in chosen], width, pad))


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_coded_signals_are_independent_of_the_batch_they_are_read_in(compression, tmp_path):
    identity = replace(IDENTITY, compression=compression)
    write(tmp_path / "c", ROWS, identity=identity)
    reader, other = CacheReader(tmp_path / "c", identity), pickle.loads(pickle.dumps(CacheReader(tmp_path / "c")))
    alone = [read_rows(reader, [row]) for row in ROWS]
    together = read_rows(other, ROWS)
    for name in ("logits", "log_probs", "tail", "embedding"):
        assert np.array_equal(np.concatenate([one[name] for one in alone]), together[name]), name
    assert np.abs(together["logits"] - stored_output(padded(ROWS))["logits"].numpy()).max() < 0.01
    assert np.allclose(together["weights"].sum(1), 1)


def test_zstd_shrinks_the_shards_and_preserves_the_signals(original, tmp_path):
    flat, identity = [np.full(12, i) for i in range(WORDS)], replace(EXACT, compression="zstd")
    for name, each in (("none", EXACT), ("zstd", identity)):
        write(tmp_path / name, flat, identity=each)
    sizes = [sum(file.stat().st_size for file in (tmp_path / name).glob("shard-*")) for name in ("none", "zstd")]
    assert sizes[1] < sizes[0] / 3, "each record holds the same row twelve times"
    check_truth(CacheReader(tmp_path / "zstd", identity), padded(flat))


def test_concurrent_threads_are_served_the_right_rows(original, monkeypatch):
    monkeypatch.setattr(cache_reader, "OPEN_SHARDS", 2)
    reader, rng = CacheReader(original, EXACT), np.random.default_rng(2)
    batches = [padded([ROWS[i] for i in rng.choice(len(ROWS), 9)]) for _ in range(64)]
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda batch: check_truth(reader, batch), batches):
            pass


def test_the_reader_holds_no_more_shards_open_than_allowed(original, monkeypatch):
    monkeypatch.setattr(cache_reader, "OPEN_SHARDS", 2)
    reader = CacheReader(original, EXACT)
    order = sorted(range(len(ROWS)), key=lambda i: len(ROWS[i]))
    for i in [*order, *reversed(order)]:
        check_truth(reader, padded([ROWS[i]]))
        assert len(reader.shards) <= 2
    assert list(reader.shards) == [1, 0], "the shard that was used last goes last"


def test_data_loader_workers_serve_the_right_rows(original):
    reader = CacheReader(original, EXACT)
    reader(padded(ROWS[:3]))
    loader = DataLoader(ROWS, batch_size=8, num_workers=2, collate_fn=lambda rows: (padded(rows), reader(padded(rows))))
    for batch, signals in loader:
        check_truth(lambda _, signals=signals: signals, batch)


def test_a_forked_process_serves_the_right_rows(original):
    with fork_server().Pool(1) as pool:
        signals = pool.apply(read_rows, (CacheReader(original, EXACT), ROWS))
    assert equal(signals, {name: value.numpy() for name, value in stored_output(padded(ROWS)).items()})


def test_sample_order_and_duplicates_do_not_change_the_files(original, tmp_path):
    order, teacher = np.random.default_rng(3).permutation(len(ROWS)).tolist() + [4, 4, 7], Teacher()
    written = write(tmp_path / "other", [ROWS[i] for i in order], teacher, EXACT)
    assert (written.samples, written.queried_samples) == (len(ROWS), len(ROWS))
    assert files_of(tmp_path / "other") == files_of(original)


def test_sample_keys_depend_on_token_types_and_chosen_positions():
    ids, marks = ROWS[0], np.arange(len(ROWS[0])) % 2
    keys = [sample_key(ids), sample_key(ids, marks), sample_key(ids, 1 - marks), sample_key(ids, None, marks > 0)]
    assert len({*keys, sample_key(ids, marks, marks > 0), sample_key(np.append(ids, 0))}) == 6


def test_the_key_of_a_packed_row_is_the_hash_that_the_cache_format_page_documents():
    documents = LanguageBlocks([np.array([7, 8, 9]), np.array([4, 5]), np.array([6])])
    packed = PackedRows(documents, [np.array([0, 2]), np.array([1])])
    first, second = sample_keys(packed.collate([0, 1], pad_id=0))
    for key, ids, numbers in ((first, [7, 8, 9, 6], [1, 1, 1, 2]), (second, [4, 5], [1, 1])):
        hashed = np.array(ids, "<i4").tobytes() + b"d" + np.array(numbers, "<i4").tobytes()
        assert key == blake2b(hashed, digest_size=16).digest()
    row = np.array([7, 8, 9, 6])
    assert sample_key(row) != first, "a row of one document has another key"


def test_cached_logits_of_a_real_teacher_match_its_direct_logits(tmp_path, tiny_model, tokenizer):
    model, words = tiny_model("bert"), VOCABULARY[63:]
    texts, pairs = [" ".join(words[i : i + 1 + i % 9]) for i in range(40)], [words[-1 - i] for i in range(40)]
    data = encode_samples(tokenizer, Examples(texts, pairs), 64)
    signals = (Dense(width=len(LABELS)),)
    identity = Identity(weights_fingerprint(model), tokenizer_fingerprint(tokenizer), signals)
    write_cache(tmp_path, identity, text_samples(data, 0), OnlineTeacher(model))
    logits = CacheReader(tmp_path, identity)(data.collate(list(range(39, -1, -3)), 0))["logits"]
    alone = [model(**tokenizer(texts[i], pairs[i], return_tensors="pt")).logits[0] for i in range(39, -1, -3)]
    torch.testing.assert_close(logits, torch.stack(alone), rtol=1e-4, atol=1e-5)


# --- missing and added samples


def test_a_sample_that_was_never_written_is_rejected_with_its_key(original):
    reader, unwritten = CacheReader(original, EXACT), ROWS[5] + 1
    message = rejection(lambda: reader(padded([ROWS[0], unwritten])))
    assert f"no signal for sample {sample_key(unwritten).hex()} among {len(ROWS)}" in message
    assert "the data or its preprocessing changed" in message
    assert reader.contains(keys_of([ROWS[0], unwritten, ROWS[1]])).tolist() == [True, False, True]


def test_adding_samples_keeps_existing_shards_and_queries_only_the_new_samples(original, tmp_path):
    new_rows, teacher = make_rows(20, seed=7), Teacher()
    write(tmp_path / "c", ROWS, identity=EXACT)
    written = write(tmp_path / "c", [*ROWS[:10], *new_rows], teacher, EXACT)
    assert (written.samples, written.queried_samples) == (len(ROWS) + len(new_rows), len(new_rows))
    assert set(teacher.queried_keys) == set(keys_of(new_rows)), "the teacher was queried again for old samples"
    before, after = files_of(original), files_of(tmp_path / "c")
    for name in before:
        assert after.get(name) == before[name] or "index" in name or "cache.json" in name, name
    assert len([name for name in after if name.startswith("index-")]) == 1
    check_truth(CacheReader(tmp_path / "c", EXACT), padded([*ROWS, *new_rows]))
    assert write(tmp_path / "c", ROWS, identity=EXACT).queried_samples == 0, "fewer samples need nothing new"


def test_reported_progress_adds_up_to_the_number_of_samples(tmp_path):
    for rows in (ROWS[:20], ROWS, ROWS):
        reported: list[int] = []
        write(tmp_path / "c", rows, on_progress=reported.append)
        assert sum(reported) == len(rows)


@pytest.mark.parametrize("rows", [[], ROWS[:1]])
def test_an_empty_write_is_rejected_and_a_single_sample_is_served(rows, tmp_path):
    if not rows:
        assert "expected samples, found none" in rejection(lambda: write(tmp_path, rows, identity=EXACT))
        return
    write(tmp_path, rows, identity=EXACT)
    check_truth(CacheReader(tmp_path, EXACT), padded(rows))


# --- rejection of another identity

SAMPLED, TOPK, LOGITS, EMBEDDING = IDENTITY.signals
IDENTITY_CHANGES = {
    "teacher": {"teacher": "teacher-b"},
    "tokenizer": {"tokenizer": "tokenizer-b"},
    "preprocessing": {"preprocessing": "max_length=32"},
    "compression": {"compression": "zstd"},
    "signals.sampled.draws": {"signals": (replace(SAMPLED, draws=7), TOPK, LOGITS, EMBEDDING)},
    "signals.sampled.temperature": {"signals": (replace(SAMPLED, temperature=2.0), TOPK, LOGITS, EMBEDDING)},
    "signals.sampled.seed": {"signals": (replace(SAMPLED, seed=1), TOPK, LOGITS, EMBEDDING)},
    "signals.topk.k": {"signals": (SAMPLED, replace(TOPK, k=5), LOGITS, EMBEDDING)},
    "signals.topk.step": {"signals": (SAMPLED, replace(TOPK, step=0.25), LOGITS, EMBEDDING)},
    "signals.topk": {"signals": (SAMPLED, LOGITS, EMBEDDING)},
    "signals.logits.each": {"signals": (SAMPLED, TOPK, replace(LOGITS, each="sample"), EMBEDDING)},
    "signals.logits.dtype": {"signals": (SAMPLED, TOPK, replace(LOGITS, dtype="float32"), EMBEDDING)},
    "signals.embedding.width": {"signals": (SAMPLED, TOPK, LOGITS, replace(EMBEDDING, width=4))},
    "signals.generated": {"signals": (*IDENTITY.signals, Generated(width=WORDS))},
}


@pytest.fixture(scope="module")
def coded(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("coded") / "cache"
    write(folder, ROWS)
    return folder


@pytest.mark.parametrize("fields", [[name] for name in IDENTITY_CHANGES] + [["teacher", "tokenizer", "signals.topk.k"]])
def test_a_cache_of_another_identity_is_rejected_with_the_differing_fields(fields, coded):
    identity, before = IDENTITY, files_of(coded)
    for field in fields:
        identity = replace(identity, **IDENTITY_CHANGES[field])
    for call in (lambda: CacheReader(coded, identity), lambda: write(coded, ROWS, identity=identity)):
        message = rejection(call)
        named = [part.split(": expected ")[0].split(" ")[-1] for part in message.split("; ")]
        assert named == sorted(fields)
        assert "its signals would not be those of this teacher and data" in message
    assert files_of(coded) == before


def test_another_version_of_the_format_is_rejected(coded, monkeypatch):
    monkeypatch.setattr("distill.cache.format.identity._FORMAT", 3)
    assert "format: expected 3, found 2" in rejection(lambda: CacheReader(coded, IDENTITY))


def test_different_tokenizers_have_different_fingerprints(tokenizer):
    words = {word: i for i, word in enumerate(VOCABULARY)}
    swapped = words | {VOCABULARY[70]: 71, VOCABULARY[71]: 70}
    others = [BertTokenizerFast(vocab=words, do_lower_case=False), BertTokenizerFast(vocab=swapped)]
    keeps_the_end = BertTokenizerFast(vocab=words, truncation_side="left")
    assert len({tokenizer_fingerprint(one) for one in (tokenizer, *others, keeps_the_end)}) == 4


def test_one_weight_bit_changes_the_fingerprint_but_dropout_does_not(tiny_model):
    model = tiny_model("bert")
    before = weights_fingerprint(model)
    assert weights_fingerprint(tiny_model("bert", hidden_dropout_prob=0.5)) == before, "dropout changes no answer"
    model.get_parameter("bert.encoder.layer.3.output.dense.bias").data.view(torch.int32)[7] ^= 1
    assert weights_fingerprint(model) != before


def test_a_folder_with_other_files_is_rejected_and_left_unchanged(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    assert "the folder holds something else; nothing was written" in rejection(lambda: write(tmp_path, ROWS))
    assert files_of(tmp_path) == {"thesis.txt": b"years of work"}
    assert "not a cache" in rejection(lambda: CacheReader(tmp_path, IDENTITY))
