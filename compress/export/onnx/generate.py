"""Exported language models with a key-value cache in ONNX Runtime: generation and perplexity.

This module doesn't need torch.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from compress.errors import CompressError
from compress.export.onnx.graph import ONNX_FILE, open_session

PAST, PRESENT = "past_key_values", "present"
Cache = dict[str, np.ndarray]  # input name -> [batch, heads, past, head width]
_RunStep = Callable[[dict[str, np.ndarray]], np.ndarray]


class OnnxDecoder:
    """Language model written by `export_decoder`, in ONNX Runtime; calling it returns logits, as in other runtimes.

    Args:
        folder: The artefact.
        threads: Of ONNX Runtime.
    """

    def __init__(self, folder: Path, threads: int):
        self.session = open_session(str(folder / ONNX_FILE), threads)
        self.names = ["input_ids", "attention_mask"]
        shapes = {value.name: value.shape for value in self.session.get_inputs() if value.name.startswith(PAST)}
        self.sizes = {name: (heads, width) for name, (_, heads, _, width) in shapes.items()}
        self.outputs = ["logits", *(name.replace(PAST, PRESENT) for name in self.sizes)]
        config, self.end_tokens = read_config(folder)
        self.max_length = config.get("max_position_embeddings") or config.get("n_positions")
        self.vocabulary_size = config.get("vocab_size")

    def __call__(self, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns logits [batch, length, vocabulary] of ids and mask, [batch, length] int64, padded on any side."""
        ids = inputs["input_ids"]
        return self.step(ids, inputs["attention_mask"], self.create_cache(len(ids)))[0]

    def create_cache(self, rows: int) -> Cache:
        """Returns a cache of no tokens."""
        return {name: np.zeros((rows, heads, 0, width), np.float32) for name, (heads, width) in self.sizes.items()}

    def step(self, ids: np.ndarray, mask: np.ndarray, past: Cache) -> tuple[np.ndarray, Cache]:
        """Processes further tokens.

        Args:
            ids: [batch, length] int64.
            mask: Of past and new tokens, 0 at padding: [batch, past + length] int64.
            past: Cache of the tokens before them.

        Returns:
            Logits of the new tokens, [batch, length, vocabulary], and the cache including them.
        """
        positions = np.maximum(mask.cumsum(1) - 1, 0)[:, -ids.shape[1] :]
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions} | past
        logits, *present = self.session.run(self.outputs, inputs)
        return logits, dict(zip(past, present, strict=True))

    def generate(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, temperature: float = 0.0, seed: int = 0
    ) -> list[list[int]]:
        """Continues each prompt, up to and including an end token, or by `new_tokens`.

        Args:
            prompts: Token ids, of any lengths.
            new_tokens: Largest number of new tokens.
            temperature: Tokens are sampled from softmax(logits / temperature); 0 is greedy.
            seed: Seed of the random streams; each prompt has its own, independent of
                other prompts; the same prompt again has another.

        Returns:
            The new tokens after each prompt.

        Raises:
            CompressError: There is no prompt, a prompt is empty or has ids outside the vocabulary, no new token is
                requested, the tokens exceed the model's positions, or the temperature is below 0.
        """
        self.check_arguments(prompts, new_tokens, temperature)
        ids, mask = pad_left(prompts)
        keys = [tuple(prompt) for prompt in prompts]
        streams = [np.random.default_rng([seed, keys[:i].count(key), *key]) for i, key in enumerate(keys)]
        new_ids: list[list[int]] = [[] for _ in prompts]
        rows, past = list(range(len(prompts))), self.create_cache(len(prompts))
        for _ in range(new_tokens):
            logits, past = self.step(ids, mask, past)
            tokens = [draw_token(row, temperature, streams[i]) for i, row in zip(rows, logits[:, -1], strict=True)]
            for i, token in zip(rows, tokens, strict=True):
                new_ids[i].append(token)
            unfinished = [i for i, token in enumerate(tokens) if token not in self.end_tokens]
            if not unfinished:
                break
            if len(unfinished) < len(rows):
                rows, mask = [rows[i] for i in unfinished], mask[unfinished]
                past = {name: value[unfinished] for name, value in past.items()}
            ids = np.asarray(tokens, np.int64)[unfinished, None]
            mask = np.pad(mask, ((0, 0), (0, 1)), constant_values=1)
        return new_ids

    def check_arguments(self, prompts: Sequence[Sequence[int]], new_tokens: int, temperature: float) -> None:
        """Checks the arguments of `generate`."""
        if not len(prompts) or new_tokens < 1 or temperature < 0:
            raise CompressError(
                f"generate: expected prompts, at least one new token and a temperature of 0 or more, found "
                f"{len(prompts)} prompts, {new_tokens} tokens and {temperature}"
            )
        for number, prompt in enumerate(prompts):
            if not len(prompt):
                raise CompressError(f"generate: prompt {number} has no token: there is nothing to continue")
            if self.vocabulary_size and not 0 <= min(prompt) <= max(prompt) < self.vocabulary_size:
                raise CompressError(
                    f"generate: prompt {number}: expected ids from 0 to {self.vocabulary_size - 1}, found "
                    f"{min(prompt)} to {max(prompt)}: they are of another tokenizer than the model's"
                )
        longest = max(map(len, prompts)) + new_tokens
        if self.max_length and longest > self.max_length:
            raise CompressError(
                f"generate: the longest prompt and {new_tokens} new tokens are {longest}, and the model has "
                f"{self.max_length} positions: it wasn't trained on longer texts"
            )


def read_config(folder: Path) -> tuple[dict[str, Any], set[int]]:
    """Returns the content of config.json and the end tokens.

    The end tokens are read from generation_config.json, or from config.json if there is no such file, as in `generate`
    of transformers.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    file = folder / "generation_config.json"
    settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else config
    ends = settings.get("eos_token_id")
    return config, set(ends if isinstance(ends, list) else [] if ends is None else [ends])


def pad_left(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns (ids, mask), int64 [batch, length] each; every prompt ends in the last column."""
    width = max(map(len, prompts))
    ids, mask = np.zeros((len(prompts), width), np.int64), np.zeros((len(prompts), width), np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = prompt, 1
    return ids, mask


def draw_token(logits: np.ndarray, temperature: float, stream: np.random.Generator) -> int:
    """Returns the most likely of [vocabulary] tokens, or a Gumbel sample from softmax(logits / temperature)."""
    if not temperature:
        return int(logits.argmax())
    return int((logits / temperature + stream.gumbel(size=len(logits))).argmax())


def compute_perplexity(model: _RunStep, blocks: Sequence[np.ndarray], batch: int = 8) -> float:
    """Returns exp of the mean negative log-likelihood, in nats, of every token but each block's first.

    Args:
        model: Maps input_ids and attention_mask, each [batch, length] int64, padded on the right, to logits [batch,
            length, vocabulary].
        blocks: Token ids, int64 [length] each.
        batch: Blocks per batch.

    Raises:
        CompressError: No block has a second token.
    """
    nats, count = 0.0, 0
    for start in range(0, len(blocks), batch):
        rows = blocks[start : start + batch]
        lengths = np.asarray([len(row) for row in rows])
        mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)
        ids = np.zeros_like(mask)
        ids[mask.astype(bool)] = np.concatenate(rows)
        for row, logits in zip(rows, model({"input_ids": ids, "attention_mask": mask}), strict=True):
            each = logits[: len(row) - 1].astype(np.float64)
            each -= each.max(-1, keepdims=True)
            nats += float((np.log(np.exp(each).sum(-1)) - each[np.arange(len(each)), row[1:]]).sum())
            count += len(each)
    if not count:
        raise CompressError("perplexity: expected blocks of at least two tokens, found none: no token is predicted")
    return float(np.exp(nats / count))
