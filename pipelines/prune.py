"""`python -m pipelines.prune`: prunes a trained model to a measured speed and trains it with a teacher."""

from collections.abc import Mapping, Sequence

from distill.errors import InputError
from pipelines.distill import run_command
from pipelines.runs import cli
from pipelines.settings.command_line import full_flag
from pipelines.settings.distill_config import SHORT, DistillConfig

EXAMPLES = """\
  python -m pipelines.prune --model runs/bert --data examples/data/banking77 --speedup 4 --output runs/quick
  python -m pipelines.prune --model runs/bert --data my_texts/ --latency-ms 2 --max-bytes 10MB --min-score 0.98 \\
      --output runs/phone
  python -m pipelines.prune --model runs/bert --data my_texts/ --speedup 2,4,8,15 --output runs/family
  python -m pipelines.prune --model runs/demo/student --teacher runs/bert --data my_texts/ --speedup 8 --uniform true \\
      --budget.precision fp32 --output runs/stock"""

MODEL_SHORT = SHORT | {"model": "student.spec"}


def main(argv: Sequence[str]) -> None:
    config = cli.parse(
        DistillConfig,
        with_teacher(argv),
        prog="pipelines.prune",
        about="Prune a trained model to a speed that is measured on this machine: its heads, neurons, width, "
        "layers and vocabulary, each shape tried out; then train what is left on the cached signals of a teacher (the "
        "model itself where none is named), export, measure and report. The settings are those of pipelines.distill.",
        examples=EXAMPLES,
        short=MODEL_SHORT,
    )
    if not config.budget.requested:
        raise InputError("budget: none given; name a --speedup such as 10 or 2,4,8,15, or a --latency-ms")
    run_command("pipelines.prune", argv, config)


def with_teacher(argv: Sequence[str], short: Mapping[str, str] = MODEL_SHORT) -> list[str]:
    """Returns the arguments with full flag names; a model given without a teacher becomes its own teacher.

    The student then starts as the whole teacher. With `--config`, the arguments aren't reassigned.
    """
    words = [full_flag(word, short) for word in argv]
    if named(words) & {"--teacher.model", "--config"}:
        return words
    renamed = {"--student.spec": "--teacher.model"}
    return [
        "".join((renamed.get(name, name), equals, value))
        for name, equals, value in (word.partition("=") for word in words)
    ]


def named(words: Sequence[str]) -> set[str]:
    """Returns the names of the flags among the arguments, without their values."""
    return {word.partition("=")[0] for word in words}


if __name__ == "__main__":
    cli.run(main)
