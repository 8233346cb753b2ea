"""The plan of a run that a benchmark takes apart, from the arguments of its command."""

from collections.abc import Sequence

from pipelines.runs import cli
from pipelines.settings.commands.distill import SHORT_OPTIONS, DistillConfig
from pipelines.settings.plan import RunPlan
from pipelines.settings.resolve import resolve


def read_plan(arguments: Sequence[str]) -> RunPlan:
    """Returns the plan of `python -m pipelines.distill` with these arguments, on one process.

    Raises:
        InputError: The arguments aren't valid settings, or contradict each other.
    """
    return resolve(cli.parse(DistillConfig, list(arguments), prog="", about="", examples="", short=SHORT_OPTIONS), 1)
