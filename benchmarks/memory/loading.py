"""Memory and time from text on disk to a training step of a causal language model.

    python -m benchmarks.memory.loading  # 20 million made-up rows, about 4 GB; takes an hour on 2 cores
    python -m benchmarks.memory.loading --rows 20000 --steps 4

A parquet file of random words is read, split, tokenized and trained on by the stages of a run, in a process of its own:
`first start` up to the first batch, and again in the same output, `second start`. Its peak is VmHWM, mapped pages of
files included. Tokenization alone is timed with 1 and 2 processes in turns, and the medians are printed; beside them
is the time that as many processes of the tokenizers library alone take for the same tokens, from the median rate of one
on the first rows after a first call that isn't timed, and the time to read the file's bytes. The share of waiting is
that of the training steps, of a decoder with random weights. Times on a busy machine mean nothing.
"""

import argparse
import filecmp
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.common.machine import describe_setup
from benchmarks.common.timing import median_ratio
from compress.measure.memory import read_peak_memory
from compress.measure.turns import time_in_turns
from distill.checkpoint.tokenizer import load_tokenizer
from distill.data.batches.data_module import TextDataModule
from distill.data.config import DataConfig
from distill.data.sources import text_batches
from distill.data.sources.stored_texts import StoredTexts
from distill.data.stored.tokens import ENDS, HEADER, IDS, write_tokens
from distill.data.stored.worker import encode_texts, load_rules
from distill.losses.config import LossConfig
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from distill.train.optimizer import build_optimizer
from pipelines.runs.console import Console
from pipelines.runs.stage import Run
from pipelines.stages.prepare.data import data_stage, read_data, read_task
from pipelines.stages.prepare.tokens import SplitEncoder

WORDS, WORDS_PER_ROW = 30_000, (20, 44)  # different words; fewest and most of a row
ROWS_AT_ONCE, SAMPLE, LENGTH = 4096, 8192, 128


def main() -> None:
    """Measures all and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--steps", type=int, default=50, help="timed training steps")
    parser.add_argument("--rounds", type=int, default=1, help="tokenizations with 1 and with 2 processes; 0: none")
    parser.add_argument("--width", type=int, default=128, help="of the decoder")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=16_000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where the text is written, 4 times its size; default: temporary")
    parser.add_argument("--start", action="store_true", help=argparse.SUPPRESS)  # the process that is measured
    options = parser.parse_args()
    if options.start:
        print(json.dumps(start_training(options)))
        return
    console = Console()
    console.say(f"{describe_setup()}, {options.threads} threads")
    with TemporaryDirectory(dir=options.folder) as directory:
        options.folder = Path(directory)
        text = StoredTexts.write(options.folder / "text.parquet", generate_texts(options.rows))
        train_tokenizer(islice(text, SAMPLE), options.vocabulary).save_pretrained(options.folder / "tokenizer")
        if options.rounds:
            report_tokenization(console, options, text)
        report_starts(console, options)


def generate_texts(rows: int) -> Iterator[str]:
    """Yields rows of random words, the first of which are the most frequent."""
    rng = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = np.array(["".join(rng.choice(letters, size)) for size in rng.integers(2, 10, WORDS)])
    for first in range(0, rows, ROWS_AT_ONCE):
        sizes = rng.integers(*WORDS_PER_ROW, min(ROWS_AT_ONCE, rows - first))
        drawn = words[(WORDS * rng.random(int(sizes.sum())) ** 3).astype(int)]
        for part in np.split(drawn, np.cumsum(sizes)[:-1]):
            yield " ".join(part.tolist())


def train_tokenizer(texts: Iterator[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")  # noqa: S106 - no password


def report_tokenization(console: Console, options: argparse.Namespace, text: StoredTexts) -> None:
    """Prints the seconds of tokenization with 1 and 2 processes, beside those of the tokenizers library alone."""
    tokenizer = load_tokenizer(options.folder / "tokenizer")

    def tokenize(processes: int) -> None:
        folder = options.folder / f"tokens-{processes}"
        folder.mkdir(exist_ok=True)
        write_tokens(folder, tokenizer, iter(text), processes=processes)

    times = time_in_turns({"1": lambda: tokenize(1), "2": lambda: tokenize(2)}, options.rounds, warmup=0)
    header = json.loads((options.folder / "tokens-1" / HEADER).read_text())
    files = [[options.folder / f"tokens-{count}" / name for count in (1, 2)] for name in (IDS, ENDS, HEADER)]
    same = all(filecmp.cmp(*pair, shallow=False) for pair in files)
    rate = measure_rate(tokenizer, text, options.rounds)
    size = text.file.stat().st_size
    console.table(
        f"Tokenization of {options.rows:,} rows: {header['tokens']:,} tokens, {size / 1e6:,.0f} MB of parquet",
        ("processes", "seconds", "times as fast as 1", "seconds of the library alone"),
        [
            (name, f"{statistics.median(times[name]):.1f}", f"{median_ratio(times['1'], times[name]):.2f}",
             f"{header['tokens'] / rate / int(name):.1f}")
            for name in times
        ],
    )  # fmt: skip
    equal = "the same bytes" if same else "DIFFERENT bytes"
    console.say(f"One process tokenizes {rate:,.0f} tokens/s; 1 and 2 processes wrote {equal}")
    console.say(f"Reading the file's bytes takes {measure_reading(text.file):.2f} s")


def measure_rate(tokenizer: PreTrainedTokenizerFast, text: StoredTexts, rounds: int) -> float:
    """Returns the median tokens per second of the tokenizers library on one thread, on the first rows."""
    rules = load_rules(tokenizer.backend_tokenizer.to_str(), split_special_tokens=False)
    texts = list(islice(text, SAMPLE))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    ids, lengths = encode_texts(rules, texts)
    times = time_in_turns({"library": lambda: encode_texts(rules, texts)}, rounds, warmup=0)["library"]
    return (len(ids) + len(lengths)) / statistics.median(times)


def measure_reading(file: Path) -> float:
    """Returns the seconds in which the bytes of a file are read, from memory if the system still holds them."""
    start = time.perf_counter()
    with file.open("rb") as stream:
        while stream.read(1 << 20):
            pass
    return time.perf_counter() - start


def report_starts(console: Console, options: argparse.Namespace) -> None:
    """Prints seconds, peak memory and waiting of a first and of a second start."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.memory.loading",
        *sys.argv[1:],
        "--start",
        "--folder",
        str(options.folder),
    ]
    rows = []
    for name in ("first start", "second start"):
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603 - this script
        figures = json.loads(done.stdout.splitlines()[-1])
        rows.append(
            (name, f"{figures['seconds']:.1f}", f"{figures['peak'] / 1e6:,.0f}", f"{figures['before'] / 1e6:,.0f}",
             f"{figures['waiting']:.2%}")
        )  # fmt: skip
    console.table(
        "From text to trained steps",
        ("", "seconds to the first batch", "peak MB", "MB after imports", "of the steps waiting"),
        rows,
    )


def start_training(options: argparse.Namespace) -> dict[str, float]:
    """Returns the seconds to the first batch, the peak in bytes, and the share of the training steps spent waiting."""
    torch.set_num_threads(options.threads)
    text_batches.LARGE = 1  # so that few rows take the same way
    before, start = read_peak_memory(), time.perf_counter()
    run = Run(options.folder / "run", 0, Console())
    tokenizer = load_tokenizer(options.folder / "tokenizer")
    data = data_stage(run, DataConfig(str(options.folder / "text.parquet")), "causal-lm", {"packing": "stream"})
    encoder = SplitEncoder(run, read_task(data))
    texts = TextDataModule(
        read_data(data),
        tokenizer,
        encode=encoder.encode,
        encode_train=encoder.encode_train,
        batch_size=options.batch,
        max_length=LENGTH,
    )
    module, step = build_decoder(len(tokenizer), options.width), 0
    optimizer = build_optimizer(module.student, [], TrainConfig())
    loader = texts.train_dataloader()
    seconds = 0.0
    for step, batch in enumerate(islice(loader, options.steps + 1)):
        if step == 0:
            seconds = time.perf_counter() - start
            loader.waiting.measure_share()
        optimizer.zero_grad()
        loss = module.training_step(batch, step)
        assert loss is not None
        loss.backward()
        optimizer.step()
    return {"seconds": seconds, "before": before, "peak": read_peak_memory(), "waiting": loader.waiting.measure_share()}


def build_decoder(vocabulary: int, width: int) -> DistillationModule:
    """Returns a decoder with random weights that is trained on labels."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=2,
        num_attention_heads=max(1, width // 64),
        tie_word_embeddings=True,
        use_cache=False,
    )
    return DistillationModule(LlamaForCausalLM(config).train(), loss=LossConfig(kl=0, ce=1), train=TrainConfig())


if __name__ == "__main__":
    main()
