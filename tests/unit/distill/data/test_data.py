"""Tests data loading from files to batches: reading, rejections, splitting, encoding and ordering."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, List, Value

from distill.data.batches.batches import EvalBatches, TrainBatches, epoch_order, length_order
from distill.data.batches.encode import Encoded, encode_samples
from distill.data.config import DataConfig
from distill.data.sources.cells import find_multi_hot_width
from distill.data.sources.tables import _read_hub, read_splits, read_table
from distill.data.splits.evaluated import find_label_column
from distill.data.splits.examples import Examples
from distill.data.splits.holdout import draw_held_out, hold_out
from distill.data.splits.labelled import load_all_texts, load_labelled, load_splits
from distill.errors import InputError
from distill.losses.logits import IGNORED
from support.tiny_models import LABELS, VOCABULARY, word_tokenizer

AWKWARD = [
    ('she said "no", twice', "a"),
    ("two\nlines, one comma", "b"),
    ("  ünïcode 中文 \U0001f600", "a"),
    ("007", "NA"),
    ("null", "1e3"),
    ("a\ttab", "b"),
]


def write_csv(file: Path, rows: list[tuple[str, ...]], delimiter: str = ",") -> Path:
    lines = [delimiter.join('"' + cell.replace('"', '""') + '"' for cell in row) for row in rows]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def write_rows(file: Path, rows: list[tuple[str, str]]) -> Path:
    """Writes (text, label) rows in the format of the file's suffix."""
    if file.suffix in (".csv", ".tsv"):
        return write_csv(file, [("text", "label"), *rows], "," if file.suffix == ".csv" else "\t")
    if file.suffix == ".jsonl":
        file.write_text("".join(json.dumps({"text": t, "label": n}) + "\n\n" for t, n in rows), encoding="utf-8")
    else:
        pq.write_table(pa.table({"text": [t for t, _ in rows], "label": [n for _, n in rows]}), file)
    return file


def config(path: Path, **changes) -> DataConfig:
    return DataConfig(**({"path": str(path)} | changes))


def rejection(path: Path, **changes) -> str:
    with pytest.raises(InputError) as caught:
        load_splits(config(path, **changes))
    return str(caught.value)


# --- sources


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "parquet"])
def test_every_format_preserves_the_text(tmp_path, ending):
    table = read_table(write_rows(tmp_path / f"train.{ending}", AWKWARD))
    assert [(row["text"], row["label"]) for row in table.to_pylist()] == AWKWARD


def test_a_line_break_at_the_edge_of_a_block_does_not_split_a_row(tmp_path):
    rows = [(f"{i}\n" * 8, "ab"[i % 2]) for i in range(40_000)]  # more than one of the reader's blocks
    assert read_table(write_rows(tmp_path / "train.csv", rows))["text"].to_pylist() == [text for text, _ in rows]


def test_json_values_are_read_as_text(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text('{"text": "a", "label": 1}\n{"text": null, "other": true, "label": "ü"}\n', encoding="utf-8")
    assert read_table(file).to_pylist() == [
        {"text": "a", "label": "1", "other": None},
        {"text": None, "label": "ü", "other": "true"},
    ]


def test_a_hub_data_set_keeps_its_class_names_and_splits(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["yes", "no"])})
    (tmp_path / "hub").mkdir()
    for split, labels in (("train", [1, 0, 1]), ("validation", [0]), ("test", [-1, 0])):
        rows = {"text": [f"{split} {i}" for i in range(len(labels))], "label": labels}
        datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "hub" / f"{split}.parquet")
    splits = _read_hub(str(tmp_path / "hub"), None)
    assert {split: table["label"].to_pylist() for split, table in splits.items()} == {
        "train": ["no", "yes", "no"],
        "validation": ["yes"],
        "test": [None, "yes"],
    }
    assert splits["train"]["text"].to_pylist() == ["train 0", "train 1", "train 2"]


def test_lists_of_class_labels_in_a_hub_data_set_are_read_as_names(tmp_path, monkeypatch):
    """The tags of CoNLL-2003 and the labels of GoEmotions are stored like this; lists of other numbers stay numbers."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tags, folder = datasets.ClassLabel(names=["O", "B-PER", "I-PER"]), str(tmp_path / "hub")
    features = datasets.Features(
        {
            "tokens": datasets.Sequence(datasets.Value("string")),
            "ner_tags": datasets.Sequence(tags),
            "large": datasets.LargeList(tags),
            "nested": [[tags]],
            "counts": datasets.Sequence(datasets.Value("int64")),
        }
    )
    numbers = [[1, 2, 0], [], [0]]
    rows = {"tokens": [["Ann", "Lee", "sat"], [], ["so"]], "ner_tags": numbers, "large": numbers}
    rows |= {"nested": [[[1], []], [], None], "counts": numbers}
    (tmp_path / "hub").mkdir()
    datasets.Dataset.from_dict(rows, features=features).to_parquet(f"{folder}/train.parquet")
    columns = _read_hub(folder, None)["train"].to_pydict()
    assert columns["ner_tags"] == columns["large"] == [["B-PER", "I-PER", "O"], [], ["O"]]
    assert columns["nested"] == [[["B-PER"], []], [], None]
    assert columns["counts"] == numbers


def test_each_split_is_read_from_the_file_of_its_name(tmp_path):
    for name, text in (
        ("train.parquet", "p"),
        ("DEV.jsonl", "d"),
        ("test.tsv", "t"),
        ("x.csv", "x"),
    ):
        write_rows(tmp_path / name, [(text, "l")])
    texts = {split: table["text"].to_pylist() for split, table in read_splits(str(tmp_path)).items()}
    assert texts == {"train": ["p"], "validation": ["d"], "test": ["t"]}


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.csv", b"text,label\nhi,x\na,b,c\nyo,y\n", "Row #3: Expected 2 columns, got 3: a,b,c"),
        ("a.csv", b"text,label\nhi,x\nho,x\nonly\n", "Row #4: Expected 2 columns, got 1: only"),
        ("a.csv", b"text,label\n" + b"some text,x\n" * 200_000 + b"a,b,c\n", "Row #200002"),  # more than one block
        ("a.csv", b"text,label\nhi,x\nca\xff\xe9,y\n", "Row #3"),
        ("a.tsv", b"text\tlabel\nhi\tx\na\tb\tc\n", "Row #3"),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": "b" "label": 2}\n', "row 3"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff\xe9"}\n', "row 2"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "half \\ud83d"}\n', "row 2"),
        ("a.jsonl", b'{"text": "a"}\n["b"]\n', "row 2: expected an object, found list"),
        ("a.parquet", b"PAR1 and no more PAR1", "not a parquet file"),
        ("a.csv", b"", "empty"),
        ("a.csv", b"text,label\n", "found none below the header"),
        ("a.jsonl", b"\n\n", "expected rows"),
        (
            "a.txt",
            b"text",
            "expected an extension among .parquet, .csv, .tsv, .json, .jsonl, .conll, each also with .gz, found '.txt'",
        ),
    ],
)
def test_a_broken_row_is_rejected_with_its_file_and_place(tmp_path, name, content, named):
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_table(file)
    assert str(file) in str(caught.value)
    assert named in str(caught.value)


@pytest.mark.parametrize("compression", ["none", "snappy"])
def test_flipped_bytes_in_parquet_never_change_the_rows_read(tmp_path, compression):
    file, rng = tmp_path / "train.parquet", np.random.default_rng(0)
    rows = pa.table({"text": [f"text number {i} of many" for i in range(300)], "label": ["a", "b", "c"] * 100})
    pq.write_table(rows, file, row_group_size=100, compression=compression, write_page_checksum=True)
    whole, group = file.read_bytes(), pq.ParquetFile(file).metadata.row_group(1)
    start = group.column(0).dictionary_page_offset
    end = start + sum(group.column(i).total_compressed_size for i in range(2))
    damage = []
    for offset in rng.integers(start, end, 200):
        data = bytearray(whole)
        data[offset] ^= 1 << int(rng.integers(8))
        file.write_bytes(data)
        damage.append(damage_of(file, rows))
    assert set(damage) <= {None, "rows 101 to 200 (row group 1) are damaged"}
    assert damage.count(None) < 50  # a flip in an unread statistic does no harm


def damage_of(file: Path, rows: pa.Table) -> str | None:
    """Returns the damage that the reader reports, or None if it returns the right rows nevertheless."""
    try:
        assert read_table(file).equals(rows), "a change of the content was not seen"
    except InputError as error:
        return str(error).split(": ")[1]
    return None


def test_text_that_is_not_utf8_is_rejected_with_its_rows(tmp_path):
    file = tmp_path / "train.parquet"
    pq.write_table(pa.table({"text": ["good", "brok"] * 3, "label": ["a", "b"] * 3}), file, compression="none")
    file.write_bytes(file.read_bytes().replace(b"brok", b"br\xffk", 1))
    assert "rows 1 to 6 (row group 0) are damaged" in rejection(file)


def test_a_missing_path_or_a_folder_without_a_train_file_is_rejected(tmp_path):
    assert "no such file or folder" in rejection(tmp_path / "none")
    assert "no path is set" in rejection("")
    (tmp_path / "notes.md").touch()
    assert "expected a train file (train.parquet, train.csv" in rejection(tmp_path)
    assert "found notes.md" in rejection(tmp_path)


# --- columns and splits


def test_a_label_name_is_preferred_to_a_number_and_settings_select_columns(tmp_path):
    rows = [("id", "Label_Name", "label", "Sentence"), *[(str(i), "ab"[i % 2], str(i % 2), f"t{i}") for i in range(20)]]
    file = write_csv(tmp_path / "train.csv", rows)
    assert load_splits(config(file)).labels == ("a", "b"), "the name of a class goes before its number"
    assert load_splits(config(file, label="label")).labels == ("0", "1")
    assert sorted(load_splits(config(file, text="id")).test.texts)[0].isdigit()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, "no text column: expected one of text, sentence"),
        ({"text": "bodi"}, "no column 'bodi' (set by --data.text), found body, tag; did you mean 'body'?"),
        ({"text": "body"}, "no label column: expected one of label_name"),
        ({"text": "body", "label": "tags"}, "did you mean 'tag'?"),
        ({"text": "body", "label": "tag", "text_pair": "zzz"}, "no column 'zzz' (set by --data.text_pair)"),
    ],
)
def test_a_missing_column_is_rejected_and_named(tmp_path, changes, named):
    file = write_csv(tmp_path / "train.csv", [("body", "tag"), ("t", "a"), ("u", "b")])
    assert named in rejection(file, **changes)


@pytest.mark.parametrize(
    ("names", "order"),
    [
        (["10", "9", "-1", "-20", "100"], ("-20", "-1", "9", "10", "100")),
        (["b10", "b9", "a"], ("a", "b10", "b9")),
        (["10", "9", "x"], ("10", "9", "x")),
        (
            [z + n for n in "12345678" for z in ("0", "", "00")],
            tuple(z + n for n in "12345678" for z in ("00", "0", "")),
        ),
    ],
)
def test_labels_are_sorted_as_numbers_or_as_text(tmp_path, names, order):
    file = write_rows(tmp_path / "train.csv", [(f"{name} {i}", name) for name in names for i in range(4)])
    splits = load_splits(config(file))
    assert splits.labels == order
    assert all(
        splits.labels[n] == text.split()[0] for text, n in zip(splits.train.texts, splits.train.labels, strict=True)
    )


def test_held_out_rows_are_stratified_and_reproducible(tmp_path):
    rows = [(f"{name} {i}", name) for name, count in (("a", 200), ("b", 40), ("c", 2), ("d", 1)) for i in range(count)]
    file = write_rows(tmp_path / "data.csv", rows)
    splits = load_splits(config(file), seed=3)
    count = {p: [getattr(splits, p).labels.count(i) for i in range(4)] for p in ("train", "validation", "test")}
    assert count == {"train": [162, 32, 1, 1], "validation": [18, 4, 0, 0], "test": [20, 4, 1, 0]}
    everything = splits.train.texts + splits.validation.texts + splits.test.texts
    assert sorted(everything) == sorted(text for text, _ in rows)
    assert load_splits(config(file), seed=3) == splits
    assert load_splits(config(file), seed=4).test.texts != splits.test.texts
    assert splits.notes["test_from"] == "25 rows held out of train, stratified, seed 3"


def test_existing_splits_are_kept_and_only_a_missing_one_is_held_out(data_folder):
    splits = load_splits(config(data_folder))
    assert splits.labels == LABELS
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (110, 10, 40)
    assert splits.notes["test_from"] == "the data set"
    assert [splits.validation.labels.count(i) for i in range(5)] == [2] * 5


def test_a_class_of_one_row_stays_in_train():
    train, held_out = hold_out(["a", "b", "a", "c", "a"], 0.9, seed=0)
    assert sorted(train + held_out) == [0, 1, 2, 3, 4]
    assert {1, 3} < set(train)
    assert len(held_out) == 2
    with pytest.raises(InputError, match="nothing to evaluate on"):
        hold_out(["a", "b", "c"], 0.5, seed=0)


def test_data_that_cannot_be_trained_on_is_rejected(tmp_path):
    write_rows(tmp_path / "train.csv", [("t", "a"), ("u", "b"), ("v", "a")])
    write_rows(tmp_path / "test.csv", [("t", "a"), ("u", "zz"), ("w", "zz")])
    assert "test has labels that train lacks: 'zz' (2 rows)" in rejection(tmp_path)
    write_rows(tmp_path / "test.csv", [("t", "a"), ("u", "")])
    assert "test: column 'label' contains no label in row 2, 1 in all" in rejection(tmp_path)
    assert "found 1 (only)" in rejection(write_rows(tmp_path / "one.csv", [(f"t{i}", "only") for i in range(9)]))
    assert "contains no text in any of 2 rows" in rejection(write_rows(tmp_path / "no.csv", [(" ", "a"), ("", "b")]))


@pytest.mark.parametrize("wrong", [{"test_fraction": 1.0}, {"validation_fraction": 0.0}, {"max_length": 3}])
def test_a_setting_that_leaves_no_data_is_rejected(wrong):
    with pytest.raises(InputError, match=f"data.{next(iter(wrong))}"):
        DataConfig(**wrong)


def write_pairs(folder: Path, split: str, rows: list[tuple[str, str, str]]) -> None:
    write_csv(folder / f"{split}.csv", [("sentence1", "sentence2", "label"), *rows])


def test_second_texts_stay_with_their_first_texts(tmp_path):
    write_pairs(tmp_path, "train", [(f"a{i}", f"b{i}", str(i % 2)) for i in range(20)] + [("no second", "", "1")])
    write_pairs(tmp_path, "test", [("a1", "b1", "0"), ("A2!", " b2 ", "1"), ("a3", "b4", "1")])
    splits = load_splits(config(tmp_path))
    assert splits.train.pairs == [text.replace("a", "b") for text in splits.train.texts]
    assert splits.notes["dropped_empty"] == 1
    assert load_splits(config(tmp_path, text="sentence2")).train.pairs is None, "a text is no pair with itself"
    seen = sum(text in splits.train.texts for text in ("a1", "a2"))
    assert splits.notes["test_texts_also_in_train"] == seen, "both texts count, without case and punctuation"


def test_second_texts_in_some_splits_only_are_rejected(tmp_path):
    write_pairs(tmp_path, "train", [(f"a{i}", f"b{i}", str(i % 2)) for i in range(20)])
    write_rows(tmp_path / "test.csv", [("a", "0"), ("b", "1")])
    assert "only train, validation has a second text" in rejection(tmp_path)
    (tmp_path / "test.csv").unlink()
    more = write_csv(tmp_path / "more.csv", [("text",), ("alone",)])
    assert "the model would see other inputs" in rejection(tmp_path, unlabelled=str(more))


def test_test_texts_seen_in_training_are_counted(data_folder):
    assert load_splits(config(data_folder)).notes["test_texts_also_in_train"] == 0
    train = load_splits(config(data_folder)).train
    copied = [
        (f"{text.upper()} !", LABELS[label]) for text, label in zip(train.texts[:3], train.labels[:3], strict=True)
    ]
    write_rows(data_folder / "test.csv", [*copied, ("something else", LABELS[0])])
    assert load_splits(config(data_folder)).notes["test_texts_also_in_train"] == 3


def test_unlabelled_texts_get_the_ignored_label(tmp_path, data_folder, tokenizer):
    more = write_csv(tmp_path / "more.csv", [("text", "n"), ("bale fiso", "1"), ("  ", "2"), ("meka", "3")])
    splits = load_splits(config(data_folder, unlabelled=str(more)))
    assert splits.unlabelled == Examples(["bale fiso", "meka"], None, [])
    both = encode_samples(tokenizer, splits.train, 64).join(encode_samples(tokenizer, splits.unlabelled, 64))
    assert both.labels.tolist() == [*splits.train.labels, IGNORED, IGNORED]
    assert tokenizer.decode(both.input_ids[-1]) == "[CLS] meka [SEP]"
    cut = encode_samples(tokenizer, splits.train, 4), encode_samples(tokenizer, splits.unlabelled, 4)
    assert cut[0].join(cut[1]).truncated == len(splits.train)
    assert len(both.token_type_ids) == len(both) == len(splits.train) + 2


# --- token ids


def expected_ids(tokenizer, text: str, pair: str | None, limit: int) -> tuple[list[int], list[int], bool]:
    """Returns ids, types and whether the text was truncated, for one text encoded alone."""
    cut = tokenizer(text, pair, truncation=True, max_length=limit)
    return cut["input_ids"], cut["token_type_ids"], len(tokenizer(text, pair)["input_ids"]) > limit


@pytest.mark.parametrize("paired", [False, True])
def test_texts_are_encoded_as_they_are_alone_and_truncated_texts_are_counted(tokenizer, paired):
    rng = np.random.default_rng(0)
    texts, pairs = ([" ".join(rng.choice(VOCABULARY[63:], n)) for n in rng.integers(1, 30, 60)] for _ in range(2))
    pairs = pairs if paired else None
    encoded = encode_samples(tokenizer, Examples(texts, pairs, list(range(60))), 16)
    wanted = [expected_ids(tokenizer, text, pairs[i] if pairs else None, 16) for i, text in enumerate(texts)]
    assert [ids.tolist() for ids in encoded.input_ids] == [ids for ids, _, _ in wanted]
    assert [types.tolist() for types in encoded.token_type_ids] == [types for _, types, _ in wanted]
    assert any(1 in types for types in encoded.token_type_ids) == paired
    assert encoded.labels.tolist() == list(range(60))
    assert encoded.truncated == sum(was_cut for _, _, was_cut in wanted)
    assert 0 < encoded.truncated < 60


def test_texts_are_truncated_to_the_maximum_length_of_the_model(tokenizer):
    long = Examples(["bale " * 500], None, [0])
    assert encode_samples(tokenizer, long, 10_000).lengths.tolist() == [tokenizer.model_max_length]
    assert encode_samples(tokenizer, long, 10_000).truncated == 1


def test_a_model_without_token_types_gets_none():
    bare = word_tokenizer(model_input_names=["input_ids", "attention_mask"])
    encoded = encode_samples(bare, Examples(["bale", "fiso meka"], None, [0, 1]), 16)
    assert encoded.token_type_ids is None
    assert set(encoded.collate([0, 1], 0)) == {"input_ids", "attention_mask", "labels"}


def numbered_rows(lengths: list[int]) -> Encoded:
    """Returns rows of the given lengths; row i consists of i + 1, repeated."""
    ids = [np.full(n, i + 1, np.int64) for i, n in enumerate(lengths)]
    return Encoded(ids, [np.full(n, 1, np.int64) for n in lengths], np.arange(len(lengths)), 0)


def test_padding_is_masked_out():
    batch = numbered_rows([2, 4, 1]).collate([2, 0], pad_id=7)
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[3, 7], [1, 1]],
        "attention_mask": [[1, 0], [1, 1]],
        "token_type_ids": [[1, 0], [1, 1]],
        "labels": [2, 0],
    }
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


# --- order


def skewed_lengths(count: int) -> np.ndarray:
    return np.clip(np.random.default_rng(1).lognormal(3, 1, count), 3, 256).astype(np.int64)


@pytest.mark.parametrize(("count", "size"), [(1, 4), (4, 4), (1001, 8), (5000, 32)])
def test_an_epoch_contains_every_row_once(count, size):
    for epoch in range(3):
        order = epoch_order(skewed_lengths(count), size, seed=1, epoch=epoch)
        assert sorted(np.concatenate(order)) == list(range(count))
        assert sorted(map(len, order))[1:] == [size] * (len(order) - 1), "all batches but one are full"
    assert sorted(np.concatenate(length_order(skewed_lengths(count), size))) == list(range(count))


def test_the_order_depends_only_on_seed_and_epoch():
    orders = {}
    for _ in range(2):
        np.random.default_rng().random()
        for seed in (0, 1):
            for epoch in (0, 1, 2):
                rows = tuple(np.concatenate(epoch_order(skewed_lengths(500), 16, seed, epoch)))
                assert orders.setdefault((seed, epoch), rows) == rows
    assert len(set(orders.values())) == 6, "two epochs or seeds share an order"


def test_little_of_a_batch_is_padding():
    lengths = skewed_lengths(5000)

    def waste(order: list[np.ndarray]) -> float:
        return 1 - lengths.sum() / sum(len(rows) * lengths[rows].max() for rows in order)

    assert waste(epoch_order(lengths, 32, 0, 0)) < 0.10
    assert waste(length_order(lengths, 32)) < 0.03
    assert waste(np.array_split(np.random.default_rng(0).permutation(5000), 157)) > 0.5, "the lengths are not skewed"


def take(reader: TrainBatches, count: int) -> list[list[int]]:
    """Returns the row numbers of the next `count` batches, over as many epochs as required."""
    out: list[list[int]] = []
    while len(out) < count:
        for batch in reader:
            out.append(batch["labels"].tolist())
            if len(out) == count:
                break
    return out


@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (2, 1)])
def test_a_resumed_run_gets_the_same_batches(ranks, rank):
    def reader() -> TrainBatches:
        return TrainBatches(numbered_rows([1 + i % 7 for i in range(43)]), 4, 0, seed=5, rank=rank, ranks=ranks)

    total = 3 * len(reader())
    undisturbed = take(reader(), total)
    epochs = [undisturbed[i : i + total // 3] for i in range(0, total, total // 3)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0], "the epochs have one order"
    for stop in range(total + 1):
        first = reader()
        before_stop = take(first, stop)
        second = reader()
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert before_stop + take(second, total - stop) == undisturbed, f"stopped after {stop} batches"
        assert second.state_dict() == {"position": total}


def test_evaluation_contains_every_row_once():
    batches = EvalBatches(numbered_rows([5, 1, 9, 3, 3]), 2, 0)
    assert [batch["labels"].tolist() for batch in batches] == [[1, 3], [4, 0], [2]]
    assert len(list(batches)) == len(batches) == 3


def test_class_labels_in_parquet_are_read_as_names(tmp_path):
    kinds = {
        "text": Value("string"),
        "label": ClassLabel(names=["neg", "pos"]),
        "tags": List(ClassLabel(names=["O", "B-x"])),
    }
    rows = Dataset.from_dict({"text": ["a", "b"], "label": [1, 0], "tags": [[0, 1], []]}, Features(kinds))
    rows.to_parquet(tmp_path / "train.parquet")
    table = read_table(tmp_path / "train.parquet")
    assert table["label"].to_pylist() == ["pos", "neg"]
    assert table["tags"].to_pylist() == [["O", "B-x"], []]


def test_an_unclosed_quote_is_rejected(tmp_path):
    for name, text in (
        ("train.tsv", 'text\tlabel\n"He said no\tpos\nfoo\tneg\nbar\tpos\n"She left\tneg\n'),
        ("last.tsv", 'text\tlabel\nfoo\tneg\nbar\t"pos\n'),
        ("train.csv", 'text,label\n"foo,x\nbar,y\nbaz" q,x\n'),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(InputError, match="a quote before a cell isn't closed at its end"):
            read_table(tmp_path / name)
    (tmp_path / "quoted.tsv").write_text('text\tlabel\n"a\tb\n""c"""\tpos\n')
    assert read_table(tmp_path / "quoted.tsv")["text"].to_pylist() == ['a\tb\n"c"']


def test_unlabelled_single_texts_are_rejected_beside_pairs(tmp_path):
    write_csv(tmp_path / "train.csv", [("text", "text_pair", "label"), ("a", "b", "x"), ("c", "d", "y")])
    write_csv(tmp_path / "more.csv", [("text",), ("e",)])
    with pytest.raises(InputError, match="only train has a second text"):
        load_all_texts(config(tmp_path, unlabelled=str(tmp_path / "more.csv")))


@pytest.mark.parametrize("value", [["a", "b"], {"role": "user"}])
def test_a_list_or_an_object_in_a_text_column_of_jsonl_is_rejected(value, tmp_path):
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps({"text": each, "label": "x"}) for each in ("a", value)))
    assert "column 'text': expected text, found JSON lists or objects" in rejection(tmp_path)


@pytest.mark.parametrize("hot", [[0.0, 1.0, 1.0], ["0", "1", "1"], [0, 1, 1], [False, True, True]])
def test_multi_hot_labels_are_read_as_one_label_per_position(hot, tmp_path):
    rows = [{"text": f"t{i}", "label": hot[i % 3 :] + hot[: i % 3]} for i in range(12)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    splits = load_labelled(config(tmp_path))
    assert splits.labels == ("0", "1", "2")
    wanted = {row["text"]: [int(str(each) in ("1", "1.0", "True")) for each in row["label"]] for row in rows}
    for part in (splits.train, splits.test):
        assert part.labels == [wanted[text] for text in part.texts]


def test_the_label_format_of_train_holds_for_every_split(tmp_path):
    """Labels named 0, 1 and 2 in train stay names although a small test split has only 0 and 1."""
    for labels, test, expected in (
        ([["0", "1"], ["2"], ["1", "2"], []], ["0", "1"], [1, 1, 0]),
        ([[0, 0, 1], [1, 0, 0], [0, 1, 0]], [], [0, 0, 0]),
    ):
        for split, rows in (("train", labels * 3), ("validation", labels), ("test", [test])):
            lines = [json.dumps({"text": f"t{i}", "label": each}) for i, each in enumerate(rows)]
            (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
        assert load_labelled(config(tmp_path)).test.labels == [expected]
    (tmp_path / "test.jsonl").write_text('{"text": "a", "label": [0, 1]}')
    with pytest.raises(InputError, match=r"test, row 1, column 'label': expected a 0 or 1 for each of 3 labels"):
        load_labelled(config(tmp_path))


def test_lists_of_names_are_not_read_as_multi_hot_labels():
    for cells in ([["0", "1"], ["1"]], [["a", "b"], ["b", "c"]], [[0], [1]], [["0", "2"], ["1", "0"]]):
        assert find_multi_hot_width(cells) == 0


def test_a_label_column_is_found_by_the_name_that_the_user_writes():
    table = pa.table({"Text": ["a"], "Label": ["x"]})
    assert find_label_column(table, DataConfig("unread", label="Label"), ("label",)) == "Label"
    assert find_label_column(table, DataConfig("unread"), ("label",)) == "Label"
    assert find_label_column(table, DataConfig("unread", label="Topic"), ("label",)) is None


def test_a_share_that_leaves_no_row_is_rejected():
    with pytest.raises(InputError, match="expected a held-out share that leaves some of the 10 documents"):
        draw_held_out(10, 0.96, 0, "documents")
    with pytest.raises(InputError, match="expected at least two documents to hold one out, found 1"):
        draw_held_out(1, 0.1, 0, "documents")
