"""`python -m pipelines.plan`: memory and time of every layout on machines you don't have yet, and the best pair."""

from collections.abc import Sequence
from pathlib import Path

from pipelines.runs import cli
from pipelines.runs.console import Console
from pipelines.settings.commands.plan import SHORT_PLANNER_OPTIONS, PlannerConfig

EXAMPLES = """\
  python -m pipelines.plan --teacher my-llama-70b --student layers=16 --task causal-lm --gpus 8 --gpu h100 \\
      --rows 1000000 --data.max_length 2048
  python -m pipelines.plan --config configs/demo.yaml --gpus 8 --nodes 2 --gpu-memory 40GB --bandwidth 100Gbit/s
  python -m pipelines.plan --teacher runs/bert --student layers=3 --data train.csv --gpu cpu --gpus 2"""


def main(argv: Sequence[str]) -> None:
    """Runs the command with these arguments."""
    config = cli.parse(
        PlannerConfig,
        argv,
        prog="pipelines.plan",
        about="Plan a distillation: trace every layout of teacher and student without weights or GPUs, print memory "
        "and time, and write the settings of the fastest pair that fits. It takes all options of pipelines.distill.",
        examples=EXAMPLES,
        short=SHORT_PLANNER_OPTIONS,
    )
    from pipelines.planner.plan import make_plan
    from pipelines.planner.report import print_plan, write_plan

    console = Console()
    plan = make_plan(config, console)
    print_plan(plan, console)
    files = write_plan(plan, Path(config.output))
    console.table("Files", ("what", "where"), [(name, str(file)) for name, file in files.items()])


if __name__ == "__main__":
    cli.run(main)
