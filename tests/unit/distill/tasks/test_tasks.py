"""Tests of multi-label, regression, tagging and span tasks: data, encoded rows, losses and scores."""

import json
import math
from copy import deepcopy

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from scipy.stats import spearmanr
from seqeval.metrics import f1_score as seqeval_f1
from sklearn.metrics import f1_score
from tokenizers import Regex, normalizers, pre_tokenizers

from compress.prune.vocabulary.vocabulary import count_tokens
from distill.cache.samples import from_rows
from distill.checkpoint.outputs import find_logits
from distill.data.batches.loss_mask import loss_counts
from distill.data.batches.sharding import shard_batch
from distill.data.config import DataConfig
from distill.data.rows.tagged import Tagged, load_all_words, load_tagged
from distill.data.rows.tagged_rows import encode_tagged
from distill.data.sources.conll import read_conll
from distill.data.splits.examples import Examples
from distill.errors import InputError
from distill.losses.config import LossConfig
from distill.losses.logits import IGNORED, squared_error
from distill.tasks.choose import TASKS
from distill.tasks.logit_rows import LabelRows, SpanRows
from distill.tasks.text_classification import MultiLabel, Regression, TextClassification
from distill.tasks.token_classification import TokenClassification
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from support.tiny_models import VOCABULARY, build_model
from support.two_tokenizers import byte_level, sentencepiece, wordpiece

WORDS = [word for word in VOCABULARY if len(word) == 4 and word.isalpha()]


def table(folder, **columns):
    folder.mkdir(exist_ok=True)
    for split in ("train", "validation", "test"):
        rows = {name: pa.array(values[split]) for name, values in columns.items()}
        pa.parquet.write_table(pa.table(rows), folder / f"{split}.parquet")
    return DataConfig(path=str(folder))


def all_splits(values) -> dict:
    return {"train": values, "validation": values, "test": values}


# --- multi-label and regression


def test_every_task_has_the_name_by_which_it_is_chosen():
    assert {name: task.name for name, task in TASKS.items()} == {name: name for name in TASKS}


def test_lists_of_labels_are_read_from_lists_json_and_delimited_text(tmp_path):
    cells = [["b", "a"], [], ["c"], ["a"]]
    config = table(tmp_path / "lists", text=all_splits(["one", "two", "three", "four"]), label=all_splits(cells))
    splits = MultiLabel.read(config, 0)
    assert splits.labels == ("a", "b", "c")
    assert splits.train.labels == [[1, 1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0]]
    spelt = [json.dumps(["b", "a"]), "", "c", "a"]
    assert MultiLabel.read(
        table(tmp_path / "json", text=all_splits(list("abcd")), label=all_splits(spelt)), 0
    ).train.labels == (splits.train.labels)
    piped = ["b|a", "", " c ", "a;"]
    assert MultiLabel.read(
        table(tmp_path / "pipes", text=all_splits(list("abcd")), label=all_splits(piped)), 0
    ).train.labels == (splits.train.labels)
    bad = {"train": cells, "validation": cells, "test": [["d"], [], [], []]}
    with pytest.raises(InputError, match=r"test has labels that train lacks: 'd' \(1 rows\)"):
        MultiLabel.read(table(tmp_path / "bad", text=all_splits(list("abcd")), label=bad), 0)


def test_numbers_are_read_as_labels_and_other_cells_are_rejected(tmp_path):
    config = table(
        tmp_path / "good", text=all_splits(["one", "two"]), text2=all_splits(["a", "b"]), label=all_splits([0.5, 3.0])
    )
    splits = Regression.read(config, 0)
    assert splits.train.labels == [0.5, 3.0]
    assert splits.train.pairs == ["a", "b"]
    assert splits.labels == ("number",)
    for cell in ("high", "nan", None):
        label = {"train": ["1.5", cell], "validation": ["1", "2"], "test": ["1", "2"]}
        with pytest.raises(InputError, match="row 2|the first is row 2"):
            Regression.read(table(tmp_path / "bad", text=all_splits(["one", "two"]), label=label), 0)


def test_unlabelled_rows_are_marked_ignored_and_left_out_of_the_loss(tokenizer):
    task = MultiLabel(("a", "b", "c"))
    known = task.encode(tokenizer, Examples(["ba ka", "le mi"], None, [[1, 0, 1], [0, 0, 0]]), 16)
    assert known.labels.dtype == np.float32
    rows = known.join(task.encode(tokenizer, Examples(["so"], None), 16))
    batch = rows.collate([0, 1, 2], 0)
    assert batch["labels"].tolist() == [[1, 0, 1], [0, 0, 0], [IGNORED] * 3]
    assert loss_counts(batch)["labels"] == 6
    label_rows = LabelRows()
    assert label_rows.labels(batch).tolist() == [1, 0, 1, 0, 0, 0, -100, -100, -100]
    numbers = Regression(("number",)).encode(tokenizer, Examples(["ba ka", "le mi"], None, [0.25, 3.5]), 16)
    more = numbers.join(Regression(("number",)).encode(tokenizer, Examples(["so"], None), 16))
    assert more.labels.tolist() == [0.25, 3.5, IGNORED]
    predictions = torch.tensor([[1.25], [3.5], [7.0]])
    assert squared_error(predictions, torch.from_numpy(more.labels)) == pytest.approx(0.5)


def test_a_number_equal_to_the_ignored_marker_still_counts_as_a_label(tokenizer):
    task = Regression(("number",))
    rows = task.encode(tokenizer, Examples(["ba ka", "le mi", "so"], None, [float(IGNORED), 0.0, 100.0]), 16)
    labels = torch.from_numpy(rows.labels)
    assert rows.labels.dtype == np.float32
    assert labels.tolist() == pytest.approx([-100.0, 0.0, 100.0], abs=1e-4)
    predictions = torch.tensor([[0.0], [0.0], [0.0]])
    assert squared_error(predictions, labels) == pytest.approx(20000 / 3)
    metric = task.scorer()
    metric.update(torch.tensor([[3.0], [1.0], [2.0]]), labels)
    assert metric.compute() == pytest.approx(-0.5, abs=1e-5)
    unlabelled = rows.join(task.encode(tokenizer, Examples(["so"], None), 16))
    assert unlabelled.labels[3] == IGNORED


def module(task, loss, signals=None, head="ForSequenceClassification", **changes) -> DistillationModule:
    return DistillationModule(
        build_model("bert", head, **changes),
        loss=loss,
        train=TrainConfig(epochs=1),
        output_rows=task.output_rows,
        signals=signals,
        metric=task.scorer(),
    )


def test_the_multi_label_loss_equals_the_stock_models(tokenizer):
    task = MultiLabel(("a", "b", "c", "d", "e"))
    labels = [[1, 0, 1, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]
    rows = task.encode(tokenizer, Examples(["ba ka", "le mi so", "de"], None, labels), 16)
    batch = rows.collate(range(3), 0)
    distiller = module(task, LossConfig(kl=0, ce=1), problem_type="multi_label_classification")
    stock = distiller.student(**batch).loss
    torch.testing.assert_close(distiller.compute_terms(batch)["ce"], stock)


def test_regression_losses_are_squared_errors_without_temperature(tokenizer):
    task = Regression(("number",))
    one = {"id2label": {0: "number"}, "label2id": {"number": 0}, "problem_type": "regression"}
    rows = task.encode(tokenizer, Examples(["ba ka", "le mi so", "de"], None, [0.5, 2.0, -1.0]), 16)
    batch = rows.collate(range(3), 0)
    teacher = torch.tensor([[1.0], [2.0], [3.0]])
    distiller = module(task, LossConfig(kl=1, ce=1, temperature=4), lambda _: {"logits": teacher}, **one)
    terms = distiller.compute_terms(batch)
    torch.testing.assert_close(terms["ce"], distiller.student(**batch).loss)
    logits = distiller.student(**{n: v for n, v in batch.items() if n != "labels"}).logits
    torch.testing.assert_close(terms["kl"], (logits - teacher).square().mean())


def test_the_multi_label_kl_is_the_mean_kl_between_sigmoids(tokenizer):
    """The expected value is the mean over labels of the KL between the sigmoids."""
    task = MultiLabel(("a", "b", "c", "d", "e"))
    rows = task.encode(tokenizer, Examples(["ba ka", "le mi so"], None, [[1, 0, 0, 0, 0]] * 2), 16)
    batch = rows.collate(range(2), 0)
    teacher = torch.randn(2, 5, generator=torch.Generator().manual_seed(1))
    distiller = module(task, LossConfig(kl=1, temperature=1), lambda _: {"logits": teacher})
    logits = distiller.student(**{n: v for n, v in batch.items() if n != "labels"}).logits
    p, q = teacher.sigmoid(), logits.sigmoid()
    wanted = (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean()
    torch.testing.assert_close(distiller.compute_terms(batch)["kl"], wanted, rtol=1e-4, atol=1e-6)


def test_scores_equal_those_of_sklearn_and_scipy(tokenizer):
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, 3)) for _ in range(20)]
    true = rng.integers(0, 2, (20, 3))
    logits = torch.tensor(rng.normal(size=(20, 3)), dtype=torch.float32)
    several = MultiLabel(("a", "b", "c"))
    scorer = several.scorer(several.encode(tokenizer, Examples(texts, None, true.tolist()), 16))
    order = rng.permutation(20)
    for rows in (order[:7], order[7:]):
        scorer.record(rows, {}, logits[rows])
    scores = scorer.scores()
    assert next(iter(scores)) == several.metric_name
    assert scores["micro F1"] == pytest.approx(f1_score(true, logits > 0, average="micro"))
    assert scores["macro F1"] == pytest.approx(f1_score(true, logits > 0, average="macro"))
    metric = several.scorer()
    metric.update(LabelRows().logits({}, logits), torch.from_numpy(true).flatten())
    assert float(metric.compute()) == pytest.approx(scores["micro F1"])
    values = rng.normal(size=20)
    numbers = Regression(("number",))
    scorer = numbers.scorer(numbers.encode(tokenizer, Examples(texts, None, values.tolist()), 16))
    scorer.record(order, {}, logits[order, :1])
    assert scorer.scores()["Spearman"] == pytest.approx(spearmanr(logits[:, 0], values.astype(np.float32)).statistic)
    classes = TextClassification(("a", "b", "c"))
    scorer = classes.scorer(classes.encode(tokenizer, Examples(texts, None, true[:, 0].tolist()), 16))
    scorer.record(order, {}, logits[order])
    assert scorer.scores()["accuracy"] == float((logits.argmax(-1).numpy() == true[:, 0]).mean())


# --- tags


SENTENCES = [["Ann", "visits", "New", "York", "."], ["So", "it", "goes"], ["Bob"]]
TAGS = [["B-person", "O", "B-place", "I-place", "O"], ["O", "O", "O"], ["B-person"]]


@pytest.fixture
def tagged(tmp_path) -> DataConfig:
    return table(tmp_path / "tagged", tokens=all_splits(SENTENCES), tags=all_splits(TAGS))


def test_a_conll_file_gives_the_same_words_and_tags_as_columns(tagged, tmp_path):
    splits = load_tagged(tagged)
    assert [[word.strip() for word in words] for words in splits.train.texts] == SENTENCES
    assert splits.labels == ("O", "B-person", "B-place", "I-place")
    assert splits.train.labels == [[1, 0, 2, 3, 0], [0, 0, 0], [1]]
    folder = tmp_path / "conll"
    folder.mkdir()
    lines = ["-DOCSTART- -X- O O", ""]
    for words, tags in zip(SENTENCES, TAGS, strict=True):
        lines += [f"{word} NN {tag}" for word, tag in zip(words, tags, strict=True)] + [""]
    for split in ("train", "validation", "test"):
        (folder / f"{split}.conll").write_text("\n".join(lines))
    again = load_tagged(DataConfig(path=str(folder)))
    assert (again.train.texts, again.train.labels, again.labels) == (
        splits.train.texts,
        splits.train.labels,
        splits.labels,
    )


@pytest.mark.parametrize("make", [byte_level, wordpiece, sentencepiece])
@pytest.mark.parametrize("prefixed", [False, True])
def test_tagged_words_are_tokenized_as_in_running_text(make, prefixed, tmp_path):
    """A tagger is trained on words but used on text, and byte-level tokenizers encode `the` and ` the` differently."""
    tokenizer = deepcopy(make())
    if prefixed and make is byte_level:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    words = ["the", "old", "mill", "stood", "by", "the", "river"]
    config = table(tmp_path / "tagged", tokens=all_splits([words]), tags=all_splits([["O"] * 6 + ["B-place"]]))
    part = load_tagged(config).train
    rows = encode_tagged(tokenizer, part, 64)
    assert rows.input_ids[0].tolist() == tokenizer(" ".join(words))["input_ids"]
    assert rows.words == [list(range(7))]
    assert load_all_words(config).texts == part.texts
    counted = count_tokens(tokenizer, part.texts)  # vocabulary pruning counts the same tokens
    assert counted.nonzero()[0].tolist() == sorted({*rows.input_ids[0].tolist()})


def test_a_number_is_tagged_at_its_digits_rather_than_the_blank_before_it(tmp_path):
    """The pre-tokenizers of Llama 3 and Qwen make the blank before a number a piece of its own."""
    tokenizer = deepcopy(byte_level())
    apart = pre_tokenizers.Split(Regex(r"\p{N}| ?[^\s\p{N}]+|\s+"), "isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([apart, bytes_of])
    words, tags = ["the", "5", "mill 7"], ["O", "B-number", "B-place"]
    rows = encode_tagged(
        tokenizer,
        load_tagged(table(tmp_path / "tagged", tokens=all_splits([words]), tags=all_splits([tags]))).train,
        64,
    )
    pieces = tokenizer.convert_ids_to_tokens(rows.input_ids[0])
    assert pieces == tokenizer.tokenize("the 5 mill 7")
    assert [pieces[i] for i in np.flatnonzero(rows.firsts[0])] == ["the", "5", "Ġmill"]
    assert rows.labels[0][rows.firsts[0]].tolist() == [0, 1, 2]


def test_words_that_a_run_stored_are_read_back_unchanged(tmp_path):
    config = table(tmp_path / "tagged", tokens=all_splits(SENTENCES), tags=all_splits(TAGS))
    part = load_tagged(config).train
    (tmp_path / "kept").mkdir()
    pa.parquet.write_table(part.table(), tmp_path / "kept" / "train.parquet")
    stored_config = DataConfig(path=str(tmp_path / "kept"), text="text")
    assert load_all_words(stored_config).texts == part.texts


@pytest.mark.parametrize("normalized", [False, True])
def test_a_decoder_tags_a_word_at_its_first_piece_that_is_not_a_blank(normalized, tmp_path):
    """SentencePiece writes blanks as `▁`; Llama 2's tokenizer prepends one to every word, even if it has one."""
    tokenizer = deepcopy(sentencepiece())
    if normalized:
        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    words = ["zq", "the", "zq", "mill"]
    part = load_tagged(
        table(tmp_path / "tagged", tokens=all_splits([words]), tags=all_splits([["B-x", "O", "B-x", "B-place"]]))
    ).train
    rows = encode_tagged(tokenizer, part, 64)
    pieces = tokenizer.convert_ids_to_tokens(rows.input_ids[0])
    assert pieces == tokenizer.convert_ids_to_tokens(tokenizer(" ".join(words))["input_ids"])
    assert "▁" in pieces, "a word that the vocabulary has no piece of with its blank"
    assert all(pieces[i].strip("▁") for i in np.flatnonzero(rows.firsts[0]))
    assert rows.labels[0][rows.firsts[0]].tolist() == part.labels[0]


def test_an_encoder_tags_a_word_at_its_first_piece_even_if_it_is_a_blank(tmp_path):
    """Encoders attend in both directions and are trained with a word's tag on its first piece, even a blank one."""
    tokenizer = deepcopy(sentencepiece())
    tokenizer.add_special_tokens({"cls_token": "<s>", "mask_token": "<unk>"})
    part = load_tagged(
        table(tmp_path / "tagged", tokens=all_splits([["the", "zq"]]), tags=all_splits([["O", "B-x"]]))
    ).train
    rows = encode_tagged(tokenizer, part, 64)
    pieces = tokenizer.convert_ids_to_tokens(rows.input_ids[0])
    assert [pieces[i] for i in np.flatnonzero(rows.firsts[0])][1] == "▁"


def test_an_empty_word_gets_no_position(tmp_path):
    words, tags = ["the", "", "mill"], ["O", "O", "B-place"]
    part = load_tagged(table(tmp_path / "tagged", tokens=all_splits([words]), tags=all_splits([tags]))).train
    assert encode_tagged(byte_level(), part, 64).words == [[0, 2]]


def test_sentences_are_split_disjointly_and_reproducibly_by_seed(tmp_path):
    rows = [[word] for word in WORDS[:30]]
    (tmp_path / "one").mkdir()
    tags = [["B-x"] if i % 2 else ["O"] for i in range(30)]
    pa.parquet.write_table(pa.table({"tokens": pa.array(rows), "tags": pa.array(tags)}), tmp_path / "one/train.parquet")
    config = DataConfig(path=str(tmp_path / "one"), test_fraction=0.2, validation_fraction=0.1)
    splits, again = load_tagged(config, 3), load_tagged(config, 3)
    parts = [splits.train, splits.validation, splits.test]
    assert [len(part) for part in parts] == [22, 2, 6]
    assert sorted(words[0] for part in parts for words in part.texts) == sorted(WORDS[:30])
    assert splits.test.texts == again.test.texts
    assert splits.test.texts != load_tagged(config, 4).test.texts


@pytest.mark.parametrize(
    ("words", "tags", "named"),
    [
        ([["a", "b"], ["c"]], [["O"], ["B-x"]], "row 1: expected one tag per word, found 2 words and 1 tags"),
        ([["a"], ["c"]], [["O"], ["O"]], "expected at least two tags in train, found O"),
        ([[], []], [[], []], "contains no words in any of 2 rows"),
        ([["a", None]], [["O", "B-x"]], "row 1, column 'tokens': expected words or tags, found null at position 2"),
        ([["a", "b"]], [["O", None]], "row 1, column 'tags': expected words or tags, found null at position 2"),
        ([["a", "b"]], [["O", "-100"]], "row 1: expected one tag per word, found -100 for 'b'"),
    ],
)
def test_misaligned_or_missing_tags_are_rejected(words, tags, named, tmp_path):
    kinds = {
        "tokens": all_splits(pa.array(words, pa.list_(pa.string()))),
        "tags": all_splits(pa.array(tags, pa.list_(pa.string()))),
    }
    with pytest.raises(InputError, match=named):
        load_tagged(table(tmp_path / "bad", **kinds))


def test_tags_that_occur_only_in_test_are_rejected(tmp_path):
    tags = all_splits(TAGS) | {"test": [["B-thing", "O", "O", "O", "O"], *TAGS[1:]]}
    with pytest.raises(InputError, match=r"test has tags that train lacks: 'B-thing' \(1 words\)"):
        load_tagged(table(tmp_path / "bad", tokens=all_splits(SENTENCES), tags=tags))


def test_a_line_without_a_tag_is_rejected(tmp_path):
    (tmp_path / "train.conll").write_text("Ann B-person\nvisits\n")
    with pytest.raises(
        InputError, match="line 2: expected a word and its tag, in 2 columns as most lines are, found 'visits'"
    ):
        load_tagged(DataConfig(path=str(tmp_path / "train.conll")))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("rejects\tVB\t", "line 2: expected a word and its tag, in 3 columns"),
        ("rejects\tO", "line 2: expected a word and its tag, in 3 columns"),
        ("\tVB\tO", "line 2: expected a word and its tag, in 3 columns"),
    ],
)
def test_a_line_with_other_columns_than_most_is_rejected(line, message, tmp_path):
    file = tmp_path / "train.conll"
    file.write_text(f"EU\tNNP\tB-ORG\n{line}\nGerman\tJJ\tO\n\nPeter\tNNP\tB-PER\n")
    with pytest.raises(InputError, match=message):
        read_conll(file)
    file.write_text("10 000 B-NUM\nNew B-place\nYork I-place\n")
    with pytest.raises(InputError, match="line 1: expected a word and its tag, in 2 columns as most lines are"):
        read_conll(file)


def test_separators_are_detected_per_file_and_columns_of_numbers_are_rejected(tmp_path):
    file = tmp_path / "train.conll"
    file.write_text("#\ta comment\na NN\tO\nb NN\tB-x\n")
    assert read_conll(file)["tokens"].to_pylist() == [["a", "b"]]
    file.write_text("#\ta comment\na O\n\u00a0 O\n")
    assert read_conll(file)["tokens"].to_pylist() == [["a", "\u00a0"]]
    file.write_text("1\ta\tO\n2\tb\tB-x\n\n1\tc\tO\n")
    with pytest.raises(InputError, match="expected words in the first column, found their numbers"):
        read_conll(file)


def test_words_keep_their_blanks_and_the_files_byte_order_mark_is_dropped(tmp_path):
    file = tmp_path / "train.conll"
    lines = ["-DOCSTART-\tO", "  ", "New York\tB-LOC", "10\u00a0000\tB-NUM", "a\u2028b\tO", "", "Ann\tB-PER"]
    for end in ("\n", "\r\n"):
        file.write_bytes(("\ufeff" + end.join(lines)).encode())
        rows = read_conll(file)
        assert rows["tokens"].to_pylist() == [["New York", "10\u00a0000", "a\u2028b"], ["Ann"]]
        assert rows["tags"].to_pylist() == [["B-LOC", "B-NUM", "O"], ["B-PER"]]


def test_comments_before_a_sentence_are_distinguished_from_words_with_a_hash(tmp_path):
    file = tmp_path / "train.conll"
    file.write_text("# newdoc\n# id = 1\n#text here\n# O\n1 O\nis O\n\n#\nsay O\n# O\n#tag B-x\n# B-y\n\n# O\n")
    rows = read_conll(file)
    assert rows["tokens"].to_pylist() == [["#", "1", "is"], ["say", "#", "#tag", "#"], ["#"]]
    assert rows["tags"].to_pylist()[1] == ["O", "O", "B-x", "B-y"]
    file.write_text("# id = 1\nsay NN I-NP O\n# # I-NP O\n")
    assert read_conll(file)["tokens"].to_pylist() == [["say", "#"]]
    file.write_text("say O\n# a comment\nmore O\n")
    with pytest.raises(InputError, match="line 2: expected comments before a sentence"):
        read_conll(file)


def test_a_words_tag_lies_on_its_first_piece_and_words_without_pieces_are_skipped(tokenizer):
    words = [["baka", "xq", "\u200b", "deka", "fika"]]
    rows = encode_tagged(tokenizer, Tagged(words, [[1, 2, 3, 4, 0]]), 64)
    pieces = tokenizer.convert_ids_to_tokens(rows.input_ids[0])
    assert [pieces[i] for i in np.flatnonzero(rows.firsts[0])] == ["baka", "x", "deka", "fika"]
    assert [int(each) for each in rows.labels[0][rows.firsts[0]]] == [1, 2, 4, 0]
    assert (rows.labels[0][~rows.firsts[0]] == IGNORED).all()
    assert rows.words == [[0, 1, 3, 4]]
    assert rows.truncated == 0
    cut = encode_tagged(tokenizer, Tagged(words, [[1, 2, 3, 4, 0]]), 5)
    assert cut.truncated == 1
    assert cut.words == [[0, 1]]
    batch = rows.collate([0], 0)
    assert batch["positions"].tolist() == [rows.firsts[0].tolist()]
    bare = encode_tagged(tokenizer, Tagged(words), 64).collate([0], 0)
    assert (bare["labels"] == IGNORED).all()
    assert torch.equal(bare["positions"], batch["positions"])


def test_a_taggers_loss_equals_the_stock_models_and_the_mean_over_its_shares(tokenizer):
    task = TokenClassification(("O", "B-a", "I-a", "B-b", "I-b"))
    rng = np.random.default_rng(1)
    words = [list(rng.choice(WORDS, n)) for n in (5, 2, 9)]
    rows = task.encode(tokenizer, Tagged(words, [list(rng.integers(0, 5, len(w))) for w in words]), 32)
    batch = rows.collate(range(3), 0)
    names = {"id2label": dict(enumerate(task.labels)), "label2id": {n: i for i, n in enumerate(task.labels)}}
    distiller = module(task, LossConfig(kl=0, ce=1), head="ForTokenClassification", **names)
    inputs = {name: value for name, value in batch.items() if name != "positions"}
    torch.testing.assert_close(distiller.compute_terms(batch)["ce"], distiller.student(**inputs).loss)
    assert loss_counts(batch) == {"rows": 16, "labels": 16, "tokens": sum(len(row) for row in rows.input_ids)}
    halves = [shard_batch(batch, rank, 2) for rank in range(2)]
    parts = [distiller.compute_terms(half)["ce"] for half in halves]
    torch.testing.assert_close(torch.stack(parts).mean(), distiller.compute_terms(batch)["ce"])


def test_spans_are_scored_as_the_conll_script_does(tokenizer):
    """A span counts when its type and both ends are right; words lost to truncation count as outside."""
    names = ("O", "B-a", "I-a", "B-b")
    task = TokenClassification(names)
    tags = [[1, 2, 0, 3], [0, 1, 0, 0]]
    rows = task.encode(tokenizer, Tagged([WORDS[:4], WORDS[4:8]], tags), 32)
    predicted_tags = [[1, 0, 0, 3], [0, 1, 0, 1]]
    scorer = task.scorer(rows)
    logits = torch.zeros(2, rows.lengths.max(), 4)
    for row in range(2):
        places = np.flatnonzero(rows.firsts[row])
        logits[row, places, predicted_tags[row]] = 1
    scorer.record(np.array([1]), {}, logits[1:])
    scorer.record(np.array([0]), {}, logits[:1])
    scores = scorer.scores()
    # Two of the three true spans (a 0-1, b 3; a 1) are among the four predicted ones (a 0, b 3; a 1, a 3).
    assert scores["recall"] == pytest.approx(2 / 3)
    assert scores["precision"] == pytest.approx(2 / 4)
    assert scores["span F1"] == pytest.approx(2 * 2 / (3 + 4))
    assert scores["accuracy"] == pytest.approx(6 / 8)
    cut = task.encode(tokenizer, Tagged([WORDS[:4]], [[1, 2, 0, 3]]), 4)
    scorer = task.scorer(cut)
    scorer.record(np.array([0]), {}, logits[:1, :4])
    assert scorer.decisions().tolist() == ["B-a", "O", "O", "O"]
    words = TokenClassification(("noun", "verb"))
    assert not words.has_spans
    plain = words.encode(tokenizer, Tagged([WORDS[:2]], [[0, 1]]), 16)
    scorer = words.scorer(plain)
    scorer.record(np.array([0]), {}, torch.tensor([[[0.0, 0], [1, 0], [1, 0], [0, 0]]]))
    assert scorer.scores() == {"accuracy": 0.5}


def test_the_validation_of_spans_equals_their_score(tokenizer):
    names = ("O", "B-a", "I-a", "B-b", "I-b")
    task, rng = TokenClassification(names), np.random.default_rng(5)
    tags = [[0, *rng.integers(0, 5, 7)] for _ in range(30)]
    predicted = [[tag if rng.random() < 0.7 else int(rng.integers(0, 5)) for tag in row] for row in tags]
    predicted = [[0, *row[1:]] for row in predicted]
    metric = task.scorer()
    for start in range(0, 30, 8):
        some, labels = (torch.tensor(np.concatenate(each[start : start + 8])) for each in (predicted, tags))
        metric.update(torch.nn.functional.one_hot(some, 5).float(), labels)
    text = [[[names[tag] for tag in row] for row in each] for each in (tags, predicted)]
    assert 0.2 < float(metric.compute()) < 0.9
    assert float(metric.compute()) == pytest.approx(seqeval_f1(*text))


def test_the_metric_of_tags_without_spans_is_the_micro_f1_without_the_outside_tag(tokenizer):
    task = TokenClassification(("O", "noun", "verb"))
    rng = np.random.default_rng(3)
    true, logits = torch.tensor(rng.integers(0, 3, 40)), torch.tensor(rng.normal(size=(40, 3)), dtype=torch.float32)
    true[::9] = IGNORED
    metric = task.scorer()
    metric.update(logits[:25], true[:25])
    metric.update(logits[25:], true[25:])
    known = true != IGNORED
    wanted = f1_score(true[known], logits.argmax(-1)[known], labels=[1, 2], average="micro")
    assert float(metric.compute()) == pytest.approx(wanted)


def test_cache_samples_request_only_the_pieces_that_start_a_word(tokenizer):
    rows = encode_tagged(tokenizer, Tagged([["baka", "xq"], ["deka"]], [[1, 0], [1]]), 16)
    samples = from_rows(rows.input_ids, rows.token_type_ids, rows.firsts, 0)
    requested = samples.batch([0, 1])
    batch = rows.collate([0, 1], 0)
    assert torch.equal(requested["positions"], batch["positions"])
    assert len(set(samples.keys)) == 2


# --- spans of text


def test_the_span_loss_excludes_padding_and_averages_start_and_end(tokenizer):
    model = build_model("bert", "ForQuestionAnswering", id2label={0: "a", 1: "b"}, label2id={"a": 0, "b": 1})
    ids = torch.randint(5, 60, (3, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1] * 8, [1] * 6 + [0] * 2, [1] * 5 + [0] * 3])
    starts, ends = torch.tensor([2, 1, 0]), torch.tensor([4, 5, 0])
    batch = {"input_ids": ids, "attention_mask": mask, "labels": starts, "ends": ends}
    distiller = DistillationModule(model, loss=LossConfig(kl=0, ce=1), train=TrainConfig(), output_rows=SpanRows())
    with torch.no_grad():
        out = model(input_ids=ids, attention_mask=mask)
        logits = find_logits(out)
        rows = SpanRows().logits(batch, logits)
        assert rows.shape == (6, 8)
        assert torch.equal(rows[2, 6:], torch.full((2,), -math.inf))
        losses = [
            -torch.log_softmax(each.masked_fill(mask == 0, -math.inf), -1)[torch.arange(3), labels]
            for each, labels in ((out.start_logits, starts), (out.end_logits, ends))
        ]
        torch.testing.assert_close(distiller.compute_terms(batch)["ce"], torch.stack(losses).mean())
    module = DistillationModule(
        model, loss=LossConfig(kl=1, temperature=1), train=TrainConfig(), output_rows=SpanRows(),
        signals=lambda _: {"logits": logits},
    )  # fmt: skip
    assert module.compute_terms(batch)["kl"].abs() < 1e-6
