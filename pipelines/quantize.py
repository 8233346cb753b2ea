"""`python -m pipelines.quantize`: quantizes a trained model and trains it to compute at low precision."""

from collections.abc import Sequence

from distill.errors import InputError
from pipelines.distill import run_command
from pipelines.prune import MODEL_SHORT, flag_names, with_teacher
from pipelines.runs import cli
from pipelines.settings.commands.distill import DistillConfig

EXAMPLES = """\
  python -m pipelines.quantize --model runs/demo/student --data examples/data/banking77 --output runs/int8
  python -m pipelines.quantize --model runs/demo/student --teacher runs/bert --data my_texts/ --scheme int8-static \\
      --quantize.ranges mse --export onnx,onnxruntime,openvino --output runs/int8
  python -m pipelines.quantize --model M --data D --method ptq --scheme auto --min_score_share 0.995 --output runs/mixed
  python -m pipelines.quantize --model M --data D --scheme int4-weights --quantize.rounding gptq --output runs/int4"""

_SETTINGS = ("scheme", "method", "min_score_share", "epochs", "learning_rate")
QUANTIZE_SHORT = MODEL_SHORT | {name: f"quantize.{name}" for name in _SETTINGS}


def main(argv: Sequence[str]) -> None:
    """Runs the command with these arguments."""
    config = cli.parse(
        DistillConfig,
        with_defaults(argv),
        prog="pipelines.quantize",
        about="Quantize a trained model: calibrate the ranges of its activations on training texts, train it with the "
        "rounding of its deployment on the cached signals of a teacher (by default the model itself in float), export "
        "files with the integers that it was trained with, measure and report. The settings are those of "
        "pipelines.distill.",
        examples=EXAMPLES,
        short=QUANTIZE_SHORT,
    )
    run_command("pipelines.quantize", argv, config)


def with_defaults(argv: Sequence[str]) -> list[str]:
    """Returns the arguments with this command's defaults: the model is already trained, and the scheme is int8.

    Raises:
        InputError: `--student.trained` is set explicitly.
    """
    arguments = with_teacher(argv, QUANTIZE_SHORT)
    flags = flag_names(arguments)
    stored = cli.read_files(DistillConfig, argv, prog="pipelines.quantize", short=QUANTIZE_SHORT)
    names = flags | {f"--{name}" for name in stored}
    if "--student.trained" in names:
        raise InputError(
            "--student.trained: pipelines.quantize sets it itself, because its model is trained; leave it out"
        )
    scheme = [] if "--quantize.scheme" in names else ["--quantize.scheme", "int8"]
    model = [] if "--student.spec" in names else ["--student.spec", "teacher"]
    return [*arguments, *scheme, *model, "--student.trained", "true"]


if __name__ == "__main__":
    cli.run(main)
