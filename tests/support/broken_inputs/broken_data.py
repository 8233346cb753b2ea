"""Broken data: inconsistent or damaged files, columns, cells, labels and splits."""

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from support.broken_inputs.case import ACCEPTED, Case, Flags, Workspace
from support.tiny_models import make_rows

ROWS = make_rows(60, 11)
TEXTS, NAMES = [text for text, _ in ROWS], [label for _, label in ROWS]


def as_csv(rows: Sequence[Sequence[object]], delimiter: str = ",", header: Sequence[str] = ("text", "label")) -> str:
    out = io.StringIO()
    csv.writer(out, delimiter=delimiter).writerows([header, *rows])
    return out.getvalue()


def as_jsonl(rows: Sequence[Any]) -> str:
    return "\n".join(json.dumps(row) for row in rows) + "\n"


def files(contents: dict[str, str | bytes | None], **flags: str) -> Callable[[Workspace], Flags]:
    """Replaces files of the data folder; None removes a file."""

    def damage(workspace: Workspace) -> Flags:
        for name, content in contents.items():
            file = workspace.data / name
            file.unlink(missing_ok=True)
            if content is not None:
                file.write_bytes(content.encode() if isinstance(content, str) else content)
        return {f"--{name.replace('__', '.')}": value for name, value in flags.items()}

    return damage


def only(name: str, content: str | bytes, **flags: str) -> Callable[[Workspace], Flags]:
    """Replaces train.csv by another training file."""
    return files({"train.csv": None, name: content}, **flags)


def parquet(columns: dict[str, Any], **flags: str) -> Callable[[Workspace], Flags]:
    def damage(workspace: Workspace) -> Flags:
        (workspace.data / "train.csv").unlink()
        pa.parquet.write_table(pa.table(columns), workspace.data / "train.parquet")
        return {f"--{name.replace('__', '.')}": value for name, value in flags.items()}

    return damage


def rows_with(at: int, text: str | None = None, label: str | None = None) -> list[tuple[str, str]]:
    rows = list(ROWS)
    rows[at] = (rows[at][0] if text is None else text, rows[at][1] if label is None else label)
    return rows


def file_cases() -> Iterator[Case]:
    good = as_csv(ROWS)
    objects = [{"text": text, "label": label} for text, label in ROWS]
    yield Case("an empty csv", files({"train.csv": ""}), "empty")
    yield Case("a csv of blank lines", files({"train.csv": "\n\n\n"}), r"train\.csv': not a well-formed csv file")
    yield Case("a csv of a header alone", files({"train.csv": "text,label\n"}), "below the header|no rows")
    yield Case("a csv without a header", files({"train.csv": good.partition("\n")[2]}), "no text column")
    yield Case("a csv in Latin-1", files({"train.csv": "text,label\nä,x\nö,y\n".encode("latin-1")}), "UTF-8")
    yield Case("a csv in UTF-16", files({"train.csv": good.encode("utf-16")}), "UTF-8|UTF-16")
    yield Case("a csv of nulls", files({"train.csv": b"\0" * 400}), r"train\.csv': not a well-formed csv file")
    yield Case("a csv with a null in a cell", files({"train.csv": as_csv(rows_with(3, text="a\0b"))}), "", ACCEPTED)
    yield Case("a csv row with a cell too many", files({"train.csv": good + "a,b,c\n"}), "Expected 2 columns, got 3")
    yield Case("a csv row with a cell too few", files({"train.csv": good + "lonely\n"}), "Expected 2 columns, got 1")
    yield Case("a csv with an open quote", files({"train.csv": good + '"open,billing\n' + good}), "quote")
    yield Case("a csv that is a picture", files({"train.csv": b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 4}), "UTF-8")
    yield Case(
        "a csv that is gzip without saying so", files({"train.csv": gzip.compress(good.encode())}), "compressed by gzip"
    )
    yield Case("a csv with a byte order mark", files({"train.csv": b"\xef\xbb\xbf" + good.encode()}), "", ACCEPTED)
    yield Case(
        "a csv with blanks in its header", files({"train.csv": as_csv(ROWS, header=(" text", "label "))}), "", ACCEPTED
    )
    yield Case("a csv with semicolons", files({"train.csv": as_csv(ROWS, ";")}), ";|semicolon", ACCEPTED)
    yield Case("a csv with bars", files({"train.csv": as_csv(ROWS, "|")}), "separated by a vertical bar", ACCEPTED)
    yield Case("a csv with tabs", files({"train.csv": as_csv(ROWS, "\t")}), "tab|\\\\t", ACCEPTED)
    yield Case("a csv of old Mac lines", files({"train.csv": good.replace("\r\n", "\r")}), "", ACCEPTED)
    yield Case(
        "a cell of three megabytes", files({"train.csv": as_csv(rows_with(3, text="so " * 1_000_000))}), "", ACCEPTED
    )
    yield Case(
        "two columns of one name",
        files({"train.csv": as_csv([(t, t, n) for t, n in ROWS], header=("text", "text", "label"))}),
        "found 'text' as the name of columns 1 and 2",
    )
    yield Case(
        "two columns of one name but for blanks",
        files({"train.csv": as_csv([(t, n, n) for t, n in ROWS], header=("text", "label", " label"))}),
        "found 'label' as the name of columns 2 and 3",
    )
    yield Case(
        "a column without a name",
        files({"train.csv": as_csv([(1, t, n) for t, n in ROWS], header=("", "text", "label"))}),
        "",
        ACCEPTED,
    )
    yield Case(
        "two files of one split",
        files({"train.jsonl": as_jsonl(objects[:50])}),
        r"train\.csv.*train\.jsonl|train\.jsonl.*train\.csv",
    )
    yield Case(
        "dev and validation",
        files({"dev.csv": good, "validation.csv": as_csv(ROWS[:20])}),
        "dev.*validation|validation.*dev",
    )
    yield Case(
        "plain and compressed", files({"train.csv.gz": gzip.compress(as_csv(ROWS[:9]).encode())}), r"train\.csv\.gz"
    )
    yield Case("jsonl cut off", only("train.jsonl", as_jsonl(objects)[:-9]), "row 60|line 60")
    yield Case("jsonl of lists", only("train.jsonl", as_jsonl([[1, 2]])), "object")
    yield Case(
        "jsonl with a key given twice",
        only("train.jsonl", '{"text": "a", "text": "b", "label": "x"}\n'),
        "key 'text' occurs twice",
    )
    yield Case(
        "jsonl of half a character",
        only("train.jsonl", '{"text": "\\ud800", "label": "x"}\n'),
        "row 1 is not JSON in UTF-8",
    )
    yield Case("jsonl deep", only("train.jsonl", "[" * 100000 + "\n"), "row 1 is not JSON in UTF-8")
    yield Case("jsonl compressed", only("train.jsonl.gz", gzip.compress(as_jsonl(objects).encode())), "", ACCEPTED)
    yield Case(
        "jsonl compressed and cut off",
        only("train.jsonl.gz", gzip.compress(as_jsonl(objects).encode())[:-30]),
        r"jsonl\.gz",
    )
    yield Case("jsonl that isn't compressed", only("train.jsonl.gz", as_jsonl(objects)), "gzip|gz")
    yield Case("csv compressed", only("train.csv.gz", gzip.compress(good.encode())), "", ACCEPTED)
    yield Case("csv compressed and damaged", only("train.csv.gz", damaged(gzip.compress(good.encode()))), r"csv\.gz")
    yield Case("json of a list", only("train.json", json.dumps(objects)), "", ACCEPTED)
    yield Case("json of a word", only("train.json", '"hello"'), r"train\.json': expected a list of objects")
    yield Case("json cut off", only("train.json", json.dumps(objects)[:-5]), r"train\.json': not JSON")
    yield Case("json empty list", only("train.json", "[]"), r"train\.json': expected rows, found none")
    yield Case(
        "json with numbers among rows",
        only("train.json", json.dumps([*objects, 4])),
        "row 61: expected an object, found int",
    )
    yield Case("parquet that is text", only("train.parquet", good), "parquet")
    yield Case("parquet empty", only("train.parquet", ""), r"train\.parquet': the file is empty")
    yield Case("a data folder without train", files({"train.csv": None}), "expected a train file")
    yield Case(
        "a data folder of another format",
        only("train.xlsx", b"PK\x03\x04" + b"0" * 99),
        r"expected a train file .*train\.xlsx",
    )
    yield Case("a data path that isn't there", lambda p: {"--data": str(p.root / "nodata.csv")}, "nodata")
    yield Case(
        "data in the teacher's folder",
        lambda p: {"--data": str(p.teacher)},
        r"/teacher': expected txt files or a train file",
    )
    yield Case(
        "an empty data folder",
        lambda p: {"--data": str(emptied(p.root / "none"))},
        "expected txt files or a train file .* found nothing",
    )
    yield Case("train is a folder", lambda p: folder_in(p.data / "train.csv"), "expected a file, found a folder")


def damaged(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes(20) + content[middle + 20 :]


def emptied(folder: Path) -> Path:
    folder.mkdir()
    return folder


def folder_in(file: Path) -> Flags:
    file.unlink()
    file.mkdir()
    return {}


def column_cases() -> Iterator[Case]:
    yield Case(
        "text and label the same column",
        files({}, data__text="text", data__label="text"),
        r"data\.text and data\.label, found 'text' for both",
    )
    yield Case(
        "text and pair the same column",
        files({}, data__text="text", data__text_pair="text"),
        r"data\.text and data\.text_pair, found 'text' for both",
    )
    yield Case(
        "pair and label the same column",
        files({}, data__text_pair="label", data__label="label"),
        r"data\.text_pair and data\.label, found 'label' for both",
    )
    yield Case("a text column that isn't there", files({}, data__text="txet"), "txet.*text|text.*txet")
    yield Case("a label column that isn't there", files({}, data__label="lable"), "lable")
    yield Case(
        "a label column in train alone",
        files({"test.csv": as_csv(ROWS[:9], header=("text", "intent_"))}),
        "test|label",
        ACCEPTED,
    )
    yield Case(
        "a text column in train alone",
        files({"test.csv": as_csv(ROWS[:9], header=("words", "label"))}),
        "test: no text column",
    )
    yield Case("binary text", parquet({"text": [t.encode() for t in TEXTS], "label": NAMES}), "text.*bin|bin.*text")
    yield Case("binary labels", parquet({"text": TEXTS, "label": [n.encode() for n in NAMES]}), "label.*bin|bin.*label")
    yield Case(
        "pictures in the place of text",
        parquet({"text": [{"bytes": b"\x89PNG", "path": "a.png"}] * 60, "label": NAMES}),
        "column 'text': expected text, found struct",
    )
    yield Case(
        "lists in the place of text",
        parquet({"text": [["a", "b"]] * 60, "label": NAMES}, task="text-classification"),
        "column 'text': expected text, found list",
    )
    yield Case(
        "text that is all null",
        parquet({"text": pa.nulls(60, pa.string()), "label": NAMES}),
        "no text in any of 60 rows",
    )
    yield Case(
        "labels that are all null",
        parquet({"text": TEXTS, "label": pa.nulls(60, pa.string())}),
        "column 'label' contains no label",
    )
    yield Case(
        "labels of floats in train, of names in test",
        parquet({"text": TEXTS, "label": [0.5 + i % 3 for i in range(60)]}, task="text-classification"),
        "test has labels that train lacks",
    )
    yield Case(
        "labels not finite",
        parquet({"text": TEXTS, "label": [float("nan"), *(0.5 + i % 3 for i in range(59))]}, task="regression"),
        "column 'label' contains no label in row 1",
    )
    yield Case(
        "a number that is a word",
        files(
            {
                "train.csv": as_csv([(t, i / 7) for i, t in enumerate(TEXTS[:-1])] + [(TEXTS[-1], "seven")]),
                "test.csv": None,
            },
            task="regression",
        ),
        "seven",
    )
    yield Case(
        "labels that are dates",
        parquet({"text": TEXTS, "label": pa.array(list(range(60)), pa.date32())}),
        "a label of its own in each of 60 rows",
    )


def label_cases() -> Iterator[Case]:
    for name in ("NaN", "nan", "NA", "None", "null", ""):
        yield Case(
            f"a label {name!r} of bare text",
            files({"train.csv": bare(rows_with(7, label=name))}),
            "contains no label .*in row 8",
        )
    yield Case(
        "labels that differ in how they are written",
        files({"train.csv": as_csv([(t, ("01", "1", "1.0")[i % 3]) for i, t in enumerate(TEXTS)]), "test.csv": None}),
        "1.0",
        ACCEPTED,
    )
    yield Case(
        "labels that differ in case",
        files({"train.csv": as_csv([(t, n.upper() if i % 2 else n) for i, (t, n) in enumerate(ROWS)])}),
        "BILLING|billing",
        ACCEPTED,
    )
    yield Case(
        "labels with blanks around them",
        files({"train.csv": as_csv([(t, f" {n} " if i % 2 else n) for i, (t, n) in enumerate(ROWS)])}),
        "",
        ACCEPTED,
    )
    yield Case("one class alone", files({"train.csv": as_csv([(t, "x") for t in TEXTS])}), "at least two classes")
    yield Case("a label in test alone", files({"test.csv": as_csv(rows_with(0, label="mystery"))}), "mystery")
    yield Case(
        "a label in test alone, left out on request",
        files({"test.csv": as_csv(rows_with(0, label="mystery"))}, data__unknown_labels="drop"),
        "mystery",
        ACCEPTED,
    )
    yield Case(
        "a label for each row",
        files({"train.csv": as_csv([(t, f"id{i}") for i, t in enumerate(TEXTS)])}),
        "a label of its own in each of 60 rows",
    )
    yield Case(
        "-1 among labels",
        files({"train.csv": as_csv([(t, -1 if i == 5 else i % 3) for i, t in enumerate(TEXTS)]), "test.csv": None}),
        "-1",
    )
    yield Case(
        "a test split of -1",
        files(
            {
                "train.csv": as_csv([(t, i % 3) for i, t in enumerate(TEXTS)]),
                "test.csv": as_csv([(t, -1) for t in TEXTS[:9]]),
            }
        ),
        "test",
        ACCEPTED,
    )
    yield Case(
        "a test split of empty labels", files({"test.csv": as_csv([(t, "") for t in TEXTS[:9]])}), "test", ACCEPTED
    )
    yield Case(
        "a label with brackets",
        files({"train.csv": as_csv([(t, f"[bold]{n}[/x]") for t, n in ROWS]), "test.csv": None}),
        "",
        ACCEPTED,
    )
    yield Case(
        "a label of a line break",
        files({"train.csv": as_csv([(t, f"{n}\nx") for t, n in ROWS]), "test.csv": None}),
        "",
        ACCEPTED,
    )
    yield Case(
        "two hundred classes of two rows",
        files(
            {
                "train.csv": as_csv(
                    [(f"{t} {k}", f"class{i % 200}") for k in range(7) for i, t in enumerate(TEXTS)][:400]
                ),
                "test.csv": None,
            }
        ),
        "",
        ACCEPTED,
    )


def bare(rows: Sequence[tuple[str, str]]) -> str:
    """Returns a csv file without quotes, as data frame exports write missing values."""
    return "text,label\n" + "".join(f"{text.replace(',', '')},{label}\n" for text, label in rows)


def row_cases() -> Iterator[Case]:
    yield Case(
        "rows without text",
        files({"train.csv": as_csv([*ROWS, ("", "billing"), ("  ", "login")])}),
        "2.*empty|empty.*2|2 rows",
        ACCEPTED,
    )
    yield Case(
        "no text in any row", files({"train.csv": as_csv([("", n) for n in NAMES])}), "no text in any of 60 rows"
    )
    yield Case("one row", files({"train.csv": as_csv(ROWS[:1])}), "at least two classes in train, found 1")
    yield Case("two rows", files({"train.csv": as_csv(ROWS[:2])}), "expected at least 2 rows of a class")
    yield Case(
        "five rows of five classes",
        files({"train.csv": as_csv(ROWS[:5]), "test.csv": None}),
        "a label of its own in each of 5 rows",
    )
    yield Case(
        "all texts the same",
        files({"train.csv": as_csv([("same", n) for n in NAMES])}),
        "found 'same' in each of 60 rows",
    )
    yield Case(
        "a text of one class of control characters",
        files({"train.csv": as_csv(rows_with(1, text="\x01\x02"))}),
        "",
        ACCEPTED,
    )
    yield Case(
        "texts longer than the model reads", files({"train.csv": as_csv([(t * 40, n) for t, n in ROWS])}), "", ACCEPTED
    )
    yield Case("test texts in train", files({"test.csv": as_csv(ROWS[:9])}), "9.*train|train.*9", ACCEPTED)
    yield Case("test texts in the unlabelled ones", leaked_test_texts, "unlabelled", ACCEPTED)
    yield Case("unlabelled text that isn't there", files({}, data__unlabelled="nowhere.csv"), "nowhere")
    yield Case("unlabelled text of another column", other_column, "unlabelled text .*no text column")
    yield Case("fractions of nothing", files({}, data__validation_fraction="0"), "validation_fraction")
    yield Case("fractions of everything", files({"test.csv": None}, data__test_fraction="1.0"), "test_fraction")
    yield Case("a length below the special tokens", files({}, data__max_length="2"), "max_length")
    yield Case(
        "a length above the tokenizer's limit",
        files({}, data__max_length="100000"),
        "cut at 64 tokens, not 100000",
        ACCEPTED,
    )
    yield Case("tokens and tags of two lengths", tagged([["a", "b"]] * 30, [["O"]] * 30), "tags|tokens")
    yield Case("tags that aren't known in train", tags_in_test, "B-new")
    yield Case("tags that are empty", tagged([["a", "b"]] * 30, [[]] * 30), "tags|tokens")
    yield Case("tags of numbers alone", tagged([["a", "b"]] * 30, [[1.5, 2.5]] * 30), "tag")
    yield Case("a task that isn't known", files({}, task="sentiment"), "sentiment|task")
    yield Case("a task of other data", files({}, task="question-answering"), "question|context|answer")
    yield Case("a task of tags without tags", of_the_body(files({}, task="token-classification")), "tokens|tags")
    yield Case("a task of another head", files({}, task="token-classification"), "was trained for text-classification")
    yield Case("a task of vectors for a classifier", files({}, task="sentence-embedding"), "was trained for")


def leaked_test_texts(workspace: Workspace) -> Flags:
    rows = list(csv.reader((workspace.data / "test.csv").open(newline="")))[1:]
    file = workspace.written("more.csv", as_csv([(row[0],) for row in rows] + [("something else",)], header=("text",)))
    return {"--data.unlabelled": str(file)}


def other_column(workspace: Workspace) -> Flags:
    return {"--data.unlabelled": str(workspace.written("more.csv", "sms_body_x\nhello\n"))}


def of_the_body(damage: Callable[[Workspace], Flags]) -> Callable[[Workspace], Flags]:
    """Adds a teacher without a head to the damage."""
    return lambda workspace: {"--teacher": str(workspace.root / "body")} | damage(workspace)


def tagged(tokens: list[list[str]], tags: list[list[Any]]) -> Callable[[Workspace], Flags]:
    @of_the_body
    def damage(workspace: Workspace) -> Flags:
        for name in ("train", "test"):
            (workspace.data / f"{name}.csv").unlink()
            rows = [{"tokens": t, "tags": g} for t, g in zip(tokens, tags, strict=True)]
            (workspace.data / f"{name}.jsonl").write_text(as_jsonl(rows))
        return {"--task": "token-classification"}

    return damage


def tags_in_test(workspace: Workspace) -> Flags:
    flags = tagged([["a", "b"], ["c", "d"]] * 30, [["O", "B-x"], ["B-x", "O"]] * 30)(workspace)
    (workspace.data / "test.jsonl").write_text(as_jsonl([{"tokens": ["a"], "tags": ["B-new"]}]))
    return flags


CASES = [*file_cases(), *column_cases(), *label_cases(), *row_cases()]
