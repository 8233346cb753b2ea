"""Trains a small decoder and its tokenizer from scratch, for benchmarks where no language model can be downloaded.

    python -m benchmarks.tasks.small_lm --config benchmarks/tasks/small-lm.yaml --output runs/small-lm

Run the same command again to resume after a kill. The data is a folder with train.parquet and dev.parquet, each with a
column `text`, or any other data that `pipelines.distill` reads as plain text, a tenth of which is then held out as dev.
Matrix products are in bfloat16, weights and optimizer in float32. Written are the tokenizer, the token blocks
(`train.npy`, `dev.npy`) and the model; printed is the cross-entropy on 400 blocks of dev in nats per token.
"""

import argparse
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.common.results_folder import check_settings
from distill.data.config import DataConfig
from distill.data.rows.documents import load_documents
from pipelines.runs import cli
from pipelines.runs.console import Console

END = "<|end|>"
CHUNK = 512  # positions whose logits exist at once
SAVE_EVERY = 200


@dataclass(frozen=True)
class SmallLM:
    """Settings of the model and its training.

    Args:
        data: Folder with train.parquet and dev.parquet, or another data set of plain text.
        output: Folder for the tokenizer, the checkpoint and the model.
        vocabulary: Entries of the byte-level BPE.
        length: Tokens per sequence.
        layers: Decoder layers.
        hidden: Width.
        heads: Attention heads.
        ffn: Width of the gated feed-forward.
        steps: Steps of the optimizer.
        batch_size: Sequences per step.
        learning_rate: Peak of the cosine schedule.
        threads: CPU threads; 0 takes torch's default.
        seed: Seed of weights and order.
        device: Where the model is trained.
    """

    data: str
    output: str = "runs/small-lm"
    vocabulary: int = 32768
    length: int = 256
    layers: int = 6
    hidden: int = 256
    heads: int = 4
    ffn: int = 704
    steps: int = 3200
    batch_size: int = 8
    learning_rate: float = 2e-3
    threads: int = 0
    seed: int = 0
    device: str = "cpu"


def main(argv: Sequence[str]) -> None:
    """Trains the tokenizer and the model, as far as they aren't finished, and prints the loss on dev."""
    settings = cli.parse(
        SmallLM,
        argv,
        prog="benchmarks.tasks.small_lm",
        about="Train a small decoder and its tokenizer from scratch.",
        examples="  python -m benchmarks.tasks.small_lm --config benchmarks/tasks/small-lm.yaml",
        short={},
    )
    if settings.threads:
        torch.set_num_threads(settings.threads)
    output, console = Path(settings.output), Console()
    check_settings(output, argparse.Namespace(**asdict(settings)), free=("threads", "device"))
    tokenizer = build_tokenizer(settings, output, console)
    blocks = {name: build_blocks(settings, tokenizer, output, name) for name in ("train", "dev")}
    console.say(f"{len(blocks['train']):,} training sequences of {settings.length} tokens")
    torch.manual_seed(settings.seed)
    model = LlamaForCausalLM(build_config(settings, tokenizer)).to(settings.device)
    train_model(settings, model, blocks["train"], output, console)
    dev = blocks["dev"][:400]
    console.say(f"dev: {measure_nats(model, dev):.4f} nats per token on {dev.size:,} tokens")
    model.save_pretrained(output / "model")
    tokenizer.save_pretrained(output / "model")


def read_texts(settings: SmallLM, name: str) -> Iterator[str]:
    """Yields the texts of a split."""
    file = Path(settings.data) / f"{name}.parquet"
    if not file.is_file():
        splits = load_documents(DataConfig(path=settings.data), settings.seed)
        yield from (splits.train if name == "train" else splits.validation).texts
        return
    for batch in pq.ParquetFile(file).iter_batches(8, columns=["text"]):
        yield from batch["text"].to_pylist()


def build_tokenizer(settings: SmallLM, output: Path, console: Console) -> PreTrainedTokenizerFast:
    """Returns the tokenizer of the output folder, which is trained on the texts if there is none."""
    file = output / "tokenizer.json"
    if not file.exists():
        console.say("training the tokenizer")
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=settings.vocabulary,
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        bpe.train_from_iterator(read_texts(settings, "train"), trainer)
        bpe.save(str(file))
    return PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token=END, bos_token=END, pad_token=END)


def build_blocks(settings: SmallLM, tokenizer: PreTrainedTokenizerFast, output: Path, name: str) -> np.ndarray:
    """Returns all texts concatenated, with END between them, in rows [sequences, length] int32."""
    file = output / f"{name}.npy"
    if not file.exists():
        end = [tokenizer.eos_token_id]
        ids = np.concatenate(
            [np.asarray(tokenizer.encode(text) + end, np.int32) for text in read_texts(settings, name)]
        )
        np.save(file, ids[: len(ids) // settings.length * settings.length].reshape(-1, settings.length))
    blocks: np.ndarray = np.load(file)
    return blocks


def build_config(settings: SmallLM, tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """Returns the configuration of the model."""
    return LlamaConfig(
        vocab_size=settings.vocabulary,
        hidden_size=settings.hidden,
        intermediate_size=settings.ffn,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        max_position_embeddings=2 * settings.length,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def train_model(settings: SmallLM, model: LlamaForCausalLM, blocks: np.ndarray, output: Path, console: Console) -> None:
    """Trains the model, resuming from the last checkpoint in the output folder."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    scales = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": scales, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=True)
    file, start = output / "checkpoint.pt", 0
    if file.exists():
        saved = torch.load(file, weights_only=True, map_location=settings.device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    order = np.random.default_rng(settings.seed).permutation(len(blocks))
    model.train()
    step_losses: list[float] = []
    with console.track("small-lm: training", settings.steps - start) as advance:
        for step in range(start, settings.steps):
            rows = order[np.arange(step * settings.batch_size, (step + 1) * settings.batch_size) % len(order)]
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * schedule_rate(step, settings.steps)
            step_losses.append(accumulate_gradients(model, torch.from_numpy(blocks[rows]).long().to(model.device)))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            advance(1)
            if (step + 1) % SAVE_EVERY == 0:
                save = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                torch.save(save, file.with_suffix(".partial"))
                file.with_suffix(".partial").replace(file)
                console.say(f"step {step + 1}: {np.mean(step_losses[-SAVE_EVERY:]):.4f} nats per token")


def schedule_rate(step: int, steps: int) -> float:
    """Returns the factor of the learning rate: warm-up over 1/20 of the steps, then a cosine to a tenth."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / (steps - warmup))


def accumulate_gradients(model: LlamaForCausalLM, ids: Tensor) -> float:
    """Adds the gradients of the mean next-token loss to the parameters, and returns the loss in nats."""
    with torch.autocast(ids.device.type, torch.bfloat16):
        hidden = model.model(ids).last_hidden_state[:, :-1].flatten(0, 1)
    loss, hidden_grad, head_grad = compute_head_gradients(
        hidden.detach(), model.lm_head.weight.detach(), ids[:, 1:].flatten()
    )
    hidden.backward(hidden_grad.to(hidden.dtype))
    model.lm_head.weight.grad += head_grad
    return loss


def compute_head_gradients(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[float, Tensor, Tensor]:
    """Returns the loss and the gradients of hidden states and output head, computed in chunks of positions.

    Autograd would hold the logits of all positions three times.
    """
    low, hidden_grad = weight.bfloat16(), torch.empty(hidden.shape, device=hidden.device)
    weight_grad, total = torch.zeros_like(weight), torch.zeros((), device=hidden.device)
    for start in range(0, len(hidden), CHUNK):
        part, targets = hidden[start : start + CHUNK].bfloat16(), labels[start : start + CHUNK, None]
        error = torch.softmax(part @ low.T, -1)
        chosen = error.gather(1, targets)
        total -= chosen.float().clamp(min=1e-9).log().sum()
        error.scatter_(1, targets, chosen - 1)
        hidden_grad[start : start + CHUNK] = error @ low
        weight_grad += error.T @ part
    return total.item() / len(hidden), hidden_grad / len(hidden), weight_grad / len(hidden)


@torch.inference_mode()
def measure_nats(model: PreTrainedModel, blocks: np.ndarray) -> float:
    """Returns the mean next-token loss in float32, in nats per token; blocks [blocks, length]."""
    model.eval()
    losses = []
    for start in range(0, len(blocks), 4):
        ids = torch.from_numpy(blocks[start : start + 4]).long().to(model.device)
        logits = model(ids).logits[:, :-1].flatten(0, 1)
        losses.append(torch.nn.functional.cross_entropy(logits.float(), ids[:, 1:].flatten(), reduction="none"))
    return torch.cat(losses).mean().item()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    cli.run(main)
