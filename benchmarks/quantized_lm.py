"""A small language model in few bits: nearest weights, GPTQ, AWQ, and training in few bits, in one table.

    python -m benchmarks.small_lm --config configs/small-lm.yaml --output runs/small-lm
    python -m benchmarks.quantized_lm --lm runs/small-lm --output runs/quantized-lm

Every way quantizes the same float model, a Llama. Calibration takes the first blocks of its training text, training in
few bits the next ones, with the float model as the teacher. Each result is saved as a torchao checkpoint and loaded by
stock transformers in a fresh process; the perplexities in the table are those found there. How far its distributions
are from the float model's (KL, in nats a token, on the first of the unseen blocks) tells ways apart that luck with the
words does not.
"""

import argparse
import copy
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from benchmarks.cached_students import exact, mean_kl, train
from benchmarks.small_lm import mean_nats
from compress.export.common.source import Source
from compress.export.pytorch.torchao import export_torchao
from compress.quantize.config import QuantizeConfig
from compress.quantize.gptq import gptq_model
from compress.quantize.prepare import Rounding, convert
from compress.quantize.rounding import quantize_model
from distill.data.batches.batches import TrainBatches
from distill.data.batches.token_blocks import LanguageBlocks
from distill.losses.config import LossConfig
from distill.teacher.online import OnlineTeacher
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from pipelines.runs.console import Console

BATCH = 8
CALIBRATED = 64  # blocks of text
COMPARED = 50  # blocks whose distributions are compared
Way = Callable[[LlamaForCausalLM, "Text"], Rounding]


class Text:
    """The blocks that ways may see, and how they train on them."""

    def __init__(self, given: argparse.Namespace, console: Console):
        blocks = np.load(Path(given.lm) / "train.npy").astype(np.int64)
        self.calibration = [
            {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            for ids in torch.from_numpy(blocks[:CALIBRATED]).split(BATCH)
        ]
        self.training = LanguageBlocks(list(blocks[CALIBRATED : CALIBRATED + given.steps * BATCH]))
        self.steps, self.rate, self.console = given.steps, given.rate, console


def calibrated(model: LlamaForCausalLM, scheme: str, weights: Any, text: Text) -> None:
    quantize_model(model, QuantizeConfig(scheme=scheme, weights=weights), text.calibration)
    if weights == "gptq":
        gptq_model(model, text.calibration)


def rounded(scheme: str, weights: Any = "nearest") -> Way:
    def way(model: LlamaForCausalLM, text: Text) -> Rounding:
        calibrated(model, scheme, weights, text)
        return convert(model)

    return way


def trained(scheme: str, weights: Any = "nearest") -> Way:
    """On the float model's answers, with weights as they will be deployed."""

    def way(model: LlamaForCausalLM, text: Text) -> Rounding:
        signals = exact(OnlineTeacher(copy.deepcopy(model).eval()))
        calibrated(model, scheme, weights, text)
        module = DistillationModule(model.train(), loss=LossConfig(kl=1, temperature=1), train=TrainConfig())
        batches = TrainBatches(text.training, BATCH, 0, seed=0, signals=signals)
        train([module], batches, text.steps, f"{scheme}: training", text.console, text.rate)
        return convert(model.eval())

    return way


WAYS: dict[str, Way] = {
    "int8-weights nearest": rounded("int8-weights"),
    "int8-dynamic nearest": rounded("int8-dynamic"),
    "fp8-weights nearest": rounded("fp8-weights"),
    "fp8-dynamic nearest": rounded("fp8-dynamic"),
    "int4-weights nearest": rounded("int4-weights"),
    "int4-weights AWQ": rounded("int4-weights", "awq"),
    "int4-weights GPTQ": rounded("int4-weights", "gptq"),
    "int4-weights trained": trained("int4-weights"),
    "int4-weights GPTQ, then trained": trained("int4-weights", "gptq"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm", default="runs/small-lm")
    parser.add_argument("--output", default="runs/quantized-lm")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--steps", type=int, default=300, help="of training in few bits")
    parser.add_argument("--rate", type=float, default=5e-5, help="of training in few bits")
    parser.add_argument("--blocks", type=int, default=200, help="of unseen text")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--reload", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    dev = np.load(Path(given.lm) / "dev.npy")[: given.blocks]
    if given.reload:
        print(json.dumps({"nats": mean_nats(LlamaForCausalLM.from_pretrained(given.reload), dev)}))
        return
    compare(given, dev)


def compare(given: argparse.Namespace, dev: np.ndarray) -> None:
    console, output = Console(), Path(given.output)
    output.mkdir(parents=True, exist_ok=True)
    plain = LlamaForCausalLM.from_pretrained(Path(given.lm) / "model").float().eval()
    tokenizer = AutoTokenizer.from_pretrained(Path(given.lm) / "model")
    text, float_nats = Text(given, console), mean_nats(plain, dev)
    rows = [("float", *perplexity(float_nats, float_nats), "", f"{weights_mb(Path(given.lm) / 'model'):.1f}", "")]
    for name in given.ways:
        model = copy.deepcopy(plain)
        rounding = WAYS[name](model, text)
        place = output / name.replace(",", "").replace(" ", "-")
        source = Source(model, tokenizer, rounding)
        export_torchao(source, place)
        here, there = mean_nats(source.reference, dev), reloaded(given, place)
        apart = mean_kl(source.reference, plain, dev[:COMPARED])
        sizes = f"{weights_mb(place):.1f}", f"{abs(there - here):.1e}"
        rows.append((name, *perplexity(there, float_nats), f"{apart:.5f}", *sizes))
        console.say(f"{name}: {there:.4f} nats, {float_nats:.4f} in float")
    header = ("way", "perplexity", "nats lost", "KL from float", "MB", "nats between processes")
    console.table(f"{len(dev)} unseen blocks of {dev.shape[1]} tokens", header, rows)
    (output / "table.json").write_text(json.dumps([dict(zip(header, row, strict=True)) for row in rows], indent=1))


def perplexity(nats: float, whole: float) -> tuple[str, str]:
    return f"{math.exp(nats):.2f}", f"{nats - whole:+.4f}"


def weights_mb(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6


def reloaded(given: argparse.Namespace, place: Path) -> float:
    """Nats of the checkpoint in a fresh process."""
    words = ["--lm", given.lm, "--blocks", str(given.blocks), "--threads", str(given.threads), "--reload", str(place)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.quantized_lm", *words], capture_output=True, text=True, check=True
    )
    return float(json.loads(done.stdout.splitlines()[-1])["nats"])


if __name__ == "__main__":
    main()
