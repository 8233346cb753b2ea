"""Tests ONNX decoders with a cache: they must match PyTorch however a prompt is split or padded."""

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from compress.errors import CompressError
from compress.export.onnx import graph as exporting
from compress.export.onnx.decoder import export_decoder, save_prompt_tokenizer, verify_decoder
from compress.export.onnx.generate import OnnxDecoder, compute_perplexity, draw_token
from compress.export.onnx.graph import ONNX_FILE, OPSET
from distill.checkpoint.custom_models import is_pruned
from distill.slicing import Shape, find_axes, prune
from support.commands import ROOT

WORDS, TOKENS, WINDOW = 200, 100, 8
SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": WORDS, "pad_token_id": 0}
IDS = {"bos_token_id": 1, "eos_token_id": None, "max_position_embeddings": 160}
GROUPED = {"num_key_value_heads": 2, "intermediate_size": 40, "head_dim": 12}
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

# name -> (stock class, config settings in addition to SIZES and IDS)
FAMILIES = {
    "qwen2": ("Qwen2ForCausalLM", GROUPED | {"tie_word_embeddings": True}),
    "gemma3": ("Gemma3ForCausalLM", GROUPED | SLIDING | {"query_pre_attn_scalar": 12}),
    "gpt2-pruned": ("GPT2LMHeadModel", {"n_inner": 40}),
    "llama": ("LlamaForCausalLM", GROUPED),
    "llama-pruned": ("LlamaForCausalLM", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", GROUPED),
    "gemma": ("GemmaForCausalLM", GROUPED),
    "gemma2": ("Gemma2ForCausalLM", GROUPED | SLIDING | {"query_pre_attn_scalar": 12}),
    "gpt2": ("GPT2LMHeadModel", {"n_inner": 40}),
    "mistral": ("MistralForCausalLM", GROUPED | {"sliding_window": WINDOW}),
}
TABLES, LAST = ("embed_tokens.weight", "wte.weight", "lm_head.weight"), ("model.norm.weight", "ln_f.weight")
SLOW = list(FAMILIES)[1:]  # similar to the families before them
ROUNDING = 5e-4  # tolerance on logits; PyTorch's own logits differ from float64 by up to 1.6e-4 here
RANDOM = np.random.default_rng(5)
PROMPTS = [RANDOM.integers(3, WORDS, length).tolist() for length in (4, 1, 17)]
BLOCKS = [RANDOM.integers(3, WORDS, length) for length in (40, 33, 2)]


@dataclass(frozen=True)
class Exported:
    model: PreTrainedModel
    folder: Path

    @functools.cached_property
    def decoder(self) -> OnnxDecoder:
        return OnnxDecoder(self.folder, threads=1)


def build(family: str, **changes: object) -> PreTrainedModel:
    """Builds a seeded float32 model that doesn't repeat a single token; `changes` override its config."""
    name, settings = FAMILIES[family]
    kind = getattr(transformers, name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = kind(kind.config_class(**(SIZES | IDS | settings | changes))).eval()
        for each, parameter in model.named_parameters():
            # The table needs small values, or a tied head would predict the current token as the most likely next one.
            table, last = (each.endswith(ends) for ends in (TABLES, LAST))
            centre = 10.0 if last else float(parameter.dim() == 1 and each.endswith("weight"))
            nn.init.normal_(parameter, centre, 0.05 if table else 0.5)
    if family.endswith("-pruned"):
        axes = find_axes(model)
        heads = next(axis for axis in axes if axis.kind == "heads")
        model = prune(model, axes, Shape((0, 1), {heads.name: torch.arange(1, heads.units)}))
        assert is_pruned(model)
    return model


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer that maps w7 to id 7, and so on."""
    words = {f"w{i}": i for i in range(3, WORDS)} | {"[UNK]": 0, "<bos>": 1, "<eos>": 2}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", eos_token="<eos>")


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    """`export(family)` -> a tiny model and its folder, exported once per family."""

    @functools.cache
    def write(family: str) -> Exported:
        artefact = Exported(build(family), tmp_path_factory.mktemp(family) / "onnx")
        export_decoder(artefact.model, word_tokenizer(), artefact.folder)
        return artefact

    return write


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in FAMILIES])
def exported(request: pytest.FixtureRequest, export) -> Exported:
    """The exported model of each family in turn."""
    return export(request.param)


@pytest.fixture
def qwen2(export) -> Exported:
    return export("qwen2")


@torch.no_grad()
def logits(model: PreTrainedModel, ids: list[int] | np.ndarray) -> np.ndarray:
    """Returns logits [length, vocabulary] of one sequence in a single pass, without cache or padding."""
    return model(torch.tensor([list(ids)]), use_cache=False).logits[0].numpy()


def greedy_tokens(model: PreTrainedModel, prompt: list[int], ends: tuple[int, ...] = ()) -> tuple[list[int], float]:
    """Returns up to TOKENS greedy tokens, one full pass each, and the smallest margin between the two best logits."""
    ids, margin = list(prompt), np.inf
    while len(ids) < len(prompt) + TOKENS and (len(ids) == len(prompt) or ids[-1] not in ends):
        last = logits(model, ids)[-1]
        second, first = np.sort(last)[-2:]
        margin = min(margin, first - second)
        ids.append(int(last.argmax()))
    return ids[len(prompt) :], float(margin)


def mask_of(lengths: list[int]) -> np.ndarray:
    """Returns the attention mask of left-padded sequences of these lengths, int64 [batch, length]."""
    return (np.arange(max(lengths)) >= max(lengths) - np.array(lengths)[:, None]).astype(np.int64)


# --- generation


def test_a_hundred_generated_tokens_match_pytorch_batched_and_alone(exported):
    expected = [greedy_tokens(exported.model, prompt) for prompt in PROMPTS]
    assert len({token for tokens, _ in expected for token in tokens}) > 12, (
        "the same tokens again and again prove little"
    )
    assert min(margin for _, margin in expected) > ROUNDING, "rounding could change the likeliest token"
    assert exported.decoder.generate(PROMPTS, TOKENS) == [tokens for tokens, _ in expected]
    for prompt, (tokens, _) in zip(PROMPTS, expected, strict=True):
        assert exported.decoder.generate([prompt], TOKENS) == [tokens]


def test_the_proof_passes_for_the_exported_model(exported):
    proof = verify_decoder(exported.model, exported.folder, PROMPTS, BLOCKS)
    assert proof.tokens == len(PROMPTS) * TOKENS
    assert proof.max_difference < ROUNDING
    assert proof.perplexity == pytest.approx(proof.model_perplexity, rel=1e-4)


@pytest.mark.parametrize("cuts", [(1,), (5,), (1, 2, 3), (20, 21), (7, 14)])
def test_a_prompt_processed_in_chunks_gives_the_logits_of_one_pass(exported, cuts):
    decoder, ids = exported.decoder, np.random.default_rng(0).integers(3, WORDS, (3, 22))
    mask = mask_of([22, 16, 2])
    cache, found = decoder.create_cache(3), []
    for start, end in zip((0, *cuts), (*cuts, 22), strict=True):
        part, cache = decoder.step(ids[:, start:end], mask[:, :end], cache)
        found.append(part)
    whole = np.concatenate(found, 1)
    assert np.isfinite(whole).all(), "what padding gives is kept in the cache, and NaN times 0 is NaN"
    for row, length in enumerate((22, 16, 2)):
        expected = logits(exported.model, ids[row, -length:])
        np.testing.assert_allclose(whole[row, -length:], expected, rtol=0, atol=ROUNDING)
    assert all(value.shape[2] == 22 for value in cache.values())


def test_padding_on_the_right_does_not_change_logits(exported):
    mask = mask_of([9, 3])[:, ::-1]
    ids = np.random.default_rng(1).integers(3, WORDS, mask.shape)
    batch_logits = exported.decoder({"input_ids": ids, "attention_mask": np.ascontiguousarray(mask)})
    for row, length in enumerate((9, 3)):
        np.testing.assert_allclose(
            batch_logits[row, :length], logits(exported.model, ids[row, :length]), rtol=0, atol=ROUNDING
        )


@pytest.mark.parametrize("family", [pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "gemma2")])
def test_a_sliding_window_changes_logits_only_beyond_its_size(export, family):
    narrow, wide = export(family), build(family, sliding_window=150)
    sequence = BLOCKS[0]
    difference = np.abs(logits(narrow.model, sequence) - logits(wide, sequence)).max(-1)
    assert difference[:WINDOW].max() < 1e-4 < 0.1 < difference[WINDOW:].max()


def test_each_text_stops_at_its_first_end_token(export):
    model, folder = build("qwen2"), export("qwen2").folder
    free = [greedy_tokens(model, prompt)[0] for prompt in PROMPTS]
    ends = (free[0][20], free[2][40])
    decoder = OnnxDecoder(folder, threads=1)
    decoder.end_tokens = set(ends)
    expected = [greedy_tokens(model, prompt, ends)[0] for prompt in PROMPTS]
    assert len({len(tokens) for tokens in expected}) > 1, "all texts end together"
    assert decoder.generate(PROMPTS, TOKENS) == expected
    assert {tokens[-1] for tokens in expected if len(tokens) < TOKENS} <= set(ends)


@pytest.mark.parametrize(
    ("generation_config", "config", "ends"),
    [
        ({"eos_token_id": 7}, {"eos_token_id": 9}, {7}),
        ({"eos_token_id": [7, 8]}, {}, {7, 8}),
        ({}, {"eos_token_id": 9}, set()),
        (None, {"eos_token_id": 9}, {9}),
        (None, {}, set()),
    ],
)
def test_end_tokens_come_from_the_generation_config_before_the_model_config(
    qwen2, tmp_path, generation_config, config, ends
):
    (tmp_path / ONNX_FILE).symlink_to(qwen2.folder / ONNX_FILE)
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation_config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
    assert OnnxDecoder(tmp_path, threads=1).end_tokens == ends


def test_drawn_tokens_follow_the_softmax_at_the_given_temperature():
    scores, stream = np.float32([2.0, 1.0, 0.0, -4.0]), np.random.default_rng(0)
    frequencies = np.bincount([draw_token(scores, 0.7, stream) for _ in range(20000)], minlength=4) / 20000
    chances = np.exp(scores.astype(np.float64) / 0.7)
    np.testing.assert_allclose(frequencies, chances / chances.sum(), atol=0.01)
    assert draw_token(scores, 0.0, stream) == 0


def test_sampling_depends_on_the_seed_and_not_on_the_batch(qwen2):
    together = qwen2.decoder.generate(PROMPTS, 30, temperature=1.0, seed=3)
    alone = [qwen2.decoder.generate([prompt], 30, temperature=1.0, seed=3)[0] for prompt in PROMPTS]
    assert together == alone
    assert together != qwen2.decoder.generate(PROMPTS, 30, temperature=1.0, seed=4)
    assert together != qwen2.decoder.generate(PROMPTS, 30)
    first, second = qwen2.decoder.generate(PROMPTS[:1] * 2, 30, temperature=1.0, seed=3)
    assert first == together[0]
    assert first != second


def test_perplexity_counts_every_token_and_no_padding(qwen2):
    nats, count = 0.0, 0
    for block in BLOCKS:
        chances = torch.from_numpy(logits(qwen2.model, block)).double().log_softmax(-1)
        nats -= float(chances[:-1].gather(-1, torch.from_numpy(block[1:, None])).sum())
        count += len(block) - 1
    for batch in (1, 2, 8):
        assert compute_perplexity(qwen2.decoder, BLOCKS, batch) == pytest.approx(np.exp(nats / count), rel=1e-4)
    with pytest.raises(CompressError, match="at least two tokens"):
        compute_perplexity(qwen2.decoder, [BLOCKS[0][:1]])


# --- exported files


def test_the_graph_has_standard_names_dynamic_axes_and_all_files(exported):
    graph = onnx.load(exported.folder / ONNX_FILE)
    onnx.checker.check_model(graph)
    assert [entry.version for entry in graph.opset_import if entry.domain == ""] == [OPSET]
    cache_names = [f"{layer}.{kind}" for layer in range(2) for kind in ("key", "value")]
    requested = ["input_ids", "attention_mask", "position_ids", *(f"past_key_values.{each}" for each in cache_names)]
    assert [value.name for value in graph.graph.input] == requested
    assert [value.name for value in graph.graph.output] == ["logits", *(f"present.{each}" for each in cache_names)]
    dynamic = {v.name: [d.dim_param for d in v.type.tensor_type.shape.dim] for v in graph.graph.input}
    assert [dynamic[name] for name in requested[:3]] == [["batch", "length"], ["batch", "total"], ["batch", "length"]]
    assert all(dynamic[name] == ["batch", "", "past", ""] for name in requested[3:])
    files = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", ONNX_FILE}
    assert files <= {file.name for file in exported.folder.iterdir()}


@pytest.mark.slow
def test_a_tied_embedding_table_is_written_once(tmp_path):
    model = build("qwen2", vocab_size=20_000)
    export_decoder(model, word_tokenizer(), tmp_path)
    assert (tmp_path / ONNX_FILE).stat().st_size < 1.5 * sum(each.nbytes for each in model.parameters())


@pytest.mark.slow
def test_weights_beyond_the_file_size_limit_are_stored_as_external_data(tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "LARGEST", 10_000)
    model = build("gpt2")
    export_decoder(model, word_tokenizer(), tmp_path)
    assert (tmp_path / ONNX_FILE).stat().st_size < (tmp_path / f"{ONNX_FILE}.data").stat().st_size * 10
    assert verify_decoder(model, tmp_path, PROMPTS[:1], BLOCKS[:1], new_tokens=20).max_difference < 1e-4


def test_exporting_leaves_the_model_unchanged(qwen2):
    assert qwen2.model.config._attn_implementation == "sdpa"
    theirs = build("qwen2").state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in qwen2.model.state_dict().items())


FORBIDDEN = "import sys; sys.modules['torch'] = None; "  # so that importing it raises ImportError


def test_the_example_script_generates_the_models_tokens_without_torch(qwen2):
    script = str(ROOT / "examples" / "generate_onnxruntime.py")
    code = (
        f"{FORBIDDEN}import runpy; sys.argv = sys.argv[1:]; sys.path.insert(0, {str(ROOT / 'examples')!r}); "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    prompt = word_tokenizer().decode(PROMPTS[0])
    arguments = [sys.executable, "-c", code, script, str(qwen2.folder), prompt, "--tokens", "40"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    expected, _ = greedy_tokens(qwen2.model, PROMPTS[0])
    assert done.stdout.split() == word_tokenizer().decode(expected[:40]).split()


def test_the_onnx_decoder_generates_without_torch(qwen2):
    code = (
        f"{FORBIDDEN}from pathlib import Path; from compress.export.onnx.generate import OnnxDecoder; "
        f"print(*OnnxDecoder(Path(sys.argv[1]), 1).generate([{PROMPTS[0]}], 10)[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(qwen2.folder)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.split() == [str(token) for token in greedy_tokens(qwen2.model, PROMPTS[0])[0][:10]]


def test_the_tokenizer_of_prompts_has_no_limits(tmp_path):
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", pad_token="[UNK]")
    tokenizer(["a a a"], truncation=True, max_length=2, padding=True)
    save_prompt_tokenizer(tokenizer, tmp_path)
    assert len(Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("a a a").ids) == 3
    assert tokenizer.backend_tokenizer.truncation["max_length"] == 2, "the given tokenizer is changed"
