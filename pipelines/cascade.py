"""`python -m pipelines.cascade`: lets a small student answer what it is sure of, and larger ones the rest."""

import json
from collections.abc import Sequence
from pathlib import Path

from pipelines.runs import cli
from pipelines.runs.console import Console
from pipelines.settings.commands.cascade import CascadeConfig, check_cascade_places

EXAMPLES = """\
  python -m pipelines.cascade --models runs/static/student,runs/demo/student --data examples/data/banking77 \\
      --data.validation_fraction 0.05 --min-score-share 0.99 --output runs/cascade
  python -m pipelines.cascade --models runs/family/student-15x,runs/family/student-4x --dynamic true \\
      --teacher TEACHER --data DATA --latency-ms 0.5 --output runs/cascade"""


def main(argv: Sequence[str]) -> None:
    """Runs the command with these arguments."""
    config = cli.parse(
        CascadeConfig,
        argv,
        prog="pipelines.cascade",
        about="Choose the confidence above which a small student's answer is used, and pass other texts on to larger "
        "students, for the lowest mean latency at a score or the best score at a mean latency. Write a folder that "
        "serves the cascade, and compare it with each student.",
        examples=EXAMPLES,
        short={"data": "data.path"},
    )
    check_cascade_places(config)

    from pipelines.reports.cascade_table import build_cascade_table, describe_cascade_result
    from pipelines.runs.publication import check_publishable
    from pipelines.stages.deliver.cascade import CASCADE, CASCADE_EVALUATION, run_cascade

    check_publishable(Path(config.output) / CASCADE)
    console = Console()
    done = run_cascade(config, console)
    result = json.loads((done.folder / CASCADE / CASCADE_EVALUATION).read_text("utf-8"))
    console.table("Cascade", *build_cascade_table(result["metric"], result["models"]))
    for line in describe_cascade_result(result["metric"], result["models"]):
        console.say(f"  {line}")
    console.say(f"written to {Path(config.output) / CASCADE}")


if __name__ == "__main__":
    cli.run(main)
