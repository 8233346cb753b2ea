"""`python -m pipelines.prune`: prunes a trained model to a measured speed and trains it with a teacher."""

from collections.abc import Mapping, Sequence

from distill.errors import InputError
from pipelines.distill import run_command
from pipelines.runs import cli
from pipelines.settings.command_line import full_flag
from pipelines.settings.commands.distill import SHORT_OPTIONS, DistillConfig

EXAMPLES = """\
  python -m pipelines.prune --model runs/demo/teacher/*/model --data examples/data/banking77 --speedup 4 \\
      --output runs/quick
  python -m pipelines.prune --model runs/bert --data my_texts/ --latency-ms 2 --max-bytes 10MB --min-score-share 0.98 \\
      --output runs/phone
  python -m pipelines.prune --model runs/bert --data my_texts/ --speedup 2,4,8,15 --output runs/family
  python -m pipelines.prune --model runs/demo/student --teacher runs/bert --data my_texts/ --speedup 8 --uniform true \\
      --budget.precision fp32 --output runs/stock"""

MODEL_SHORT = SHORT_OPTIONS | {"model": "student.spec"}


def main(argv: Sequence[str]) -> None:
    """Runs the command with these arguments."""
    config = cli.parse(
        DistillConfig,
        with_teacher(argv),
        prog="pipelines.prune",
        about="Prune the heads, neurons, width, layers and vocabulary of a trained model to a speed that is measured "
        "on this machine; several shapes are tried. Then train the pruned model on the cached signals of a teacher "
        "(by default the model itself), export, measure and report. The settings are those of pipelines.distill.",
        examples=EXAMPLES,
        short=MODEL_SHORT,
    )
    if not config.budget.requested:
        raise InputError(
            "budget: expected a --speedup such as 10 or 2,4,8,15, a --latency-ms or a --texts-per-second, found none; "
            "nothing to prune"
        )
    run_command("pipelines.prune", argv, config)


def with_teacher(argv: Sequence[str], short: Mapping[str, str] = MODEL_SHORT) -> list[str]:
    """Returns the arguments with full flag names; a model without a teacher becomes its own teacher.

    The student then starts as the whole teacher. Flags and YAML files are treated alike.
    """
    arguments = [full_flag(argument, short) for argument in argv]
    flags, stored = flag_names(arguments), cli.read_files(DistillConfig, argv, prog="pipelines.prune", short=short)
    if "--teacher.model" in flags or "teacher.model" in stored:
        return arguments
    if "--student.spec" in flags:
        renamed = {"--student.spec": "--teacher.model"}
        parts = (argument.partition("=") for argument in arguments)
        arguments = ["".join((renamed.get(name, name), equals, value)) for name, equals, value in parts]
    elif "student.spec" in stored:
        arguments = [*arguments, "--teacher.model", str(stored["student.spec"])]
    else:
        return arguments
    return [*arguments, "--student.spec", "teacher"]


def flag_names(arguments: Sequence[str]) -> set[str]:
    """Returns the names of the flags among the arguments, without their values."""
    return {argument.partition("=")[0] for argument in arguments}


if __name__ == "__main__":
    cli.run(main)
