"""Students trained on a part of the rows, chosen by each method or at random.

    python -m benchmarks.data.selection --data examples/data/banking77 --output runs/selection-banking77
    python -m benchmarks.data.selection --data sentence_polarity/ --equal epochs --output runs/selection-epochs
    python -m benchmarks.data.selection --data examples/data/banking77 --per-class 10 --pool texts/ --output runs/pool

The teacher is MiniLM, trained on all labelled rows. Students have four layers of half its width and learn from its
answers. The data's own validation split chooses the rate; if there is none, rows of train that aren't among the
labelled ones, or a tenth of train if all are. With `--equal steps` every training sees as many samples; with `--equal
epochs` a part takes a part of the time. With `--pool`, texts of an encyclopaedia are chosen for the teacher to answer,
beside the labelled rows. Printed are the test score, its spread over the seeds, the gain over a random choice seed by
seed, and what it cost. Calls with different `--only` can run side by side in folders of their own; a call in a folder
with all lines of their results.jsonl files prints the whole table.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.results_folder import check_settings
from benchmarks.common.tables import draw_few, draw_others, find_table, read_table, write_table
from benchmarks.data.augmentation import COMMON, LABELS, STUDENT, VALIDATION
from benchmarks.data.student_runs import HEADER, StudentRuns, choose_variants
from pipelines.runs.console import Console
from pipelines.settings.this_machine import find_processor

METHODS = ("random", "balanced", "margin", "loss", "aum", "ccs", "k-centre", "facility", "mixture")
PREFERENCES = ("easy", "hard")  # of methods with a score
POOL_METHODS = (
    "random",
    "balanced",
    "entropy",
    "similarity, embeddings",
    "mixture, embeddings",
    "k-centre, embeddings",
)


def main() -> None:
    """Trains the students that are missing, and prints the table of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--task", default="text-classification")
    parser.add_argument("--share", type=float, default=0.2)
    parser.add_argument("--equal", choices=("steps", "epochs"), default="steps")
    parser.add_argument("--epochs", type=int, default=10, help="of the student that has all rows")
    parser.add_argument("--methods", nargs="+", help="as in data.select; or 'mixture, embeddings', 'entropy, easy'")
    parser.add_argument("--per-class", type=int, default=0, help="labelled rows of each class")
    parser.add_argument("--rows", type=int, default=0, help="labelled rows; 0 without --per-class: all")
    parser.add_argument("--pool", default="", help="folder with a table of texts to choose from")
    parser.add_argument("--teacher-epochs", type=int, default=5)
    parser.add_argument("--student", default=STUDENT)
    parser.add_argument("--rates", type=float, nargs="+", default=[5e-4, 1e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", help="names of the table's first column")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu")
    options = parser.parse_args()
    check_settings(options.output, options, free=("seeds", "methods", "only", "threads", "accelerator"))
    torch.set_num_threads(options.threads)
    rows = write_rows(options)
    arguments = [*COMMON.split(), f"--data={options.output / 'data'}", f"--student={options.student}"]
    arguments += [
        f"--teacher_train.epochs={options.teacher_epochs}",
        f"--threads={options.threads}",
        f"--accelerator={options.accelerator}",
        f"--task={options.task}",
        f"--epochs={options.epochs}",
    ]
    variants = choose_variants(list_variants(options), options.only)
    samples_seen = dict.fromkeys(variants, options.epochs * rows if options.equal == "steps" else None)
    runs = StudentRuns(options.output, arguments, 32)
    runs.compare(variants, options.rates, options.seeds, samples_seen)
    Console().table(f"{Path(options.data).name}, {find_processor()}", HEADER, runs.table([*variants], "random"))


def write_rows(options: argparse.Namespace) -> int:
    """Writes the labelled rows, the test split and the pool; returns the number of rows to choose from."""
    rows = read_table(Path(options.data), "train")
    data = options.output / "data"
    validation: Sequence[Mapping[str, Any]] | None = find_table(Path(options.data), "validation", "dev")
    if options.per_class or options.rows:
        label = next(name for name in LABELS if name in rows[0])
        few = draw_few(rows, label, options.per_class, options.rows, 0)
        validation = validation or draw_others(rows, few)[:VALIDATION]
        rows = [rows[number] for number in few]
    if validation:
        write_table(data / "validation.jsonl", validation)
    write_table(data / "train.jsonl", rows)
    write_table(data / "test.jsonl", read_table(Path(options.data), "test"))
    if not options.pool:
        return len(rows)
    texts = [row["text"][:400] for row in read_table(Path(options.pool), "train")]
    is_tagged = options.task == "token-classification"
    write_table(
        options.output / "pool.jsonl", [{"tokens": each.split()} if is_tagged else {"text": each} for each in texts]
    )
    write_table(options.output / "target.jsonl", [{"text": row["text"]} for row in rows])
    return len(rows) + len(texts)


def list_variants(options: argparse.Namespace) -> dict[str, list[str]]:
    """Returns the settings of the data of each variant, by name."""
    share = f"--select.share={options.share}"
    names = options.methods or (POOL_METHODS if options.pool else METHODS)
    pool = [f"--data.unlabelled={options.output / 'pool.jsonl'}"] if options.pool else []
    chosen = {}
    for name in names:
        method, *others = name.split(", ")
        arguments = [*pool, f"--data.select={method}", share]
        arguments += ["--select.source=unlabelled"] if pool else []
        arguments += [f"--select.{'prefer' if each in PREFERENCES else 'vectors'}={each}" for each in others]
        arguments += [f"--select.target={options.output / 'target.jsonl'}"] if method == "similarity" else []
        chosen[name] = arguments
    return ({"no pool": []} if pool else {}) | {"all": pool} | chosen


if __name__ == "__main__":
    main()
