"""`python -m pipelines.quantize`: quantizes a trained model and trains it to compute at low precision."""

from collections.abc import Sequence

from distill.errors import InputError
from pipelines.distill import run_command
from pipelines.prune import MODEL_SHORT, named, with_teacher
from pipelines.runs import cli
from pipelines.settings.distill_config import DistillConfig

EXAMPLES = """\
  python -m pipelines.quantize --model runs/demo/student --data examples/data/banking77 --output runs/int8
  python -m pipelines.quantize --model runs/demo/student --teacher runs/bert --data my_texts/ --scheme int8-static \\
      --quantize.ranges mse --export onnx,onnxruntime,openvino --output runs/int8
  python -m pipelines.quantize --model M --data D --method ptq --scheme auto --min_score 0.995 --output runs/mixed
  python -m pipelines.quantize --model M --data D --scheme int4-weights --quantize.weights gptq --output runs/int4"""

OWN = MODEL_SHORT | {name: f"quantize.{name}" for name in ("scheme", "method", "min_score", "epochs", "learning_rate")}


def main(argv: Sequence[str]) -> None:
    config = cli.parse(
        DistillConfig,
        with_defaults(argv),
        prog="pipelines.quantize",
        about="Make a trained model compute in few bits: tell the ranges of its activations from training texts, "
        "train it as it will be deployed on the cached signals of a teacher (the model itself in float where none is "
        "named), export files with the very integers it was trained with, measure and report. The settings are those "
        "of pipelines.distill.",
        examples=EXAMPLES,
        short=OWN,
    )
    run_command("pipelines.quantize", argv, config)


def with_defaults(argv: Sequence[str]) -> list[str]:
    """Returns the arguments with this command's defaults: the model is already trained, and the scheme is int8.

    Raises:
        InputError: `--student.given` is set explicitly.
    """
    words = with_teacher(argv, OWN)
    found = named(words)
    if "--student.given" in found:
        raise InputError("--student.given: pipelines.quantize takes a trained model always; leave the flag out")
    scheme = [] if found & {"--quantize.scheme", "--config"} else ["--quantize.scheme", "int8"]
    model = [] if found & {"--student.spec", "--config"} else ["--student.spec", "teacher"]
    return [*words, *scheme, *model, "--student.given", "true"]


if __name__ == "__main__":
    cli.run(main)
