"""Checks of the data of benchmarks whose trainings share a teacher, or whose scores aren't those of a run's report."""

from collections.abc import Collection, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common.plans import read_plan
from distill.data.splits.examples import Splits
from pipelines.settings.command_line import full_flag, override_flags
from pipelines.settings.commands.distill import SHORT_OPTIONS
from pipelines.stages.prepare.data import read_task_splits


def reject_data_settings(arguments: Sequence[str], reason: str, *, allowed: Collection[str] = ()) -> None:
    """Checks that arguments for `pipelines.distill` don't change what is read of the data.

    Raises:
        SystemExit: One of them does, and isn't among those allowed.
    """
    for argument in arguments:
        flag = full_flag(argument, {}).partition("=")[0]
        if flag.startswith("--data.") and flag not in allowed:
            raise SystemExit(f"{argument}: expected no setting of the data: {reason}")


def check_test_split(splits: Splits, data: str, hint: str = "") -> None:
    """Checks that the test rows are the data set's own.

    Args:
        splits: The data set as it was read.
        data: Its name.
        hint: What to do if they aren't.

    Raises:
        SystemExit: They were held out of train, so that another seed trains on some of them.
    """
    source = str(splits.notes["test_from"])
    if not source.startswith("the data set"):
        raise SystemExit(
            f"--data {data}: expected a test split of its own, found {source}: with another seed, some of the test "
            f"rows would be trained on{hint}"
        )


def check_shared_teacher(arguments: Sequence[str], seeds: Sequence[int], output: Path) -> None:
    """Checks that a teacher of seed 0 can be used with other seeds: no test row of theirs is a training row of its own.

    Args:
        arguments: Those of the teacher's run, without seed and output.
        seeds: Seeds of the runs that use it.
        output: Folder of these runs.

    Raises:
        SystemExit: The data has no test split of its own, and there is another seed.
    """
    if set(seeds) <= {0}:
        return
    plan = read_plan(override_flags((), [*arguments, "--output", str(output)], SHORT_OPTIONS))
    hint = "; --seeds 0 alone, or --data.test_split validation if there is a validation split, avoids it"
    with TemporaryDirectory() as scratch:
        splits = read_task_splits(plan.task, plan.settings.data, 0, Path(scratch))
        check_test_split(splits, plan.settings.data.path, hint)
