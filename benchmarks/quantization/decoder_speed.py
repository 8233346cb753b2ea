"""Time of a language model's next token, quantized, with a key-value cache on ONNX Runtime.

    python -m benchmarks.quantization.decoder_speed --width 1024 --layers 12

The decoder has random weights, which doesn't matter for time. Each scheme rounds them to nearest, and the file
`onnx-decoder` is written and opened as a user would. All files take turns to compute one token after a text of
`--length` tokens, a single text on one thread. Printed per file: megabytes, the median milliseconds of a token, how
many times as fast it is as in float32 and as `int8-dynamic`, and the milliseconds in which this machine's memory copies
as many bytes as the products' weights have, which reading them alone doesn't take.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from transformers import BertTokenizerFast, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.common.machine import describe_setup
from benchmarks.common.timing import COPYING, measure_copy_rate
from compress.export.common.source import Source
from compress.export.common.targets import ExportTarget, with_sources
from compress.export.onnx.generate import OnnxDecoder
from compress.export.write import write_target
from compress.measure.turns import time_in_turns
from compress.quantize.prepare import convert_quantized, find_lowest_precision, prepare_quantized
from compress.quantize.schemes import resolve_scheme
from pipelines.runs.console import Console
from pipelines.runs.files import count_bytes

FLOAT, EIGHT_BITS = "float32", "int8-dynamic"
DEFAULT = (EIGHT_BITS, "int8-groups", "int4-weights", "int4-groups")
HEADER = ("weights", "MB", "ms per token", "speed-up over float32", f"over {EIGHT_BITS}", COPYING)


def main() -> None:
    """Writes, opens and times all files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--schemes", nargs="+", choices=DEFAULT, default=list(DEFAULT))
    parser.add_argument("--length", type=int, default=128, help="tokens before the one that is timed")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with TemporaryDirectory() as directory:
        files = {FLOAT: write_decoder(options, "", Path(directory))}
        files |= {scheme: write_decoder(options, scheme, Path(directory)) for scheme in options.schemes}
        steps = {name: prepare_step(folder, options.length) for name, folder in files.items()}
        times = time_in_turns(steps, options.rounds, warmup=2)
        sizes = {name: count_bytes(folder) for name, folder in files.items()}
    milliseconds = {name: 1e3 * float(np.median(seconds)) for name, seconds in times.items()}
    eight_bits = milliseconds.get(EIGHT_BITS)
    rate = measure_copy_rate(torch.device("cpu"))
    rows = []
    for name, latency in milliseconds.items():
        copying = 1e3 * count_weight_bytes(options, name) / rate
        ratios = f"{milliseconds[FLOAT] / latency:.2f}", f"{eight_bits / latency:.2f}" if eight_bits else ""
        rows.append((name, f"{sizes[name] / 1e6:,.0f}", f"{latency:.2f}", *ratios, f"{copying:.2f}"))
    console = Console()
    console.table(f"{options.layers} layers of {options.width}, after {options.length} tokens", HEADER, rows)
    console.say(describe_setup())


def build_decoder(options: argparse.Namespace) -> PreTrainedModel:
    """Returns a decoder with random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": options.width, "intermediate_size": 4 * options.width, "num_hidden_layers": options.layers}
    heads = max(1, options.width // 64)
    config = LlamaConfig(**sizes, vocab_size=options.vocabulary, num_attention_heads=heads, num_key_value_heads=heads)
    return LlamaForCausalLM(config).eval()


def write_decoder(options: argparse.Namespace, scheme: str, folder: Path) -> Path:
    """Returns the folder with the decoder's file in a scheme; empty: in float32."""
    model = build_decoder(options)
    quantization = None
    if scheme:
        prepare_quantized(model, resolve_scheme(scheme))
        quantization = convert_quantized(model)
    tokenizer = BertTokenizerFast(vocab={"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4})
    source = Source(model, tokenizer, quantization)
    target = (
        ExportTarget("onnx-decoder", find_lowest_precision(quantization))
        if quantization
        else ExportTarget("onnx-decoder")
    )
    for each in with_sources([target]):
        write_target(source, each, folder / (scheme or FLOAT))
    return folder / (scheme or FLOAT) / str(target)


def prepare_step(folder: Path, length: int) -> Callable[[], object]:
    """Returns a function that computes a token after a text of `length` tokens."""
    decoder = OnnxDecoder(folder, threads=1)
    ids, mask = np.full((1, length), 7, np.int64), np.ones((1, length), np.int64)
    _, past = decoder.step(ids, mask, decoder.create_cache(1))
    return partial(decoder.step, ids[:, :1], np.ones((1, length + 1), np.int64), past)


def count_weight_bytes(options: argparse.Namespace, name: str) -> float:
    """Returns the bytes of the weights that a token's products read, without scales."""
    layer = 4 * options.width**2 + 3 * 4 * options.width**2
    bits = {"float32": 32, "int8": 8, "int4": 4}[name.partition("-")[0]]
    return bits / 8 * (options.layers * layer + options.width * options.vocabulary)


if __name__ == "__main__":
    main()
