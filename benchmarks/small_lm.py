"""Trains a small decoder and its tokenizer from nothing, to have a real language model where none can be downloaded.

    python -m benchmarks.small_lm --config configs/small-lm.yaml --output runs/small-lm

Run the same command again to go on after a kill. The data is a folder with train.parquet and dev.parquet, each with a
column `text`. Products are in bfloat16, weights and optimizer in float32.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pipelines.runs import cli
from pipelines.runs.console import Console

END = "<|end|>"
CHUNK = 512  # positions whose logits exist at once
SAVE_EVERY = 200


@dataclass(frozen=True)
class SmallLM:
    """Settings of the model and its training.

    Args:
        data: Folder with train.parquet and dev.parquet.
        output: Where tokenizer, checkpoint and model go.
        vocabulary: Entries of the byte-level BPE.
        length: Tokens a sequence.
        layers: Decoder layers.
        hidden: Width.
        heads: Attention heads.
        ffn: Width of the gated feed-forward.
        steps: Steps of the optimizer.
        batch_size: Sequences a step.
        learning_rate: Peak of the cosine schedule.
        threads: CPU threads; 0 takes torch's default.
        seed: Seed of weights and order.
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


def main(argv: Sequence[str]) -> None:
    given = cli.parse(
        SmallLM,
        argv,
        prog="benchmarks.small_lm",
        about="Trains a small decoder and its tokenizer from nothing.",
        examples="  python -m benchmarks.small_lm --config configs/small-lm.yaml",
        short={},
    )
    if given.threads:
        torch.set_num_threads(given.threads)
    output, console = Path(given.output), Console()
    output.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(given, output, console)
    blocks = {name: token_blocks(given, tokenizer, output, name) for name in ("train", "dev")}
    console.say(f"{len(blocks['train']):,} training sequences of {given.length} tokens")
    torch.manual_seed(given.seed)
    model = LlamaForCausalLM(model_config(given, tokenizer))
    train(given, model, blocks["train"], output, console)
    console.say(f"dev: {mean_nats(model, blocks['dev'][:400]):.4f} nats a token on {400 * given.length:,} tokens")
    model.save_pretrained(output / "model")
    tokenizer.save_pretrained(output / "model")


def texts(given: SmallLM, name: str) -> Iterator[str]:
    for batch in pq.ParquetFile(Path(given.data) / f"{name}.parquet").iter_batches(8, columns=["text"]):
        yield from batch["text"].to_pylist()


def make_tokenizer(given: SmallLM, output: Path, console: Console) -> PreTrainedTokenizerFast:
    file = output / "tokenizer.json"
    if not file.exists():
        console.say("training the tokenizer")
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=given.vocabulary,
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        bpe.train_from_iterator(texts(given, "train"), trainer)
        bpe.save(str(file))
    return PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token=END, bos_token=END, pad_token=END)


def token_blocks(given: SmallLM, tokenizer: PreTrainedTokenizerFast, output: Path, name: str) -> np.ndarray:
    """All texts one after the other, END between them, cut into rows [sequences, length] int32."""
    file = output / f"{name}.npy"
    if not file.exists():
        end = [tokenizer.eos_token_id]
        ids = np.concatenate([np.asarray(tokenizer.encode(text) + end, np.int32) for text in texts(given, name)])
        np.save(file, ids[: len(ids) // given.length * given.length].reshape(-1, given.length))
    return np.load(file)


def model_config(given: SmallLM, tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=given.vocabulary,
        hidden_size=given.hidden,
        intermediate_size=given.ffn,
        num_hidden_layers=given.layers,
        num_attention_heads=given.heads,
        num_key_value_heads=given.heads,
        max_position_embeddings=2 * given.length,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def train(given: SmallLM, model: LlamaForCausalLM, blocks: np.ndarray, output: Path, console: Console) -> None:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    scales = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": scales, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=given.learning_rate, betas=(0.9, 0.95), fused=True)
    file, start = output / "checkpoint.pt", 0
    if file.exists():
        saved = torch.load(file, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    order = np.random.default_rng(given.seed).permutation(len(blocks))
    model.train()
    seen: list[float] = []
    with console.track("small-lm: training", given.steps - start) as advance:
        for step in range(start, given.steps):
            rows = order[np.arange(step * given.batch_size, (step + 1) * given.batch_size) % len(order)]
            for group in optimizer.param_groups:
                group["lr"] = given.learning_rate * rate(step, given.steps)
            seen.append(backward(model, torch.from_numpy(blocks[rows]).long()))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            advance(1)
            if (step + 1) % SAVE_EVERY == 0:
                save = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                torch.save(save, file.with_suffix(".partial"))
                file.with_suffix(".partial").replace(file)
                console.say(f"step {step + 1}: {np.mean(seen[-SAVE_EVERY:]):.4f} nats a token")


def rate(step: int, steps: int) -> float:
    """Warm-up over 1/20 of the steps, then a cosine to a tenth."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / (steps - warmup))


def backward(model: LlamaForCausalLM, ids: Tensor) -> float:
    """Adds the gradients of the mean next-token loss, and returns it in nats."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(ids).last_hidden_state[:, :-1].flatten(0, 1)
    loss, hidden_grad, head_grad = head_gradients(hidden.detach(), model.lm_head.weight.detach(), ids[:, 1:].flatten())
    hidden.backward(hidden_grad.to(hidden.dtype))
    model.lm_head.weight.grad += head_grad
    return loss


def head_gradients(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[float, Tensor, Tensor]:
    """Loss and gradients of the output head, a chunk of logits at a time: autograd would hold all of them, thrice."""
    low, out = weight.bfloat16(), torch.empty(hidden.shape)
    grad, total = torch.zeros_like(weight), 0.0
    for start in range(0, len(hidden), CHUNK):
        part, wanted = hidden[start : start + CHUNK].bfloat16(), labels[start : start + CHUNK, None]
        error = torch.softmax(part @ low.T, -1)
        chosen = error.gather(1, wanted)
        total -= chosen.float().clamp(min=1e-9).log().sum().item()
        error.scatter_(1, wanted, chosen - 1)
        out[start : start + CHUNK] = error @ low
        grad += error.T @ part
    return total / len(hidden), out / len(hidden), grad / len(hidden)


@torch.inference_mode()
def mean_nats(model: LlamaForCausalLM, blocks: np.ndarray) -> float:
    """Mean next-token loss in float32."""
    model.eval()
    losses = []
    for start in range(0, len(blocks), 4):
        ids = torch.from_numpy(blocks[start : start + 4]).long()
        logits = model(ids).logits[:, :-1].flatten(0, 1)
        losses.append(torch.nn.functional.cross_entropy(logits.float(), ids[:, 1:].flatten(), reduction="none"))
    return torch.cat(losses).mean().item()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    cli.run(main)
