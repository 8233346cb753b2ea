"""Students trained in several precisions: their accuracy and the time of their training.

    python -m benchmarks.training.precisions --data examples/data/banking77 --seeds 0 1 2 --output runs/precisions
    python -m benchmarks.training.precisions --data my_texts/ --teacher T --precisions 32 bf16-mixed bf16-stochastic

For each seed `pipelines.distill` trains the recipe's student in each precision from the same teacher on the same
batches; precisions alternate seed by seed. Printed per precision: accuracy in float32 on the whole test split,
mean seconds of the training stage, and the median speedup over the first precision, which is the baseline; run nothing
else meanwhile. Printed too is what `--machine.precision auto` measures and chooses here: milliseconds per step, and the
share of the rate that one large product reaches. The data needs a test split of its own, since each seed would hold out
other rows. Finished runs are skipped when the same command runs again; other arguments are passed on to
`pipelines.distill`, except for settings of the data.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, median

from benchmarks.common.command import PassThroughParser
from benchmarks.common.machine import describe_setup
from benchmarks.common.results_folder import check_settings, copy_stages, find_only, find_only_checkpoint
from benchmarks.common.spread import format_accuracy
from benchmarks.students.frontier import fine_tune
from benchmarks.students.two_teachers import check_scored_data, measure_accuracy, run_distill
from pipelines.runs.console import Console
from pipelines.runs.manifest import JsonObject, Manifest

SHARED_STAGES = ("data", "teacher", "cache")


def main() -> None:
    """Trains the students that are missing, and prints the table."""
    parser = PassThroughParser(__doc__)
    parser.add_argument("--config", default="configs/demo.yaml", help="recipe of the student")
    parser.add_argument("--teacher", help="another teacher than the recipe's")
    parser.add_argument("--data", default="examples/data/banking77")
    parser.add_argument("--precisions", nargs="+", default=["32", "bf16-mixed"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--output", default="runs/precisions")
    options = parser.parse_options()
    console, output = Console(), Path(options.output)
    check_scored_data(options)
    check_settings(output, options, free=("seeds", "precisions"))
    recipe = ["--config", options.config, "--data", options.data, *options.more]
    teacher_arguments = ["--teacher", options.teacher] if options.teacher else []
    teacher = fine_tune([*recipe, *teacher_arguments], output / "teacher")
    choice = measure_auto(options, teacher, output / "auto")
    scores: dict[str, list[float]] = {name: [] for name in options.precisions}
    seconds: dict[str, list[float]] = {name: [] for name in options.precisions}
    for seed in options.seeds:
        for name in options.precisions:
            run = train_student(options, teacher, name, seed)
            scores[name].append(measure_accuracy(options, find_only_checkpoint(run, "distill")))
            seconds[name].append(read_only_manifest(run, "distill")["wall_seconds"])
        console.say(f"seed {seed}: " + ", ".join(f"{name} {scores[name][-1]:.2%}" for name in scores))
    first = options.precisions[0]
    rows = [
        (name, format_accuracy(scores[name]), f"{mean(seconds[name]):.0f}", format_speedup(seconds, first, name))
        for name in options.precisions
    ]
    header = ("precision", "test accuracy", "seconds of training", f"speedup over {first}, median")
    console.table(f"{Path(options.data).name}, seeds {options.seeds}", header, rows)
    console.say(f"auto: {describe_choice(choice)}")
    console.say(describe_setup())


def train_student(options: argparse.Namespace, teacher: Path, precision: str, seed: int) -> Path:
    """Returns the run of a student in a precision; it reuses the stages of the first precision's run."""
    folder = Path(options.output)
    first, output = folder / f"{options.precisions[0]}-{seed}", folder / f"{precision}-{seed}"
    if output != first:
        copy_stages([first], output, SHARED_STAGES)
    arguments = ["--teacher", str(teacher), "--seed", str(seed), "--machine.precision", precision, "--until", "distill"]
    run_distill(options, output, *arguments, *options.more)
    return output


def measure_auto(options: argparse.Namespace, teacher: Path, output: Path) -> JsonObject:
    """Returns what each precision's steps took, and the precision that is chosen for it."""
    arguments = ["--teacher", str(teacher), "--machine.precision", "auto", "--until", "teacher"]
    run_distill(options, output, *arguments, *options.more)
    return read_only_manifest(output, "precision")["metrics"]


def read_only_manifest(output: Path, stage: str) -> Manifest:
    """Returns the manifest of a stage that was built once."""
    manifest: Manifest = json.loads(find_only(output, stage, "manifest.json", "manifest").read_text())
    return manifest


def describe_choice(choice: JsonObject) -> str:
    """Returns the chosen precision, and the time per step and the share of a large product's rate of each."""
    shares = choice["share_of_ceiling"]
    steps = [
        f"{name} {seconds * 1e3:.0f} ms per step"
        + (f", {shares[name]:.0%} of the rate of a large product" if shares.get(name) is not None else "")
        for name, seconds in choice["seconds_a_step"].items()
    ]
    return f"{choice['chosen']}; {', '.join(steps)}"


def format_speedup(seconds: Mapping[str, list[float]], first: str, name: str) -> str:
    """Returns the median over the seeds of the speedup over the first precision."""
    return f"{median(a / b for a, b in zip(seconds[first], seconds[name], strict=True)):.2f}x"


if __name__ == "__main__":
    main()
