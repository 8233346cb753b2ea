"""Export of language models as ONNX with a key-value cache, and verification that they generate the same tokens.

One graph processes a prompt and continues it: `past_key_values.N.key` and `.value` [batch, heads, past, head width] may
have no tokens, and `present.N.key` and `.value` hold past and new tokens. The names are those of Optimum, ONNX Runtime
GenAI and transformers.js. Tokens outside a layer's sliding window are masked but stay in the cache.
"""

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from compress.errors import ExportError
from compress.export.common.huggingface import TorchModel
from compress.export.common.targets import FORMATS
from compress.export.onnx.generate import PAST, PRESENT, OnnxDecoder, compute_perplexity
from compress.export.onnx.graph import ONNX_FILE, write_graph

_INPUTS = ("input_ids", "attention_mask", "position_ids")
BATCH, LENGTH, SEEN = 2, 3, 5  # example sizes: torch.export would specialise to sizes 0 and 1, and to equal sizes
CHANGING = ("dynamic", "longrope")  # rotary types whose angles depend on the longest position so far


def export_decoder(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes `folder/model.onnx` in float32, and the tokenizer, config and generation config beside it.

    Inputs are input_ids and position_ids [batch, length], attention_mask [batch, past + length], int64, and the cache,
    float32. Outputs are logits [batch, length, vocabulary] and the cache including the new tokens. The number of heads
    may differ between layers, as in a pruned model; the shapes of the file's inputs show it, and runtimes that read a
    single number of heads from config.json can't run such a file.

    Args:
        model: A causal language model in float32.
        tokenizer: Its tokenizer.
        folder: Where to write; created when missing.

    Raises:
        ExportError: The model isn't a causal language model, its weights aren't all finite, its cache isn't one of
            keys and values, it takes no positions, its rotary angles change with the length, or PyTorch can't express
            it in ONNX.
    """
    check_decoder(model)
    with eager_attention(model.eval()):
        sizes = cache_sizes(model)
        cache = [torch.zeros(BATCH, heads, SEEN, width) for heads, width in sizes]
        tokens = torch.ones(BATCH, LENGTH, dtype=torch.int64)
        mask = torch.ones(BATCH, SEEN + LENGTH, dtype=torch.int64)
        batch, length, past, total = (torch.export.Dim(name) for name in ("batch", "length", "past", "total"))
        read, whole, seen = {0: batch, 1: length}, {0: batch, 1: total}, {0: batch, 2: past}
        cache_names = [f"{number}.{kind}" for number in range(len(sizes) // 2) for kind in ("key", "value")]
        folder.mkdir(parents=True, exist_ok=True)
        write_graph(
            Step(model),
            (tokens, mask, tokens - 1, *cache),
            {"tensors": (read, whole, read, *(seen for _ in cache))},
            [*_INPUTS, *(f"{PAST}.{each}" for each in cache_names)],
            ["logits", *(f"{PRESENT}.{each}" for each in cache_names)],
            folder / ONNX_FILE,
        )
    save_prompt_tokenizer(tokenizer, folder)
    model.config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


def save_prompt_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes the tokenizer so that it neither truncates nor pads prompts, whatever it did before."""
    unlimited = copy.deepcopy(tokenizer)
    if unlimited.is_fast:
        unlimited.backend_tokenizer.no_truncation()
        unlimited.backend_tokenizer.no_padding()
    unlimited.save_pretrained(folder)


class Step(nn.Module):
    """A model as a function of plain tensors: ids, mask, positions, and the keys and values of each layer."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Returns the logits and the new keys and values of the tokens, from the graph's inputs in order."""
        count = len(_INPUTS)
        inputs, cache = dict(zip(_INPUTS, tensors[:count], strict=True)), filled_cache(tensors[count:])
        logits = self.model(**inputs, past_key_values=cache, use_cache=True).logits
        return logits, *list_cache_values(cache)


def list_cache_values(cache: Any) -> list[Tensor]:
    """Returns keys and values of each layer, alternating."""
    return [value for layer in cache.layers for value in (layer.keys, layer.values)]


def filled_cache(past: Sequence[Tensor]) -> DynamicCache:
    """Returns a cache of alternating keys and values that keeps all tokens.

    A sliding-window cache would drop tokens by a count that tracing fixes.
    """
    cache: Any = DynamicCache()
    for keys, values in zip(past[::2], past[1::2], strict=True):
        layer: Any = DynamicLayer()
        layer.keys, layer.values, layer.dtype, layer.device = keys, values, keys.dtype, keys.device
        layer.is_initialized = True
        cache.layers.append(layer)
    result: DynamicCache = cache
    return result


@contextmanager
def eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """Uses eager attention inside the block: every family supports it, and it gives padding finite values."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before or "eager")


@torch.no_grad()
def cache_sizes(model: PreTrainedModel) -> list[tuple[int, int]]:
    """Returns (heads, head width) of the keys and values of each layer, alternating, found by running the model.

    Raises:
        ExportError: The model fills no such cache, or isn't causal.
    """
    cache: Any = DynamicCache()
    ids = torch.tensor([[0, 0, 0], [0, 0, 1]])
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache, use_cache=True).logits
    one, other = logits[:, :2]
    if not torch.allclose(one, other, rtol=1e-3, atol=1e-3):
        raise build_rejection(model, "it reads tokens that come later, as an encoder does")
    cache_values = list_cache_values(cache)
    if not cache_values or any(value is None or value.dim() != 4 or value.shape[2] != LENGTH for value in cache_values):
        raise build_rejection(model, "it doesn't keep keys and values of every token in every layer")
    return [(value.shape[1], value.shape[3]) for value in cache_values]


def check_decoder(model: PreTrainedModel) -> None:
    """Checks that a graph can hold the model's cache and that its weights are finite float32.

    Raises:
        ExportError: The model isn't a decoder, a graph can't hold its cache, or its weights aren't finite float32.
    """
    config: Any = model.config
    if config.is_encoder_decoder or not model.can_generate():
        raise build_rejection(model, "it isn't a decoder with a head for the next token, such as LlamaForCausalLM")
    kinds = {type(layer) for layer in DynamicCache(config=config).layers} - {DynamicLayer, DynamicSlidingWindowLayer}
    if kinds or getattr(config, "attention_chunk_size", None):
        names = ", ".join(sorted(kind.__name__ for kind in kinds)) or "chunks"
        raise build_rejection(model, f"its layers keep {names} between tokens, and not keys and values of each")
    turning = sorted(set(rope_types(getattr(config, "rope_parameters", None))).intersection(CHANGING))
    if turning:
        raise build_rejection(
            model, f"its rotary angles ({turning[0]}) change with the length: those of the example would be kept"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise build_rejection(model, "it takes no positions, and would count padding among them")
    wrong = sorted({str(value.dtype) for value in model.parameters()} - {"torch.float32"})
    if wrong:
        raise build_rejection(
            model, f"expected weights in float32, found {', '.join(wrong)}; model.float() makes them so"
        )
    broken = [name for name, value in model.named_parameters() if not value.isfinite().all()]
    if broken:
        raise build_rejection(
            model, f"{broken[0]} and {len(broken) - 1} other weights hold NaN or infinity: so would all logits"
        )


def rope_types(settings: Any) -> list[str]:
    """Returns the rotary types in a config's `rope_parameters`, given for all layers or per layer type."""
    if not isinstance(settings, dict):
        return []
    types = [settings["rope_type"]] if "rope_type" in settings else []
    return types + [kind for part in settings.values() for kind in rope_types(part)]


def build_rejection(model: PreTrainedModel, why: str) -> ExportError:
    """Returns the error for a model that can't be exported with a cache."""
    return ExportError(f"onnx: {type(model).__name__} can't be exported with a cache: {why}")


@dataclass(frozen=True)
class DecoderParity:
    """Agreement of an exported language model with the model it was made from.

    Args:
        tokens: Tokens that the model generated after the prompts.
        max_difference: Of logits on the blocks, absolute.
        perplexity: Of the blocks in ONNX Runtime.
        model_perplexity: The same in PyTorch.
    """

    tokens: int
    max_difference: float
    perplexity: float
    model_perplexity: float


def verify_decoder(
    model: PreTrainedModel,
    folder: Path,
    prompts: Sequence[Sequence[int]],
    blocks: Sequence[np.ndarray],
    *,
    new_tokens: int = 100,
    threads: int = 1,
) -> DecoderParity:
    """Compares the result of `export_decoder` with the model, in this process.

    Args:
        model: The model.
        folder: The artefact.
        prompts: Token ids; the artefact continues all of them in one batch, the model each alone.
        blocks: Token ids, int64 [length] each.
        new_tokens: Largest number of tokens to generate, greedily.
        threads: Of ONNX Runtime.

    Raises:
        ExportError: The artefact generates other tokens, or its logits differ by more than rounding of float32.
    """
    decoder, reference = OnnxDecoder(folder, threads), TorchModel.of(model)
    written = decoder.generate(prompts, new_tokens)
    expected = [generate_reference(model, prompt, new_tokens) for prompt in prompts]
    for number, (tokens, expected_tokens) in enumerate(zip(written, expected, strict=True)):
        if tokens != expected_tokens:
            position = next(
                (i for i, pair in enumerate(zip(tokens, expected_tokens, strict=False)) if len(set(pair)) > 1),
                min(len(tokens), len(expected_tokens)),
            )
            raise ExportError(
                f"onnx: {folder} generates other tokens than the model: after prompt {number} they differ from token "
                f"{position} on, found {tokens[-3:]} at its end, expected {expected_tokens[-3:]}"
            )
    difference = max_difference(decoder, reference, blocks)
    tolerance = FORMATS["onnx"].tolerance
    if not difference <= tolerance:  # also catches NaN
        raise ExportError(
            f"onnx: {folder} has other logits than the model: largest difference {difference:.2e}, expected at most "
            f"{tolerance:.0e}: generated text would change"
        )
    return DecoderParity(
        sum(map(len, expected)), difference, compute_perplexity(decoder, blocks), compute_perplexity(reference, blocks)
    )


def max_difference(decoder: OnnxDecoder, reference: TorchModel, blocks: Sequence[np.ndarray]) -> float:
    """Returns the largest difference of logits, computed block by block."""
    differences = [0.0]
    for block in blocks:
        inputs = {"input_ids": block[None], "attention_mask": np.ones_like(block[None])}
        differences.append(float(np.abs(decoder(inputs) - reference(inputs)).max()))
    return float(np.max(differences))


@torch.inference_mode()
def generate_reference(model: PreTrainedModel, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """Returns the greedy continuation of a prompt by the model's own `generate`, up to and including the end token.

    The checkpoint's generation settings, such as a repetition penalty, are ignored, because a graph doesn't have them.
    """
    settings: Any = model.generation_config
    ids = torch.tensor([list(prompt)])
    model.generation_config = GenerationConfig(eos_token_id=settings.eos_token_id)
    try:
        out = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=model.config.pad_token_id or 0,
        )
    finally:
        model.generation_config = settings
    result: list[int] = out[0, len(prompt) :].tolist()
    return result
