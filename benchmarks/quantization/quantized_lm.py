"""A small language model quantized by several methods: nearest weights, GPTQ, AWQ, and quantization-aware training.

    python -m benchmarks.tasks.small_lm --config benchmarks/tasks/small-lm.yaml --output runs/small-lm
    python -m benchmarks.quantization.quantized_lm --lm runs/small-lm --output runs/quantized-lm

All start from the same float model, a Llama. Calibration uses the first blocks of its training text;
quantization-aware training uses the next ones, with the float model as the teacher. Each result is saved as a torchao
checkpoint and loaded by stock transformers in a fresh process. Printed per method: the perplexity on unseen blocks
found there and its distance from the float model's in nats per token; the KL divergence from the float model on the
first of these blocks, in nats per token, which separates methods more clearly than the perplexity; the size of the
weights in MB; and the difference between the two processes. The baseline is the float model's own row.
"""

import argparse
import copy
import json
import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedModel

from benchmarks.cache.cached_students import measure_kl, query_in_float32, train_modules
from benchmarks.tasks.small_lm import measure_nats
from compress.export.common.source import Source
from compress.export.pytorch.torchao import export_torchao
from compress.quantize.config import QuantizeConfig
from compress.quantize.gptq import apply_gptq
from compress.quantize.model import quantize_model
from compress.quantize.prepare import ModelQuantization, convert_quantized
from distill.data.batches.batches import TrainBatches
from distill.data.batches.token_blocks import LanguageBlocks
from distill.losses.config import LossConfig
from distill.teacher.online import OnlineTeacher
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from pipelines.runs.console import Console

BATCH = 8
CALIBRATION_BLOCKS = 64
KL_BLOCKS = 50  # unseen blocks on which distributions are compared
WeightRounding: TypeAlias = Literal["nearest", "awq", "gptq"]


class Text:
    """The blocks for calibration and training."""

    def __init__(self, options: argparse.Namespace, console: Console):
        blocks = np.load(Path(options.lm) / "train.npy").astype(np.int64)
        self.calibration = [
            {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            for ids in torch.from_numpy(blocks[:CALIBRATION_BLOCKS]).split(BATCH)
        ]
        end = CALIBRATION_BLOCKS + options.steps * BATCH
        self.training = LanguageBlocks(list(blocks[CALIBRATION_BLOCKS:end]))
        self.steps, self.rate, self.console = options.steps, options.rate, console


Method: TypeAlias = Callable[[LlamaForCausalLM, Text], ModelQuantization]  # quantizes the model in place


def calibrate(model: LlamaForCausalLM, text: Text, scheme: str, weights: WeightRounding) -> None:
    """Gives the model quantized layers whose ranges are those of the calibration text."""
    quantize_model(model, QuantizeConfig(scheme=scheme, weights=weights), text.calibration)
    if weights == "gptq":
        apply_gptq(model, text.calibration)


def quantize_calibrated(
    model: LlamaForCausalLM, text: Text, *, scheme: str, weights: WeightRounding = "nearest"
) -> ModelQuantization:
    """Quantizes the model after calibration."""
    calibrate(model, text, scheme, weights)
    return convert_quantized(model)


def quantize_trained(
    model: LlamaForCausalLM, text: Text, *, scheme: str, weights: WeightRounding = "nearest"
) -> ModelQuantization:
    """Quantizes the model after calibration and training on the float model's outputs."""
    signals = query_in_float32(OnlineTeacher(copy.deepcopy(model).eval()))
    calibrate(model, text, scheme, weights)
    module = DistillationModule(model.train(), loss=LossConfig(kl=1, temperature=1), train=TrainConfig())
    batches = TrainBatches(text.training, BATCH, 0, seed=0, signals=signals)
    train_modules([module], batches, text.steps, f"{scheme}: training", text.console, text.rate)
    return convert_quantized(model.eval())


METHODS: dict[str, Method] = {
    "int8-weights nearest": partial(quantize_calibrated, scheme="int8-weights"),
    "int8-dynamic nearest": partial(quantize_calibrated, scheme="int8-dynamic"),
    "fp8-weights nearest": partial(quantize_calibrated, scheme="fp8-weights"),
    "fp8-dynamic nearest": partial(quantize_calibrated, scheme="fp8-dynamic"),
    "int4-weights nearest": partial(quantize_calibrated, scheme="int4-weights"),
    "int4-weights AWQ": partial(quantize_calibrated, scheme="int4-weights", rounding="awq"),
    "int4-weights GPTQ": partial(quantize_calibrated, scheme="int4-weights", rounding="gptq"),
    "int4-weights trained": partial(quantize_trained, scheme="int4-weights"),
    "int4-weights GPTQ, then trained": partial(quantize_trained, scheme="int4-weights", rounding="gptq"),
}


def main() -> None:
    """Quantizes the model by all methods and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm", default="runs/small-lm", help="folder that benchmarks.tasks.small_lm wrote")
    parser.add_argument("--output", default="runs/quantized-lm")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--steps", type=int, default=300, help="of quantization-aware training")
    parser.add_argument("--rate", type=float, default=5e-5, help="learning rate of quantization-aware training")
    parser.add_argument("--blocks", type=int, default=200, help="unseen blocks")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--reload", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dev = np.load(Path(options.lm) / "dev.npy")[: options.blocks]
    if options.reload:
        print(json.dumps({"nats": measure_nats(LlamaForCausalLM.from_pretrained(options.reload), dev)}))
        return
    compare(options, dev)


def compare(options: argparse.Namespace, dev: np.ndarray) -> None:
    """Quantizes the model by each method, prints the table and writes it to table.json."""
    console, output, folder = Console(), Path(options.output), Path(options.lm) / "model"
    output.mkdir(parents=True, exist_ok=True)
    plain = LlamaForCausalLM.from_pretrained(folder).float().eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text, float_nats = Text(options, console), measure_nats(plain, dev)
    rows = [("float", *format_perplexity(float_nats, float_nats), "", f"{count_megabytes(folder):.1f}", "")]
    for name in options.methods:
        model = copy.deepcopy(plain)
        quantization = METHODS[name](model, text)
        target = output / name.replace(",", "").replace(" ", "-")
        source = Source(model, tokenizer, quantization)
        export_torchao(source, target)
        reference: PreTrainedModel = source.reference
        reference_nats, nats = measure_nats(reference, dev), measure_reloaded(options, target)
        kl = measure_kl(reference, plain, dev[:KL_BLOCKS])
        sizes = f"{count_megabytes(target):.1f}", f"{abs(nats - reference_nats):.1e}"
        rows.append((name, *format_perplexity(nats, float_nats), f"{kl:.5f}", *sizes))
        console.say(f"{name}: {nats:.4f} nats per token, {float_nats:.4f} in float")
    header = ("method", "perplexity", "loss increase (nats)", "KL from float", "MB", "nats between processes")
    console.table(f"{len(dev)} unseen blocks of {dev.shape[1]} tokens", header, rows)
    (output / "table.json").write_text(json.dumps([dict(zip(header, row, strict=True)) for row in rows], indent=1))


def format_perplexity(nats: float, float_nats: float) -> tuple[str, str]:
    """Returns the perplexity, and the distance from the float model in nats per token."""
    return f"{math.exp(nats):.2f}", f"{nats - float_nats:+.4f}"


def count_megabytes(folder: Path) -> float:
    """Returns the size of a checkpoint's weights in MB."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6


def measure_reloaded(options: argparse.Namespace, folder: Path) -> float:
    """Returns the nats per token of a checkpoint in a fresh process."""
    arguments = [
        f"--lm={options.lm}",
        f"--blocks={options.blocks}",
        f"--threads={options.threads}",
        f"--reload={folder}",
    ]
    command = [sys.executable, "-m", "benchmarks.quantization.quantized_lm", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 - own command
    return float(json.loads(done.stdout.splitlines()[-1])["nats"])


if __name__ == "__main__":
    main()
