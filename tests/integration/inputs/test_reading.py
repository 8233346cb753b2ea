"""The commands read the same rows from files in many formats, or print one message that names the problem."""

import datetime
import gzip
import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distill.data.config import DataConfig
from distill.data.rows.documents import load_documents
from distill.data.sources import text_batches
from distill.data.sources.stored_texts import StoredTexts
from pipelines import distill
from pipelines.runs import cli
from pipelines.stages.prepare.data import yield_json
from support.commands import rejection_of, small_run
from support.tiny_models import build_model, make_rows, saved

ROWS = [*make_rows(30, 1), ('said "no"; twice, | or\tso\nover two lines', "billing")]
Files = dict[str, str | bytes | pa.Table]


@pytest.fixture(scope="module")
def body(tokenizer, tmp_path_factory) -> Path:
    return saved(build_model("bert", "Model"), tokenizer, tmp_path_factory.mktemp("reading") / "body")


def write_files(folder: Path, files: Files) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, pa.Table):
            pq.write_table(content, folder / name)
        else:
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def format_csv(rows: list[tuple[str, ...]], separator: str = ",", header: tuple[str, ...] = ("text", "label")) -> str:
    """Returns a csv file with quotes only where they are needed."""
    lines = [[*header], *map(list, rows)]
    special = (separator, '"', "\n")
    return "".join(
        separator.join(
            '"' + cell.replace('"', '""') + '"' if any(each in cell for each in special) else cell for cell in line
        )
        + "\n"
        for line in lines
    )


def build_objects(rows: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"text": text, "label": label} for text, label in rows]


def read_splits(
    body: Path,
    data: Path,
    output: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *more: str,
) -> tuple[str, dict[str, list[tuple[Any, ...]]]]:
    """Returns the command's output and each split's rows (text, second text, name of the class or number)."""
    arguments = small_run(body, data, output, "--until", "general", *more)
    monkeypatch.setattr(sys, "argv", ["distill", *arguments])
    cli.run(distill.main)
    folder = next(file.parent for file in output.glob("data/*/data.json"))
    labels = json.loads((folder / "data.json").read_text())["labels"]
    rows = {}
    for split in ("train", "validation", "test"):
        table = pq.read_table(folder / f"{split}.parquet").to_pydict()
        names = [labels[each] if isinstance(each, int) else each for each in table["label"]]
        rows[split] = list(zip(table["text"], table.get("text_pair", [None] * len(names)), names, strict=True))
    return capsys.readouterr().out, rows


def list_rows(rows: dict[str, list[tuple[Any, ...]]]) -> list[tuple[Any, ...]]:
    """Returns the sorted rows of all splits, without absent second texts."""
    return sorted(tuple(cell for cell in row if cell is not None) for part in rows.values() for row in part)


def read_rejection(
    body: Path,
    files: Files,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *more: str,
) -> str:
    arguments = small_run(body, write_files(folder / "data", files), folder / "run", "--until", "general", *more)
    message = rejection_of(distill, arguments, monkeypatch, capsys)
    assert not list(folder.rglob("manifest.json"))
    return message


# --- formats of one table

FORMS: dict[str, tuple[str, Callable[[], str | bytes], str]] = {
    "semicolons": ("train.csv", lambda: format_csv(ROWS, ";"), "a semicolon"),
    "tabs in a csv": ("train.csv", lambda: format_csv(ROWS, "\t"), "a tab"),
    "vertical bars": ("train.csv", lambda: format_csv(ROWS, "|"), "a vertical bar"),
    "empty columns at the end": (
        "train.csv",
        lambda: format_csv([(*row, "", "") for row in ROWS], ";", ("text", "label", "", "")),
        "a semicolon",
    ),
    "csv.gz": ("train.csv.gz", lambda: gzip.compress(format_csv(ROWS, ";").encode()), "a semicolon"),
    "blanks around names, and a mark": (
        "train.csv",
        lambda: "\ufeff" + format_csv(ROWS, header=(" text ", "label ")),
        "",
    ),
    "blanks in keys": (
        "train.jsonl",
        lambda: "".join(json.dumps({" text": text, "label ": label}) + "\n" for text, label in ROWS),
        "",
    ),
    "an ending in capitals": ("Train.CSV", lambda: format_csv(ROWS), ""),
    "tsv.gz": ("train.tsv.gz", lambda: gzip.compress(format_csv(ROWS, "\t").encode()), ""),
    "jsonl.gz": ("train.jsonl.gz", lambda: gzip.compress("\n".join(map(json.dumps, build_objects(ROWS))).encode()), ""),
    "json.gz": ("train.json.gz", lambda: gzip.compress(json.dumps(build_objects(ROWS)).encode()), ""),
    "a list in json": ("train.json", lambda: json.dumps(build_objects(ROWS), indent=1), ""),
    "a list under data": ("train.json", lambda: json.dumps({"version": "1", "data": build_objects(ROWS)}), ""),
    "as pandas splits it": ("train.json", lambda: json.dumps({"columns": ["text", "label"], "data": ROWS}), ""),
    "an object a line in json": ("train.json", lambda: "\n".join(map(json.dumps, build_objects(ROWS))), ""),
}


QUICK_FORMS = ("csv.gz", "a list in json", "an object a line in json", "semicolons", "blanks in keys")


@pytest.mark.parametrize(
    "form", [pytest.param(name, marks=() if name in QUICK_FORMS else pytest.mark.slow) for name in FORMS]
)
def test_every_file_format_gives_the_same_rows(form, body, tmp_path, monkeypatch, capsys):
    name, content, separator = FORMS[form]
    data = write_files(tmp_path / "data", {name: content()})
    message, rows = read_splits(body, data, tmp_path / "run", monkeypatch, capsys)
    assert list_rows(rows) == sorted(ROWS)
    assert (f"data: {name}: its columns are separated by {separator}\n" in message) == bool(separator)


def test_a_comma_separated_file_with_other_separators_in_its_texts_is_split_at_commas(
    body, tmp_path, monkeypatch, capsys
):
    rows = [(f"{text} ; {i} | x\ty", label) for i, (text, label) in enumerate(make_rows(30, 1))]
    data = write_files(tmp_path / "data", {"train.csv": format_csv(rows)})
    message, splits = read_splits(body, data, tmp_path / "run", monkeypatch, capsys)
    assert list_rows(splits) == sorted(rows)
    assert "separated by" not in message


@pytest.mark.parametrize(
    "ending", ["csv", *(pytest.param(each, marks=pytest.mark.slow) for each in ("tsv", "jsonl", "json", "parquet"))]
)
def test_a_cell_of_three_megabytes_is_read_completely(ending, body, tmp_path, monkeypatch, capsys):
    rows = [*ROWS, ("baka deka " * 300_000 + "end", "login")]
    content: dict[str, str | bytes | pa.Table] = {
        "csv": format_csv(rows),
        "tsv": format_csv(rows, "\t"),
        "jsonl": "\n".join(map(json.dumps, build_objects(rows))),
        "json": json.dumps(build_objects(rows)),
        "parquet": pa.Table.from_pylist(build_objects(rows)),
    }
    data = write_files(tmp_path / "data", {f"train.{ending}": content[ending]})
    _, splits = read_splits(body, data, tmp_path / "run", monkeypatch, capsys)
    assert list_rows(splits) == sorted(rows)


def test_class_names_in_a_parquet_file_apply_to_columns_with_blanks_in_their_names(body, tmp_path, monkeypatch, capsys):
    names = sorted({label for _, label in ROWS})
    features = {"text ": {"dtype": "string", "_type": "Value"}, " label": {"names": names, "_type": "ClassLabel"}}
    columns = {"text ": [text for text, _ in ROWS], " label": [names.index(label) for _, label in ROWS]}
    described = {"huggingface": json.dumps({"info": {"features": features}})}
    data = write_files(tmp_path / "data", {"train.parquet": pa.table(columns).replace_schema_metadata(described)})
    _, rows = read_splits(body, data, tmp_path / "run", monkeypatch, capsys)
    assert list_rows(rows) == sorted(ROWS)


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_a_column_named_score_selects_the_regression_task(ending, body, tmp_path, monkeypatch, capsys):
    rows = [(text, str(i)) for i, (text, _) in enumerate(make_rows(30, 1))]
    lines = "\n".join(json.dumps({"text": text, "score": int(number)}) for text, number in rows)
    content = {"csv": format_csv(rows, header=("text", "score")), "jsonl": lines}[ending]
    data = write_files(tmp_path / "data", {f"train.{ending}": content})
    message, splits = read_splits(body, data, tmp_path / "run", monkeypatch, capsys)
    assert "task: regression (column score contains numbers)" in message
    assert list_rows(splits) == sorted((text, float(number)) for text, number in rows)


def test_documents_in_compressed_text_files_are_read(tokenizer, tmp_path, monkeypatch, capsys):
    speaker = saved(build_model("bert", "ForMaskedLM"), tokenizer, tmp_path / "speaker")
    texts = [" ".join(text for text, _ in make_rows(6, seed)) for seed in range(6)]
    files: Files = {f"{i}.txt.gz": gzip.compress(text.encode()) for i, text in enumerate(texts[:3])}
    files |= {f"{i}.txt": text for i, text in enumerate(texts[3:], 3)}
    data = write_files(tmp_path / "data", {**files, "notes.md": "not the text", "config.json": "{}"})
    arguments = small_run(speaker, data, tmp_path / "run", "--until", "general")
    monkeypatch.setattr(sys, "argv", ["distill", *arguments])
    cli.run(distill.main)
    documents = [
        text
        for split in ("train", "validation", "test")
        for text in pq.read_table(next((tmp_path / "run").glob(f"data/*/{split}.parquet")))["text"].to_pylist()
    ]
    assert sorted(documents) == sorted(texts)
    assert "data: not read: config.json, notes.md, because they aren't txt files" in capsys.readouterr().out


def test_two_text_files_of_one_split_are_rejected(tokenizer, tmp_path, monkeypatch, capsys):
    speaker = saved(build_model("bert", "ForMaskedLM"), tokenizer, tmp_path / "speaker")
    files: Files = {"train.txt": "a\nb\n", "dev.txt": "c\n", "val.txt": "d\n"}
    message = read_rejection(speaker, files, tmp_path, monkeypatch, capsys)
    assert "expected one validation file, found dev.txt and val.txt" in message


def test_unread_files_of_the_folder_are_named(body, tmp_path, monkeypatch, capsys):
    files: Files = {
        "train.csv": format_csv(ROWS),
        "test.xlsx": b"PK",
        "test-00000-of-00001.parquet": pa.table({"text": ["a"]}),
        "more.csv": format_csv(ROWS),
        "README.md": "about",
        ".hidden.csv": "x",
    }
    message, rows = read_splits(body, write_files(tmp_path / "data", files), tmp_path / "run", monkeypatch, capsys)
    assert list_rows(rows) == sorted(ROWS)
    assert (
        "data: not read: more.csv, test-00000-of-00001.parquet, test.xlsx, because their names or extensions" in message
    )


# --- rejections


def image_table(column: str) -> pa.Table:
    images = pa.array([{"bytes": b"\x89PNG", "path": f"{i}.png"} for i in range(len(ROWS))])
    return pa.table({"text": [t for t, _ in ROWS], "label": [v for _, v in ROWS]} | {column: images})


def bytes_table(column: str, kind: pa.DataType) -> pa.Table:
    columns = {"text": [t for t, _ in ROWS], "label": [v for _, v in ROWS]}
    cells = pa.array([each.encode()[:4].ljust(4) for each in columns[column]], kind)
    return pa.table(columns | {column: cells})


def parquet_bytes(table: pa.Table) -> bytes:
    content = io.BytesIO()
    pq.write_table(table, content, compression="none", use_dictionary=False, store_schema=False)
    return content.getvalue()


TABLE = format_csv(ROWS)
PARQUET = pa.Table.from_pylist(build_objects(ROWS))
TWICE = pa.Table.from_arrays([pa.array(["a", "b"])] * 3, ["text", "label", "text"])
REJECTED: dict[str, tuple[Files, tuple[str, ...], tuple[str, ...]]] = {
    "the label is the text": (
        {"train.csv": TABLE},
        ("--data.label", "text"),
        ("train: expected different columns for data.text and data.label, found 'text' for both", "--data.label"),
    ),
    "the text is the label": (
        {"train.csv": TABLE},
        ("--data.text", "label"),
        ("expected different columns for data.text and data.label, found 'label' for both",),
    ),
    "the pair is the text": (
        {"train.csv": TABLE},
        ("--data.text_pair", "text"),
        ("data.text and data.text_pair, found 'text' for both: each text would be compared with itself",),
    ),
    "the pair is the label": (
        {"train.csv": TABLE},
        ("--data.text_pair", "label"),
        ("data.text_pair and data.label, found 'label' for both",),
    ),
    "the tags are the words": (
        {"train.jsonl": "\n".join(json.dumps({"tokens": t.split(), "tags": ["O"] * len(t.split())}) for t, _ in ROWS)},
        ("--task", "token-classification", "--data.label", "tokens"),
        ("data.text and data.label, found 'tokens' for both",),
    ),
    "the context is the question": (
        {"train.jsonl": "\n".join(json.dumps({"question": t, "context": t, "answers": t[:3]}) for t, _ in ROWS)},
        ("--task", "question-answering", "--data.text_pair", "question"),
        ("data.text and data.text_pair, found 'question' for both",),
    ),
    "two columns of one name in csv": (
        {"train.csv": format_csv([(t, v, v) for t, v in ROWS], header=("text", "label", "label"))},
        (),
        ("train.csv': expected columns of different names, found 'label' as the name of columns 2 and 3",),
    ),
    "two columns that differ in blanks": (
        {"train.csv": format_csv([(t, v, v) for t, v in ROWS], header=("text", "label", " label"))},
        (),
        ("found 'label' as the name of columns 2 and 3",),
    ),
    "two columns that differ in case": (
        {"train.csv": format_csv([(t, v, t) for t, v in ROWS], header=("text", "label", "Label"))},
        (),
        ("expected one column 'label', found 'label' and 'Label'",),
    ),
    "two columns of one name in parquet": (
        {"train.parquet": TWICE},
        (),
        ("train.parquet': expected columns of different names, found 'text' as the name of columns 1 and 3",),
    ),
    "a key twice in jsonl": (
        {"train.jsonl": '{"text": "a", "label": "x"}\n{"text": "a", "label": "x", "label": "y"}\n'},
        (),
        ("train.jsonl': row 2 is not JSON in UTF-8: key 'label' occurs twice in one object: one of its values",),
    ),
    "a key twice in json": (
        {"train.json": '[{"text": "a", "text": "b", "label": "x"}]'},
        (),
        ("train.json': not JSON: key 'text' occurs twice",),
    ),
    "bytes for text": (
        {"train.parquet": bytes_table("text", pa.binary())},
        (),
        ("train: column 'text': expected text, found binary, bytes that need not be text",),
    ),
    "bytes for labels": (
        {"train.parquet": bytes_table("label", pa.binary(4))},
        (),
        ("train: column 'label': expected text, found fixed_size_binary[4], bytes",),
    ),
    "images for text": (
        {"train.parquet": image_table("text")},
        (),
        ("train: column 'text': expected text, found struct<bytes: binary, path: string>, bytes",),
    ),
    "images for labels": (
        {"train.parquet": image_table("label")},
        (),
        ("train: column 'label': expected text, found struct<bytes: binary, path: string>, bytes",),
    ),
    "objects for labels": (
        {"train.jsonl": "\n".join(json.dumps({"text": t, "label": {"name": v}}) for t, v in ROWS)},
        (),
        ("train: column 'label': expected labels, found objects",),
    ),
    "words in bytes": (
        {"train.parquet": pa.table({"tokens": [[b"a", b"b"]] * 9, "tags": [["O", "B-x"]] * 9})},
        ("--task", "token-classification"),
        ("train: column 'tokens': expected text, found list<", "bytes that need not be text"),
    ),
    "objects for tags": (
        {"train.jsonl": "\n".join(json.dumps({"tokens": [t], "tags": [{"name": v}]}) for t, v in ROWS)},
        ("--task", "token-classification"),
        ("train: row 1, column 'tags': expected a list of words or tags, found \"{'name':",),
    ),
    "lists for questions": (
        {"train.jsonl": "\n".join(json.dumps({"question": [t], "context": t, "answers": t[:3]}) for t, _ in ROWS)},
        ("--task", "question-answering"),
        ("train: column 'question': expected text, found JSON lists or objects",),
    ),
    "csv and parquet": (
        {"train.csv": TABLE, "train.parquet": PARQUET},
        (),
        ("data': expected one train file, found train.csv and train.parquet: the data would be ambiguous", "--data"),
    ),
    "dev and validation": (
        {"train.csv": TABLE, "dev.csv": TABLE, "validation.csv": TABLE},
        (),
        ("expected one validation file, found dev.csv and validation.csv",),
    ),
    "csv and csv.gz": (
        {"train.csv": TABLE, "train.csv.gz": gzip.compress(TABLE.encode())},
        (),
        ("expected one train file, found train.csv and train.csv.gz",),
    ),
    "txt and csv": (
        {"train.txt": "a\nb\n", "train.csv": TABLE, "test.csv": TABLE},
        (),
        ("expected one train file, found train.csv and train.txt",),
    ),
    "a cut gz": (
        {"train.csv.gz": gzip.compress(TABLE.encode())[:-9]},
        (),
        ("train.csv.gz': expected a complete gzip file, found one that is damaged or cut off",),
    ),
    "a gz by name alone": (
        {"train.jsonl.gz": json.dumps(build_objects(ROWS)[0])},
        (),
        ("train.jsonl.gz': expected a complete gzip file, found one that is damaged or cut off: Not a gzipped file",),
    ),
    "a gz in disguise": (
        {"train.csv": gzip.compress(TABLE.encode())},
        (),
        ("expected a file in the format of its extension, found one compressed by gzip: name it train.csv.gz",),
    ),
    "a pointer": (
        {"train.parquet": "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"},
        (),
        ("train.parquet': found a Git LFS pointer, not the data",),
    ),
    "utf-16": ({"train.csv": TABLE.encode("utf-16")}, (), ("train.csv': expected text in UTF-8, found UTF-16",)),
    "a damaged name in parquet": (
        {"train.parquet": parquet_bytes(PARQUET).replace(b"text", b"te\xf8t")},
        (),
        ("train.parquet': not a parquet file, or its footer is damaged: 'utf-8' codec can't decode",),
    ),
    "a folder for a file": ({"train.csv/part.csv": TABLE}, (), ("train.csv': expected a file, found a folder",)),
    "a broken row between semicolons": (
        {"train.csv": format_csv(ROWS, ";") + "one;two;three\n"},
        (),
        ("Expected 2 columns, got 3: one;two;three", "quote cells that contain a semicolon"),
    ),
    "backslashes before quotes": (
        {"train.csv": 'text,label\na,x\n"he said \\"no\\" twice",y\n'},
        (),
        ("train.csv': line 3: a quote before a cell isn't closed at its end",),
    ),
    "blanks before quotes": (
        {"train.csv": 'text, "label"\na, "x"\nb, "y"\n'},
        (),
        ('train.csv\': line 1: expected quotes right after a separator, found a blank before "label"',),
    ),
    "json that is no rows": (
        {"train.json": json.dumps({"text": ["a"], "label": ["x"]})},
        (),
        ("train.json': expected a list of objects, or one under 'data', found an object with 'text', 'label'",),
    ),
    "json with rows in two places": (
        {"train.json": json.dumps({"data": build_objects(ROWS), "test": build_objects(ROWS)})},
        (),
        ("train.json': expected the rows under 'data' alone, found more under 'test'",),
    ),
    "json with something else among its rows": (
        {"train.json": json.dumps([*build_objects(ROWS), "x"])},
        (),
        (f"train.json': row {len(ROWS) + 1}: expected an object, found str",),
    ),
    "json of many brackets": ({"train.json": "[" * 100_000}, (), ("train.json': not JSON: maximum recursion depth",)),
    "a number without a class": (
        {"train.parquet": pa.table({"text": ["a", "b", "c"], "label": [0, 1, 2]}).replace_schema_metadata(
            {"huggingface": json.dumps({"info": {"features": {
                "text": {"dtype": "string", "_type": "Value"},
                "label": {"names": ["neg", "pos"], "_type": "ClassLabel"},
            }}})}
        )},
        (),
        ("train.parquet': row 3, column 'label': expected the number of a class that the data set names, found 2",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REJECTED)
def test_unreadable_data_is_rejected_with_one_message(case, body, tmp_path, monkeypatch, capsys):
    files, more, expected = REJECTED[case]
    message = read_rejection(body, files, tmp_path, monkeypatch, capsys, *more)
    for part in expected:
        assert part in message


@pytest.mark.skipif(os.geteuid() == 0, reason="every file is readable to root")
def test_a_file_without_permission_is_named(body, tmp_path, monkeypatch, capsys):
    data = write_files(tmp_path / "data", {"train.csv": TABLE})
    (data / "train.csv").chmod(0)
    message = rejection_of(distill, small_run(body, data, tmp_path / "run"), monkeypatch, capsys)
    assert "train.csv': can't be read: Permission denied" in message


# --- the hub


def cached_data_set(folder: Path, splits: dict[str, dict[str, list[Any]]], names: list[str]) -> Path:
    """Builds a cache as `datasets` writes it for the hub's `somebody/texts`, with the splits and class names."""
    kinds = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
    for split, columns in splits.items():
        datasets.Dataset.from_dict(columns, kinds).to_parquet(folder / "source" / f"{split}.parquet")
    files = {split: str(folder / "source" / f"{split}.parquet") for split in splits}
    datasets.load_dataset("parquet", data_files=files, cache_dir=str(folder / "made"))
    built = next(folder.glob("made/parquet/*/*/*/dataset_info.json")).parent
    cached = folder / "cache" / "somebody___texts" / "default" / "0.0.0" / built.name
    shutil.copytree(built, cached)
    for file in cached.glob("parquet-*.arrow"):
        file.rename(cached / file.name.replace("parquet-", "texts-", 1))
    info = json.loads((cached / "dataset_info.json").read_text())
    (cached / "dataset_info.json").write_text(json.dumps(info | {"dataset_name": "texts", "config_name": "default"}))
    return folder / "cache"


def hub_columns(rows: list[tuple[str, str]], names: list[str]) -> dict[str, list[Any]]:
    return {"text": [text for text, _ in rows], "label": [names.index(label) for _, label in rows]}


def test_unread_splits_of_a_hub_data_set_are_named(body, tmp_path, monkeypatch, capsys):
    names = sorted({label for _, label in ROWS})
    splits = {"train": hub_columns(ROWS, names), "validation_matched": hub_columns(ROWS[:5], names)}
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cached_data_set(tmp_path, splits, names)))
    message, rows = read_splits(body, Path("somebody/texts"), tmp_path / "run", monkeypatch, capsys)
    assert list_rows(rows) == sorted(ROWS)
    assert "data: not read: validation_matched, because their names aren't those of splits" in message


def test_large_text_of_a_hub_data_set_is_read_from_files(tmp_path, monkeypatch):
    names = sorted({label for _, label in ROWS})
    splits = {"train": hub_columns([*ROWS, ("", names[0])], names), "test": hub_columns(ROWS[:5], names)}
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cached_data_set(tmp_path, splits, names)))
    config = DataConfig(path="somebody/texts", text="text")
    whole = load_documents(config, 3, tmp_path)
    monkeypatch.setattr(text_batches, "LARGE", 1)
    (tmp_path / "stored").mkdir()
    stored = load_documents(config, 3, tmp_path / "stored")
    assert isinstance(stored.train.texts, StoredTexts)
    for part in ("train", "validation", "test"):
        assert list(getattr(stored, part).texts) == list(getattr(whole, part).texts)
    large = text_batches.find_large_text("somebody/texts")
    assert large is not None
    assert large.count_rows() == len(ROWS) + 1


def test_the_hash_of_a_hub_table_is_that_of_its_cells():
    days = [datetime.date(2026, 11, day) for day in (1, 2, 3)]
    columns = {"text": ["a", None, 'ü"'], "tags": [[1, 2], [], None], "day": days, "score": [0.1, float("nan"), None]}
    table = pa.concat_tables([pa.table(columns), pa.table(columns).slice(1)])
    assert "".join(yield_json(table)) == json.dumps(table.to_pydict(), default=str)


def test_two_splits_of_one_kind_in_a_hub_data_set_are_rejected(body, tmp_path, monkeypatch, capsys):
    names = sorted({label for _, label in ROWS})
    splits = {split: hub_columns(ROWS[:9], names) for split in ("train", "dev", "validation")}
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cached_data_set(tmp_path, splits, names)))
    arguments = small_run(body, Path("somebody/texts"), tmp_path / "run", "--until", "general")
    monkeypatch.setattr(sys, "argv", ["distill", *arguments])
    with pytest.raises(SystemExit) as exit_error:
        cli.run(distill.main)
    message = capsys.readouterr().err.splitlines()[-1]  # after the library's warnings about reading from its cache
    assert exit_error.value.code == 2
    assert message.startswith("error: data 'somebody/texts': expected one validation split, found dev and validation")
