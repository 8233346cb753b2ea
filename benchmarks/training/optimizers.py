"""Memory and time of every optimizer: bytes of its states for each parameter, its first step, and a step.

    python -m benchmarks.training.optimizers  # BERT layers of 256, 4 of them, random weights
    python -m benchmarks.training.optimizers --names adamw muon --hidden 384 --layers 6

Each optimizer has a model of its own and steps on the same random gradients; steps take turns. Times are medians, and
ratios to fused AdamW medians over the rounds. Printed beside them is the time in which memory copies as many bytes as a
step reads and writes: the weight twice, the gradient, and the states twice. It is no lower bound, since a step reads
more than it writes, and reading alone is faster than copying.
"""

import argparse
import statistics
import time
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import BertConfig, BertForSequenceClassification

from benchmarks.common.machine import describe_setup
from benchmarks.common.timing import COPYING, measure_copy_rate, median_ratio, synchronize
from compress.measure.turns import time_in_turns
from distill.train.config import TrainConfig
from distill.train.optimizer import build_optimizer
from distill.train.optimizer_kinds import OPTIMIZERS
from pipelines.runs.console import Console
from pipelines.runs.training_checkpoint import flatten_state


@dataclass(frozen=True)
class Candidate:
    """An optimizer after its first step.

    Args:
        optimizer: The optimizer, whose parameters have gradients.
        first: Seconds of the first step, which allocates the states and may compile.
        bytes_per_parameter: Of its states.
    """

    optimizer: Optimizer
    first: float
    bytes_per_parameter: float


def main() -> None:
    """Measures the optimizers and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    console, wait = Console(), partial(synchronize, torch.device(options.device))
    names = list(dict.fromkeys(["adamw", *options.names]))
    candidates = {name: prepare_optimizer(name, options) for name in names}
    steps = {name: each.optimizer.step for name, each in candidates.items()}
    times = time_in_turns(steps, options.rounds, warmup=2, before=wait, after=wait)
    copied = measure_copy_rate(torch.device(options.device))
    parameters = count_parameters(candidates["adamw"].optimizer)
    console.say(f"{describe_setup()}, {options.device}, {options.threads} threads")
    console.say(f"{parameters / 1e6:.1f}M parameters; memory copies {copied / 1e9:.1f} GB/s")
    rows = []
    for name, each in candidates.items():
        copying = parameters * (12 + 2 * each.bytes_per_parameter) / copied
        step = statistics.median(times[name])
        ratio = median_ratio(times[name], times["adamw"])
        figures = f"{each.first:.1f}", f"{1e3 * step:.1f}", f"{ratio:.2f}", f"{1e3 * copying:.1f}"
        rows.append((name, f"{each.bytes_per_parameter:.2f}", *figures))
    columns = ("optimizer", "bytes per parameter", "first step, s", "step, ms", "ratio to adamw", COPYING)
    console.table("Optimizers", columns, rows)


def prepare_optimizer(name: str, options: argparse.Namespace) -> Candidate:
    """Returns an optimizer of a new model with random weights and gradients, after its first step."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=1000, hidden_size=options.hidden, num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64, intermediate_size=4 * options.hidden,
    )  # fmt: skip
    device = torch.device(options.device)
    model = BertForSequenceClassification(config).to(device)  # type: ignore[arg-type]  # the stub lacks devices
    for parameter in model.parameters():
        parameter.grad = 1e-3 * torch.randn_like(parameter)
    optimizer = build_optimizer(model, [], TrainConfig(optimizer=name))
    synchronize(device)
    start = time.perf_counter()
    optimizer.step()
    synchronize(device)
    first = time.perf_counter() - start
    states = (each for state in optimizer.state.values() for each in state.items())
    tensors = (tensor for name, value in states for _, tensor in flatten_state(name, value))
    state_bytes = sum(tensor.nbytes for tensor in tensors if tensor.numel() > 1)  # without the number of steps
    return Candidate(optimizer, first, state_bytes / count_parameters(optimizer))


def count_parameters(optimizer: Optimizer) -> int:
    """Returns the number of trained parameters."""
    groups: list[list[nn.Parameter]] = [group["params"] for group in optimizer.param_groups]
    return sum(parameter.numel() for group in groups for parameter in group)


if __name__ == "__main__":
    main()
