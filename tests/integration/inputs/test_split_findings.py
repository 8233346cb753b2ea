"""The commands' remarks about rows and labels: texts in two splits, empty rows, missing and unknown labels, splits
without labels, columns that don't contain labels, and the scores of model-free baselines.
"""

import csv
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distill.data.rows.questions import Questions
from distill.data.rows.tagged import Tagged
from distill.data.sources.answer_cells import Answer
from distill.data.splits.examples import Examples, Splits
from distill.tasks.choose import TASKS
from pipelines import distill, report
from pipelines.stages.deliver.evaluate import baseline_scores
from support.commands import rejection_of, small_run
from support.reports import report_of
from support.task_data import TAGS, books_data, multi_label_data, pair_data, question_data, regression_data, tagged_data
from support.tiny_models import CLUES, FILLERS, LABELS, build_model, make_rows, saved, word_tokenizer

Rows = Sequence[Sequence[str]]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory, tokenizer) -> Path:
    return saved(build_model("bert"), tokenizer, tmp_path_factory.mktemp("models") / "headed")


@pytest.fixture
def body(tmp_path, tokenizer) -> Path:
    return saved(build_model("bert", "Model"), tokenizer, tmp_path / "body")


def write(file: Path, rows: Rows, header: Sequence[str] = ("text", "label")) -> Path:
    file.parent.mkdir(exist_ok=True, parents=True)
    with file.open("w", newline="", encoding="utf-8") as opened:
        csv.writer(opened).writerows([header, *rows])
    return file


def write_jsonl(file: Path, rows: Sequence[dict]) -> Path:
    file.parent.mkdir(exist_ok=True, parents=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def rotate_labels(rows: Rows, *names: str) -> list[tuple[str, str]]:
    """Returns the rows with their labels replaced by `names`, in rotation."""
    return [(text, names[i % len(names)]) for i, (text, _) in enumerate(rows)]


@pytest.fixture
def data(tmp_path) -> Path:
    """A folder with train.csv of 60 rows and test.csv of 20 rows, in five classes."""
    write(tmp_path / "data" / "train.csv", make_rows(60, 1))
    write(tmp_path / "data" / "test.csv", make_rows(20, 2))
    return tmp_path / "data"


@pytest.fixture
def run_data_stage(tmp_path, tokenizer, capsys) -> Callable[..., tuple[str, dict]]:
    """Runs a command up to the teacher stage, with a teacher whose head fits the labels and isn't fine-tuned; returns
    the printed output and the metrics of the data stage.
    """

    def run(data: Path, *more: str, labels: Sequence[str] = LABELS, head: str = "ForSequenceClassification", **changes):
        number = len(list(tmp_path.glob("run*")))
        names = {"id2label": dict(enumerate(labels)), "label2id": {name: i for i, name in enumerate(labels)}}
        teacher = saved(build_model("bert", head, **names, **changes), tokenizer, tmp_path / f"teacher{number}")
        output = tmp_path / f"run{number}"
        without_training = ("--teacher.finetune", "never", "--until", "teacher")
        distill.main(small_run(teacher, data, output, *without_training, *more))
        (manifest,) = output.glob("data/*/manifest.json")
        return capsys.readouterr().out, json.loads(manifest.read_text())["metrics"]

    return run


@pytest.fixture
def read_rejection(body, tmp_path, monkeypatch, capsys) -> Callable[..., str]:
    def run(data: Path, *more: str) -> str:
        output = tmp_path / f"rejected{len(list(tmp_path.glob('rejected*')))}"
        arguments = small_run(body, data, output, "--teacher.finetune", "never", "--until", "teacher", *more)
        capsys.readouterr()
        return rejection_of(distill, arguments, monkeypatch, capsys)

    return run


# --- texts in more than one split


def test_unlabelled_texts_that_occur_in_test_or_validation_are_dropped_and_counted(data, run_data_stage, tmp_path):
    test, validation = make_rows(20, 2), make_rows(15, 3)
    write(data / "validation.csv", validation)
    shouted = [(f"{text.upper()} !",) for text, _ in (*test[:4], *validation[:3], *make_rows(60, 1)[:2])]
    more = write(tmp_path / "more.csv", [*shouted, ("anfen anfen",), (" ",)], ["text"])
    printed, metrics = run_data_stage(data, "--data.unlabelled", str(more))
    assert metrics["unlabelled"] == 3
    assert metrics["unlabelled_dropped_in_test"] == 4
    assert metrics["unlabelled_dropped_in_validation"] == 3
    assert metrics["unlabelled_texts_also_in_train"] == 2
    assert "unlabelled: 4 of 10 texts were left out, because they occur in test" in printed
    assert "unlabelled: 3 of 10 texts were left out, because they occur in validation" in printed
    assert "unlabelled: 2 of 10 texts also occur in train, and stay in both" in printed
    assert "unlabelled: 1 of 11 rows were left out, because they contain no text" in printed


def test_labelled_texts_in_two_splits_are_counted_and_kept(data, run_data_stage):
    train = make_rows(60, 1)
    write(data / "validation.csv", [*train[:5], *make_rows(10, 3)])
    write(data / "test.csv", [*train[10:13], *make_rows(10, 3)[:2], *make_rows(10, 4)])
    printed, metrics = run_data_stage(data)
    assert [metrics[part] for part in ("train", "validation", "test")] == [60, 15, 15]
    counts = {name: count for name, count in metrics.items() if "_also_in_" in name}
    assert counts == {
        "test_texts_also_in_train": 3, "validation_texts_also_in_train": 5, "test_texts_also_in_validation": 2
    }  # fmt: skip
    assert "test: 3 of 15 texts also occur in train, and stay in both" in printed
    assert "validation: 5 of 15 texts also occur in train, and stay in both" in printed
    assert "test: 2 of 15 texts also occur in validation, and stay in both" in printed


def test_texts_of_punctuation_alone_are_distinguished(data, run_data_stage):
    write(data / "test.csv", [("!!!", LABELS[0]), ("?", LABELS[1])])
    write(data / "train.csv", [*make_rows(60, 1), ("?!", LABELS[0]), ("?", LABELS[1])])
    assert run_data_stage(data)[1]["test_texts_also_in_train"] == 1


@pytest.mark.slow
def test_unlabelled_rows_that_occur_in_test_are_dropped_in_every_task(run_data_stage, tmp_path):
    def first_rows(folder: Path, count: int, *columns: str) -> Path:
        table = pq.read_table(folder / "test.parquet").slice(0, count).select(columns)
        pq.write_table(table, tmp_path / f"{folder.name}.parquet")
        return tmp_path / f"{folder.name}.parquet"

    tagged = tagged_data(tmp_path / "tagged")
    more = first_rows(tagged, 7, "tokens")
    _, metrics = run_data_stage(tagged, "--data.unlabelled", str(more), labels=TAGS, head="ForTokenClassification")
    assert (metrics["unlabelled"], metrics["unlabelled_dropped_in_test"]) == (0, 7)
    questions = question_data(tmp_path / "questions")
    more = first_rows(questions, 6, "question", "context")
    _, metrics = run_data_stage(
        questions, "--data.unlabelled", str(more), labels=("a", "b"), head="ForQuestionAnswering"
    )
    assert (metrics["unlabelled"], metrics["unlabelled_dropped_in_test"]) == (0, 6)
    pairs = pair_data(tmp_path / "pairs")
    with (pairs / "test.csv").open() as file:
        texts = [row["sentence1"] for row in csv.DictReader(file)]
    more = write(tmp_path / "lines.csv", [(text,) for text in texts], ["text"])
    _, metrics = run_data_stage(pairs, "--data.unlabelled", str(more), "--task", "sentence-embedding", head="Model")
    assert (metrics["unlabelled"], metrics["unlabelled_dropped_in_test"]) == (0, 30)


def test_documents_in_two_splits_are_counted(run_data_stage, tmp_path):
    books = books_data(tmp_path / "books")
    for name, book in (("train", "book0"), ("train", "book1"), ("validation", "book2"), ("test", "book1")):
        (books / name).mkdir(exist_ok=True)
        (books / name / f"{book}.txt").write_text((books / f"{book}.txt").read_text())
    for file in books.glob("*.txt"):
        file.unlink()
    printed, metrics = run_data_stage(books, "--data.max_length", "16", head="LMHeadModel", is_decoder=True)
    assert metrics["test_texts_also_in_train"] == 1
    assert "test: 1 of 1 documents also occur in train, and stay in both" in printed


# --- empty rows


def test_dropped_empty_rows_are_counted_for_each_split(data, run_data_stage):
    write(data / "train.csv", [*make_rows(60, 1), ("  ", LABELS[0]), ("", LABELS[1]), ("", "")])
    write(data / "test.csv", [*make_rows(20, 2), ("", LABELS[0])])
    printed, metrics = run_data_stage(data)
    assert (metrics["train_dropped_empty"], metrics["test_dropped_empty"], metrics["dropped_empty"]) == (3, 1, 4)
    assert "train: 3 of 63 rows were left out, because they contain no text" in printed
    assert "test: 1 of 21 rows were left out, because they contain no text" in printed


# --- missing labels


@pytest.mark.parametrize("word", ["NaN", "nan", "NA", "None", "null", ""])
def test_unquoted_words_for_missing_values_are_missing_labels(word, data, read_rejection):
    rows = make_rows(60, 1)
    write(data / "train.csv", [(text, word if i in (6, 11) else label) for i, (text, label) in enumerate(rows)])
    printed = read_rejection(data)
    assert "train: column 'label' contains no label" in printed
    assert "in rows 7 and 12, 2 in all" in printed
    if word:
        assert f"({word!r} without quotes)" in printed
        assert f'write it in quotes: "{word}"' in printed


def test_quoted_words_for_missing_values_and_words_in_jsonl_are_classes(data, run_data_stage, tmp_path):
    names = sorted(["None", "nan", "billing"])
    train, test = (rotate_labels(make_rows(60, seed), *names) for seed in (1, 2))
    for split, rows in (("train", train), ("test", test)):
        quoted = "".join(f'{text},"{label}"\n' for text, label in rows)
        (data / f"{split}.csv").write_text("text,label\n" + quoted)
    printed, metrics = run_data_stage(data, labels=names)
    assert metrics["classes"] == 3
    assert "'None' (20 rows), 'billing'" not in printed
    assert "'None' (20 rows)" in printed
    assert "counts as a name, for it is text in the file, and no missing label" in printed
    for split, rows in (("train", train), ("test", test)):
        write_jsonl(tmp_path / "lines" / f"{split}.jsonl", [{"text": text, "label": label} for text, label in rows])
    assert run_data_stage(tmp_path / "lines", labels=names)[1]["classes"] == 3


def test_missing_values_in_jsonl_and_parquet_are_missing_labels(data, read_rejection, tmp_path):
    rows = [{"text": text, "label": i % 2 if i > 2 else None} for i, (text, _) in enumerate(make_rows(60, 1))]
    write_jsonl(tmp_path / "null" / "train.jsonl", rows)
    assert "column 'label' contains no label in rows 1, 2 and 3, 3 in all" in read_rejection(tmp_path / "null")
    write_jsonl(tmp_path / "nan" / "train.jsonl", [row | {"label": row["label"] or float("nan")} for row in rows])
    assert "column 'label' contains no label in rows 1, 2, 3, 5, 7, …, 31 in all" in read_rejection(tmp_path / "nan")
    (tmp_path / "floats").mkdir()
    numbers = [float("nan") if i == 4 else float(i % 2) for i in range(60)]
    pq.write_table(pa.table({"text": [text for text, _ in make_rows(60, 1)], "label": numbers}),
                   tmp_path / "floats" / "train.parquet")  # fmt: skip
    assert "column 'label' contains no label in row 5, 1 in all" in read_rejection(tmp_path / "floats")


def test_missing_values_in_multi_label_data_are_rejected(read_rejection, tmp_path):
    rows = [(text, "NaN" if i == 3 else "a|b" if i % 2 else "a") for i, (text, _) in enumerate(make_rows(60, 1))]
    write(tmp_path / "several" / "train.csv", rows)
    printed = read_rejection(tmp_path / "several", "--task", "multi-label")
    assert "column 'label' contains no label ('NaN' without quotes) in row 4" in printed
    lists = [{"text": text, "label": ["a", None] if i == 3 else ["b"]} for i, (text, _) in enumerate(rows)]
    write_jsonl(tmp_path / "lists" / "train.jsonl", lists)
    assert "row 4, column 'label': expected names of labels, found" in read_rejection(tmp_path / "lists")


def test_rows_of_train_with_the_label_minus_one_are_named(data, read_rejection):
    rows = [(text, "-1" if i in (3, 8) else str(i % 4)) for i, (text, _) in enumerate(make_rows(60, 1))]
    write(data / "train.csv", rows)
    printed = read_rejection(data)
    assert "train: 2 rows have the label -1, rows 4 and 9, beside 0, 1, 2, 3" in printed
    assert "--data.unlabelled" in printed


def test_minus_one_beside_names_and_a_signed_number_names_its_rows(data, read_rejection):
    names = ("-1", "-2", "good", "bad", "fair", "poor", "fine")  # in a set their order differs from run to run
    write(data / "train.csv", [(text, names[i % len(names)]) for i, (text, _) in enumerate(make_rows(70, 1))])
    assert "train: 10 rows have the label -1, rows 1, 8, 15" in read_rejection(data)


def test_the_label_minus_one_is_a_class_beside_one(data, run_data_stage):
    for split, seed in (("train", 1), ("test", 2)):
        write(data / f"{split}.csv", rotate_labels(make_rows(60, seed), "-1", "1"))
    printed, metrics = run_data_stage(data, labels=("-1", "1"))
    assert metrics["classes"] == 2
    assert "taken for a class" not in printed
    for split, seed in (("train", 1), ("test", 2)):
        write(data / f"{split}.csv", rotate_labels(make_rows(60, seed), "-1", "0", "1"))
    printed, metrics = run_data_stage(data, labels=("-1", "0", "1"))
    assert metrics["classes"] == 3
    assert "-1 is taken for a class beside 0 and 1 (20 rows, rows 1, 4, 7, 10, 13, …)" in printed


def test_rows_of_a_hub_data_set_without_a_class_are_named(read_rejection, tmp_path):
    kinds = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    texts = [text for text, _ in make_rows(60, 1)]
    labels = [-1 if i in (5, 9) else i % 2 for i in range(60)]
    (tmp_path / "hub").mkdir()
    datasets.Dataset.from_dict({"text": texts, "label": labels}, kinds).to_parquet(tmp_path / "hub" / "train.parquet")
    assert "column 'label' contains no label in rows 6 and 10, 2 in all" in read_rejection(tmp_path / "hub")


# --- labels that look alike, or that don't occur in train


def test_labels_that_are_spelled_alike_are_kept_apart_with_a_remark(data, run_data_stage):
    names = ("01", "1", "1.0", "Spam", "spam")
    for split, seed in (("train", 1), ("test", 2)):
        write(data / f"{split}.csv", rotate_labels(make_rows(60, seed), *names))
    printed, metrics = run_data_stage(data, labels=names)
    assert metrics["classes"] == 5
    assert "labels '01' (12), '1' (12), '1.0' (12) are different labels, though they are spelled alike" in printed
    assert "labels 'Spam' (12), 'spam' (12) are different labels, though they are spelled alike" in printed


@pytest.mark.parametrize("split", [pytest.param("test", marks=pytest.mark.slow), "validation"])
def test_rows_with_labels_unknown_to_train_are_rejected_or_dropped_on_request(
    split, data, run_data_stage, read_rejection
):
    write(data / f"{split}.csv", [*make_rows(20, 2), ("bale", "new"), ("meka", "new"), ("so", "Login")])
    printed = read_rejection(data)
    assert f"{split} has labels that train lacks: 'new' (2 rows), 'Login' (1 rows, where train has 'login')" in printed
    assert "--data.unknown_labels drop leaves these rows out" in printed
    printed, metrics = run_data_stage(data, "--data.unknown_labels", "drop")
    assert (metrics[split], metrics[f"{split}_dropped_unknown_labels"]) == (20, 3)
    assert f"{split}: 3 of 23 rows were left out, for train lacks their labels: 'new' (2 rows)" in printed


@pytest.mark.slow
def test_rows_with_unknown_tags_or_multi_labels_are_dropped_on_request(run_data_stage, read_rejection, tmp_path):
    tagged = tagged_data(tmp_path / "tagged")
    table = pq.read_table(tagged / "test.parquet").to_pydict()
    table["tags"][3] = ["B-new"] * len(table["tags"][3])
    pq.write_table(pa.table(table), tagged / "test.parquet")
    assert "test has tags that train lacks: 'B-new'" in read_rejection(tagged)
    drop = ("--data.unknown_labels", "drop")
    _, metrics = run_data_stage(tagged, *drop, labels=TAGS, head="ForTokenClassification")
    assert (metrics["test"], metrics["test_dropped_unknown_labels"]) == (39, 1)
    several = multi_label_data(tmp_path / "several")
    table = pq.read_table(several / "test.parquet").to_pydict()
    table["label"][5] = ["new"]
    pq.write_table(pa.table(table), several / "test.parquet")
    names = (*sorted([*LABELS, "long"]),)
    _, metrics = run_data_stage(several, *drop, labels=names, problem_type="multi_label_classification")
    assert (metrics["test"], metrics["test_dropped_unknown_labels"]) == (39, 1)


def test_a_test_split_of_only_unknown_labels_is_rejected(data, read_rejection):
    write(data / "test.csv", rotate_labels(make_rows(20, 2), "new"))
    assert "test: expected rows with labels of train, found none: 'new'" in read_rejection(
        data, "--data.unknown_labels", "drop"
    )


# --- splits without labels


@pytest.mark.parametrize("mark", ["-1", *(pytest.param(each, marks=pytest.mark.slow) for each in ("", "NaN"))])
def test_a_test_split_without_labels_is_replaced_by_rows_held_out_of_train(mark, data, run_data_stage):
    write(data / "test.csv", rotate_labels(make_rows(20, 2), mark))
    printed, metrics = run_data_stage(data)
    assert metrics["test_dropped_unlabelled"] == 20
    assert (metrics["train"], metrics["validation"], metrics["test"]) == (50, 5, 5)
    assert "test: the data set's 20 rows have no labels, and are left out of the report" in printed
    assert "test: 5 rows held out of train, stratified, seed 0" in printed


def test_a_split_without_a_label_column_is_replaced_by_rows_held_out_of_train(data, run_data_stage):
    write(data / "test.csv", [(text,) for text, _ in make_rows(20, 2)], ["text"])
    write(data / "validation.csv", [(text,) for text, _ in make_rows(10, 3)], ["text"])
    printed, metrics = run_data_stage(data)
    assert (metrics["test_dropped_unlabelled"], metrics["validation_dropped_unlabelled"]) == (20, 10)
    assert (metrics["train"], metrics["validation"], metrics["test"]) == (50, 5, 5)
    assert "validation: the data set's 10 rows have no labels" in printed


def test_a_test_split_with_some_labels_is_rejected(data, read_rejection):
    write(data / "test.csv", [*make_rows(20, 2), ("bale", ""), ("meka", "")])
    assert "test: column 'label' contains no label in rows 21 and 22, 2 in all" in read_rejection(data)


def test_the_validation_split_replaces_the_test_split_on_request(data, run_data_stage):
    write(data / "test.csv", rotate_labels(make_rows(20, 2), "-1"))
    write(data / "validation.csv", make_rows(15, 3))
    printed, metrics = run_data_stage(data)
    assert "--data.test_split validation takes another" in printed
    printed, metrics = run_data_stage(data, "--data.test_split", "validation")
    assert (metrics["train"], metrics["validation"], metrics["test"]) == (55, 5, 15)
    assert metrics["test_from"] == "the data set's validation split"
    assert "test: the data set's validation split, and its test split isn't used" in printed
    assert "validation: 5 rows held out of train" in printed


def test_an_absent_validation_split_cannot_replace_the_test_split(data, read_rejection):
    printed = read_rejection(data, "--data.test_split", "validation")
    assert "data.test_split validation: expected a validation split" in printed
    assert "found test, train" in printed


@pytest.mark.slow
def test_splits_without_labels_are_dropped_in_every_task(run_data_stage, tmp_path):
    def replace_labels(folder: Path, column: str, kind: pa.DataType, value: object) -> Path:
        table = pq.read_table(folder / "test.parquet")
        values = [[value] * len(cell) if isinstance(cell, list) else value for cell in table[column].to_pylist()]
        index = table.schema.get_field_index(column)
        pq.write_table(table.set_column(index, column, pa.array(values, kind)), folder / "test.parquet")
        return folder

    tagged = replace_labels(tagged_data(tmp_path / "tagged"), "tags", pa.list_(pa.int64()), -100)
    _, metrics = run_data_stage(tagged, labels=TAGS, head="ForTokenClassification")
    assert (metrics["test_dropped_unlabelled"], metrics["test"]) == (40, 12)
    scored = replace_labels(regression_data(tmp_path / "numbers"), "label", pa.float64(), -1.0)
    _, metrics = run_data_stage(scored, labels=["number"], problem_type="regression")
    assert (metrics["test_dropped_unlabelled"], metrics["test"]) == (40, 12)
    questions = question_data(tmp_path / "questions")
    table = pq.read_table(questions / "test.parquet")
    pq.write_table(table.drop_columns("answers"), questions / "test.parquet")
    _, metrics = run_data_stage(questions, labels=("a", "b"), head="ForQuestionAnswering")
    assert metrics["test_dropped_unlabelled"] == 40
    pairs = pair_data(tmp_path / "pairs")
    with (pairs / "test.csv").open() as file:
        rows = [(row["sentence1"], row["sentence2"], "-1.0") for row in csv.DictReader(file)]
    write(pairs / "test.csv", rows, ["sentence1", "sentence2", "score"])
    _, metrics = run_data_stage(pairs, "--task", "sentence-embedding", head="Model")
    assert (metrics["test_dropped_unlabelled"], metrics["test"]) == (30, 8)


# --- columns that are misinterpreted


def test_a_label_column_of_unique_values_is_rejected(data, read_rejection):
    write(data / "train.csv", [(text, f"id-{i}") for i, (text, _) in enumerate(make_rows(60, 1))])
    (data / "test.csv").unlink()
    printed = read_rejection(data)
    assert "found a label of its own in each of 60 rows" in printed
    assert "--data.label" in printed


def test_a_remark_counts_the_rows_with_unique_labels(data, run_data_stage):
    rows = make_rows(60, 1)
    names = [f"id-{i}" for i in range(40)]
    write(data / "train.csv", [(text, names[i] if i < 40 else LABELS[i % 5]) for i, (text, _) in enumerate(rows)])
    printed, _ = run_data_stage(data, labels=[*names, *LABELS])
    assert "train: 40 of 60 rows have a label of their own ('id-0', 'id-1', 'id-2', …)" in printed


def test_the_same_text_in_all_rows_is_rejected(data, read_rejection):
    write(data / "train.csv", [("anfen", label) for _, label in make_rows(60, 1)])
    printed = read_rejection(data)
    assert "column 'text': expected different texts, found 'anfen' in each of 60 rows" in printed


def test_the_same_number_in_all_rows_is_rejected(data, read_rejection):
    for split in ("train", "test"):
        write(data / f"{split}.csv", rotate_labels(make_rows(60, 1), "2.5"))
    assert "expected different numbers in train, found 2.5 in each of 60 rows" in read_rejection(
        data, "--task", "regression"
    )


def test_a_remark_reports_texts_that_are_numbers(data, run_data_stage):
    draw = random.Random(0)
    write(data / "train.csv", [(str(draw.randint(0, 10**6)), label) for _, label in make_rows(60, 1)])
    printed, _ = run_data_stage(data)
    assert "every text in column 'text' is a number, such as '" in printed
    assert "name the column with --data.text" in printed


def test_classes_of_two_rows_cannot_be_divided_into_three_splits(read_rejection, tmp_path):
    words = [*CLUES["billing"], *FILLERS]
    write(tmp_path / "few" / "train.csv", [(f"{words[i]} {words[i + 1]}", f"class {i // 2}") for i in range(60)])
    printed = read_rejection(tmp_path / "few")
    assert "there is no file for validation and test" in printed
    assert "expected at least 3 rows of a class, found 30 classes in 60 rows, the largest of 2" in printed
    assert "each of its own class" not in printed


# --- scores of model-free baselines, the report page and the model card


@pytest.mark.slow
def test_a_report_shows_the_majority_baseline_and_the_dropped_rows(tokenizer, tmp_path, capsys):
    rows = [(text, "a" if i % 4 else "b") for i, (text, _) in enumerate(make_rows(40, 1))]
    write(tmp_path / "data" / "train.csv", [*rows, ("", "a")])
    write(tmp_path / "data" / "test.csv", [*rows[:3], ("bale", "b"), ("meka", "b"), ("so bale", "a"), ("so", "<i>")])
    names = {"id2label": {0: "a", 1: "b"}, "label2id": {"a": 0, "b": 1}}
    model = saved(build_model("bert", **names), tokenizer, tmp_path / "model")
    output = tmp_path / "run"
    quick = ("--measure.texts", "2", "--measure.rounds", "1", "--measure.batch", "2", "--measure.parity", "2")
    quick += ("--measure.seconds", "0")
    arguments = ("--model", str(model), "--data", str(tmp_path / "data"), "--output", str(output), *quick)
    report.main([*arguments, "--data.unknown_labels", "drop", "--data.max_length", "16"])
    printed = capsys.readouterr().out
    stored_report = report_of(output)
    assert stored_report["baseline"] == {
        "name": "majority class",
        "answer": "the class 'a', the most frequent in train",
        "scores": {"accuracy": pytest.approx(3 / 6), "macro F1": pytest.approx(2 / 3 / 2)},
    }
    card, page = (output / "student" / "README.md").read_text(), (output / "report.html").read_text()
    for text in (printed, card, page):
        assert "majority class" in text
        assert "50.00 %" in text
    message = "the score of predicting the class {0}a{0}, the most frequent in train for each of the 6 texts."
    assert message.format("'") in card
    assert message.format("&#39;") in page
    assert "test: 3 of 6 texts also occur in train, and stay in both" in stored_report["data"]["remarks"]
    for remark in stored_report["data"]["remarks"]:
        assert remark in printed
        assert f"- {remark[0].upper()}{remark[1:]}.".replace("<", "&lt;") in card
    assert "Train: 1 of 41 rows were left out, because they contain no text." in page
    assert "lacks their labels: &#39;&lt;i&gt;&#39; (1 rows)" in page


def baseline_of(task_name: str, train: list, test: list, names: tuple[str, ...] = ()) -> dict[str, float | None]:
    """Returns the scores of train's baseline on a test split with one text per label."""
    task = TASKS[task_name].build(names, {})
    tokenizer = word_tokenizer()
    if task_name == "token-classification":
        parts = [Tagged([["bale"] * len(row) for row in labels], labels) for labels in (train, test)]
    elif task_name == "question-answering":
        parts = [Questions(["bale"] * len(labels), ["so meka so"] * len(labels), labels) for labels in (train, test)]
    else:
        parts = [Examples(["bale"] * len(labels), None, labels) for labels in (train, test)]
    splits = Splits(names, parts[0], parts[1], parts[1], Examples([], None), {})
    baseline = baseline_scores(task, splits, (task.encode(tokenizer, parts[1], 32), 0))
    return baseline["scores"]


def test_baselines_predict_the_same_answer_for_every_row():
    assert baseline_of("text-classification", [0, 1, 1], [1, 1, 0, 1], ("a", "b"))["accuracy"] == 0.75
    several = baseline_of("multi-label", [[1, 1, 0], [0, 1, 0]], [[0, 1, 0], [1, 1, 0], [0, 0, 1]], ("a", "b", "c"))
    assert several == {"micro F1": 4 / 7, "macro F1": pytest.approx(0.8 / 3), "exact match": pytest.approx(1 / 3)}
    assert baseline_of("regression", [1.0, 3.0], [2.0, 4.0], ("number",)) == {
        "Spearman": None, "Pearson": None, "RMSE": pytest.approx(2**0.5)
    }  # fmt: skip
    tags = baseline_of("token-classification", [[0, 0, 1]], [[0, 1, 0, 0], [1]], ("O", "B-x"))
    assert tags == {"span F1": 0, "precision": 0, "recall": 0, "accuracy": pytest.approx(0.6)}
    answer = [Answer("meka", 3)]
    assert baseline_of("question-answering", [answer, []], [answer, [], []])["exact match"] == pytest.approx(2 / 3)
    assert TASKS["question-answering"](()).baseline(Questions(["a"], ["b"], [answer])) is None
    assert TASKS["causal-lm"](()).baseline(Examples(["a"], None)) is None
