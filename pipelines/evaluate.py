"""`python -m pipelines.evaluate`: measures score, size and speed of any checkpoint."""

import json
from collections.abc import Sequence
from typing import cast

from pipelines.runs import cli
from pipelines.runs.console import Console
from pipelines.settings.commands.evaluate import EvaluateConfig, check_places
from pipelines.stages.deliver.baseline import read_baseline
from pipelines.stages.deliver.export import check_rejected

EXAMPLES = """\
  python -m pipelines.evaluate --model runs/demo/student --data examples/data/banking77 --output runs/evaluated
  python -m pipelines.evaluate --model STUDENT --teacher TEACHER --data DATA --output runs/compared"""


def main(argv: Sequence[str]) -> None:
    """Runs the command with these arguments."""
    config = cli.parse(
        EvaluateConfig,
        argv,
        prog="pipelines.evaluate",
        about="Score a checkpoint on a data set's test split and measure its size and speed.",
        examples=EXAMPLES,
        short={"data": "data.path"},
    )
    check_places(config)

    from pipelines.reports.schema import EVALUATION, Results
    from pipelines.reports.tables import build_scores, build_summary
    from pipelines.stages.deliver.standalone import evaluate_standalone

    console = Console()
    run, candidates, _, done = evaluate_standalone(config, console)
    entries = json.loads((done.folder / EVALUATION).read_text())
    metric = next(iter(entries[0]["scores"]))
    results = cast(Results, {"models": entries, "metric": metric} | read_baseline(done.folder))
    console.table("Evaluation", *build_summary(results))
    if scores := build_scores(results):
        console.table("Scores", *scores)
    console.say(f"written to {done.folder / 'evaluation.json'}")
    check_rejected([candidate.export for candidate in candidates])


if __name__ == "__main__":
    cli.run(main)
