"""Students trained in several precisions: what they know, and what a step costs.

    python -m benchmarks.precisions --data examples/data/banking77 --seeds 0 1 2 --output runs/precisions
    python -m benchmarks.precisions --data my_texts/ --teacher T --precisions 32 bf16-mixed bf16-stochastic

For each seed the student of the recipe is distilled by `pipelines.distill` in each precision from the same start, on
the same batches, and scored in float32 on the whole test split. What `--machine.precision auto` measures and chooses
here is told too. Precisions take turns seed by seed; seconds are those of the training alone: run nothing beside it.
What is finished is skipped when the same command runs again; words that aren't its own go to `pipelines.distill`.
"""

import argparse
import json
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.kept import keep_to, only, only_checkpoint
from benchmarks.recipes import lend
from benchmarks.two_teachers import run, score, told
from pipelines.runs.console import Console
from pipelines.settings.this_machine import commit, describe

LENT = ("data", "teacher", "cache")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/demo.yaml", help="recipe of the student")
    parser.add_argument("--teacher", help="the recipe's own where left out")
    parser.add_argument("--data", default="examples/data/banking77")
    parser.add_argument("--precisions", nargs="+", default=["32", "bf16-mixed"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--output", default="runs/precisions")
    given, more = parser.parse_known_args()
    given.more = [*(["--teacher", given.teacher] if given.teacher else []), *more]
    console, place = Console(), Path(given.output)
    keep_to(place, given, free=("seeds", "precisions"))
    chosen = measured(given, place / "auto")
    scores: dict[str, list[float]] = {name: [] for name in given.precisions}
    seconds: dict[str, list[float]] = {name: [] for name in given.precisions}
    for seed in given.seeds:
        first = place / f"{given.precisions[0]}-{seed}"
        for name in given.precisions:
            output = place / f"{name}-{seed}"
            if output != first:
                lend([first], output, LENT)
            run(given, output, "--seed", str(seed), "--machine.precision", name, "--until", "distill", *given.more)
            scores[name].append(score(given, only_checkpoint(output, "distill")))
            seconds[name].append(manifest(output, "distill")["wall_seconds"])
        console.say(f"seed {seed}: " + ", ".join(f"{name} {scores[name][-1]:.2%}" for name in scores))
    rows = [
        (name, told(scores[name]), f"{mean(seconds[name]):.0f}", ratio(seconds, given.precisions[0], name))
        for name in given.precisions
    ]
    header = ("precision", "test accuracy", "seconds of training", f"faster than {given.precisions[0]}, median")
    console.table(f"{Path(given.data).name}, seeds {given.seeds}", header, rows)
    console.say(f"auto: {chosen['chosen']}; " + ", ".join(
        f"{name} {each * 1e3:.0f} ms a step" + share(chosen["share_of_ceiling"].get(name))
        for name, each in chosen["seconds_a_step"].items()
    ))  # fmt: skip
    console.say(f"{describe()}, commit {commit()}")


def measured(given: argparse.Namespace, output: Path) -> dict[str, Any]:
    """What the steps of each precision took, and which is chosen for it."""
    run(given, output, "--machine.precision", "auto", "--until", "teacher", *given.more)
    return manifest(output, "precision")["metrics"]


def manifest(output: Path, stage: str) -> dict[str, Any]:
    return json.loads(only(output, stage, "manifest.json", "manifest").read_text())


def share(found: float | None) -> str:
    return f", {found:.0%} of what products reach" if found is not None else ""


def ratio(seconds: dict[str, list[float]], first: str, name: str) -> str:
    return f"{median(a / b for a, b in zip(seconds[first], seconds[name], strict=True)):.2f}x"


if __name__ == "__main__":
    main()
