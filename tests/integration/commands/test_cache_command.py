"""`python -m pipelines.cache` on tiny teachers of every task: writing, growing, inspecting and repairing caches."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

import pipelines.cache as command
from distill.cache import CacheReader
from distill.cache.fidelity import measure_angle
from distill.cache.samples import build_samples
from distill.data.batches.packing import PackedRows
from distill.data.batches.token_blocks import LanguageBlocks, token_blocks
from distill.data.config import DataConfig
from distill.data.masking.config import MaskConfig
from distill.data.rows.chat_config import ChatConfig
from distill.data.sources.text_files import read_texts
from distill.data.splits.examples import Examples
from distill.losses.compose import distribution_loss
from distill.tasks.language import MaskedLM
from distill.teacher.online import OnlineTeacher
from pipelines.runs import cli
from pipelines.settings.commands.cache import WriteConfig
from pipelines.stages.cache.record import record_settings
from support import broken_checkpoints as broken
from support.commands import rejection_of, run_to_success
from support.task_data import question_data, tagged_data
from support.tiny_models import MAX_LENGTH, VOCABULARY, WORDS, build_model, make_rows, saved, word_tokenizer


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    file = tmp_path / "books.txt"
    file.write_text(" ".join(text for text, _ in make_rows(60, 4)))
    return file


@pytest.fixture
def decoder(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=MAX_LENGTH, eos_token_id=3, bos_token_id=2, pad_token_id=0,
        initializer_range=0.2,
    )  # fmt: skip
    return saved(LlamaForCausalLM(config), tokenizer, tmp_path / "decoder")


def run(*arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["pipelines.cache", *arguments])
    code = 0
    try:
        cli.run(command.main)
    except SystemExit as ended:
        code = int(ended.code or 0)
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.fixture
def cache(monkeypatch, capsys):
    """`cache(command, *words)` runs the command in this process and returns (exit code, output)."""
    return lambda *arguments: run(*map(str, arguments), monkeypatch=monkeypatch, capsys=capsys)


def write_arguments(teacher: Path, data: Path, folder: Path) -> list[str]:
    return ["--teacher", str(teacher), "--data", str(data), "--cache", str(folder), "--data.max_length", "16"]


def test_a_decoders_cache_is_planned_written_reused_and_inspected(cache, decoder, texts, tmp_path, tokenizer):
    arguments = write_arguments(decoder, texts, tmp_path / "c")
    code, message = cache("write", *arguments, "--dry-run")
    assert code == 0
    assert "dry run: nothing was written" in message
    assert not (tmp_path / "c").exists()
    code, message = cache("write", *arguments, "--draws", "9")
    assert code == 0, message
    assert "task: causal-lm" in message
    assert "sampled" in message
    blocks = LanguageBlocks(token_blocks(tokenizer, read_texts(str(texts)), 16))
    reader = CacheReader(tmp_path / "c")
    assert len(reader) == len(set(build_samples(blocks, 0).keys))
    signals = reader(blocks.collate([0, 3], 0))
    torch.testing.assert_close(signals["weights"].sum(1), torch.ones(len(signals["weights"])))
    assert "nothing was missing" in cache("write", *arguments, "--draws", "9")[1]
    code, message = cache("inspect", "--cache", tmp_path / "c", "--fidelity", "2")
    assert code == 0, message
    assert re.search(r"coverage: (\d+) of \1 samples", message)
    assert "KL(cached, dense)" in message
    assert 0 < float(re.search(r"│ ([\d.]+) degrees", message)[1]) < 90


def test_the_length_that_a_short_teacher_leaves_is_reported(cache, checkpoints, changed_copy, tmp_path):
    folder = changed_copy("headed", broken.positions(16))
    code, message = cache(
        "write", "--teacher", folder, "--data", checkpoints / "data", "--cache", tmp_path / "c", "--dry-run"
    )
    assert code == 0, message
    assert "texts are cut at 16 tokens: the teacher has 16 positions" in " ".join(message.split())


@pytest.mark.parametrize("temperature", ["1", "2"])
def test_a_top_k_over_the_whole_vocabulary_matches_its_teacher(temperature, cache, decoder, texts, tmp_path):
    everything = ("--signals", "topk", "--k", str(len(VOCABULARY)))
    arguments = write_arguments(decoder, texts, tmp_path / "c")
    code, message = cache("write", *arguments, *everything, "--keep.temperature", temperature)
    assert code == 0, message
    code, message = cache("inspect", "--cache", tmp_path / "c", "--fidelity", "2")
    assert code == 0, message
    assert float(re.search(r"│ ([\d.]+) nats", message)[1]) < 2e-3  # quantized in steps of 1/8 nat
    assert float(re.search(r"│ ([\d.]+) degrees", message)[1]) < 5


@pytest.mark.parametrize("task", ["token-classification", "question-answering", "chat"])
def test_inspect_finds_no_difference_between_a_cache_and_its_own_teacher(
    task, cache, decoder, tmp_path, tokenizer, monkeypatch
):
    data, head = tmp_path / "data", {"token-classification": "Token", "question-answering": "Question"}.get(task)
    if task == "chat":
        data.mkdir()
        rows = [{"prompt": WORDS[number], "completion": f" {WORDS[number + 1]}"} for number in range(40)]
        (data / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
        teacher = saved(
            LlamaForCausalLM.from_pretrained(decoder), word_tokenizer(eos_token="[SEP]"), tmp_path / "teacher"
        )
    else:
        (tagged_data if head == "Token" else question_data)(data)
        labels = {"num_labels": 2} if head == "Question" else {}
        model = build_model("bert", f"For{head}{'Classification' if head == 'Token' else 'Answering'}", **labels)
        teacher = saved(model, tokenizer, tmp_path / "teacher")
    arguments = ["--teacher", teacher, "--data", data, "--cache", tmp_path / "c", "--data.max_length", "48"]
    code, message = cache("write", *arguments, "--task", task, "--signals", "logits")
    assert code == 0, message
    code, message = cache("inspect", "--cache", tmp_path / "c", "--fidelity", "2", "--student", teacher)
    assert code == 0, message
    assert float(re.search(r"│ (-?[\d.]+) nats", message)[1]) < 1e-4
    assert float(re.search(r"│ ([\d.]+) degrees", message)[1]) < 0.2


def test_a_flipped_byte_is_named_and_repaired_identically(cache, decoder, texts, tmp_path):
    folder = tmp_path / "c"
    cache("write", *write_arguments(decoder, texts, folder))
    shard = next(folder.glob("shard-*"))
    whole = shard.read_bytes()
    assert cache("verify", "--cache", folder) == (0, f"cache {folder}: all bytes are as they were written\n")
    shard.write_bytes(whole[:-20] + bytes([whole[-20] ^ 1]) + whole[-19:])
    code, message = cache("verify", "--cache", folder)
    assert code == 1
    assert re.search(r"shard-000000.safetensors bytes [\d,]+ to [\d,]+: .*1 samples \([0-9a-f]{32}\)", message)
    (folder / "cache.json").write_text("{}")
    code, message = cache("rebuild", "--cache", folder)
    assert code == 0, message
    assert "cache.json restored from its other copy" in message
    assert "1 samples damaged" in message
    assert shard.read_bytes() == whole
    assert cache("verify", "--cache", folder)[0] == 0


def test_more_text_extends_a_cache_without_changing_its_first_shard(cache, decoder, texts, tmp_path):
    folder = tmp_path / "c"
    cache("write", *write_arguments(decoder, texts, folder), "--limit", "5")
    before = (folder / "shard-000000.safetensors").read_bytes()
    code, message = cache("inspect", "--cache", folder, "--data", texts)
    assert code == 0, message
    cache("write", *write_arguments(decoder, texts, folder))
    assert (folder / "shard-000000.safetensors").read_bytes() == before
    assert len(CacheReader(folder)) > 5


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_masks_of_cache_and_training_are_the_same(packing, cache, tmp_path, tokenizer):
    texts = tmp_path / "texts.jsonl"
    texts.write_text("\n".join(json.dumps({"text": text}) for text, _ in make_rows(30, 4)))
    teacher = saved(build_model("bert", "ForMaskedLM"), tokenizer, tmp_path / "mlm")
    arguments = [*write_arguments(teacher, texts, tmp_path / "c"), "--data.packing", packing]
    code, message = cache("write", *arguments, "--signals", "topk", "--k", "5", "--masking.passes", "2")
    assert code == 0, message
    assert "task: masked-lm" in message
    reader = CacheReader(tmp_path / "c")
    task = MaskedLM((), packing, MaskConfig(passes=2))
    masked = task.encode_train(tokenizer, Examples(read_texts(str(texts)), None), 16)
    assert isinstance(masked, PackedRows) == (packing == "documents")
    assert len(masked) < len(reader) <= 2 * len(masked)  # two masks of a row may coincide
    model = OnlineTeacher(build_model("bert", "ForMaskedLM"))
    for epoch in (0, 1, 2):
        batch = masked.collate([1, 4, 2], 0, epoch)
        signals = reader(batch)
        assert len(signals["ids"]) == int(batch["positions"].sum())
        dense = model(batch)["logits"].softmax(-1)
        torch.testing.assert_close(signals["log_probs"].exp(), dense.gather(-1, signals["ids"]), rtol=0.14, atol=1e-4)


def test_cached_embeddings_and_hidden_states_match_the_teacher(cache, body_folder, data_folder, tmp_path, tokenizer):
    arguments = write_arguments(body_folder, data_folder, tmp_path / "c")
    code, message = cache("write", *arguments, "--signals", "embedding,hidden,relations", "--layers", "0,3")
    assert code == 0, message
    assert "task: sentence-embedding" in message
    reader = CacheReader(tmp_path / "c")
    batch = dict(tokenizer([make_rows(120, 1)[7][0]], return_tensors="pt", max_length=16, truncation=True))
    cached = reader(batch)
    online = OnlineTeacher(build_model("bert", "Model"), ("embedding", "hidden", "relations"))(batch)
    torch.testing.assert_close(cached["embedding"], online["embedding"], rtol=1e-4, atol=1e-5)
    for layer in (0, 3):
        top = online["hidden"][layer].abs().max()
        assert (cached["hidden"][layer] - online["hidden"][layer]).abs().max() <= top / 127 / 2 * 1.01
        assert len(cached["relations"][layer]) == 3


def test_generated_sequences_are_cached_without_other_signals(cache, decoder, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"text": text}) for text, _ in make_rows(6, 9)))
    arguments = write_arguments(decoder, prompts, tmp_path / "c")
    few = ("--keep.new_tokens", "7")
    code, message = cache("write", *arguments, "--signals", "generated", *few)
    assert code == 0, message
    assert "generated (" in message
    assert "new_tokens 7" in message
    both = write_arguments(decoder, prompts, tmp_path / "d")
    assert (
        "expected generated without other signals, found generated, topk"
        in cache("write", *both, "--signals", "generated,topk", *few)[1]
    )


def test_the_cache_of_another_teacher_is_rejected_and_unchanged(
    cache, decoder, texts, tmp_path, tokenizer, headed_folder, data_folder
):
    folder = tmp_path / "c"
    cache("write", *write_arguments(decoder, texts, folder))
    before = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    code, message = cache("write", *write_arguments(headed_folder, data_folder, folder))
    assert code == 2
    assert "made from other inputs: preprocessing: expected 'text-classification', found 'causal-lm'" in message
    assert {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()} == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), None),
        (("wirte",), "expected a command among write, inspect, verify, rebuild, found 'wirte'"),
        (("write", "--cache", "c"), "--teacher: missing"),
        (("verify",), "--cache: missing"),
        (("verify", "--cache", "nowhere"), "expected the folder of a cache"),
        (("rebuild", "--cache", "nowhere"), "expected the folder of a cache"),
        (
            ("write", "--cache", "c", "--teacher", "t", "--data", "d", "--signals", "dense"),
            "expected auto alone, or names among",
        ),
        (("write", "--cache", "c", "--teacher", "t", "--data", "d", "--writer", "2"), "writer below writers"),
    ],
)
def test_invalid_arguments_end_with_one_message(arguments, message, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    if message is None:
        assert "usage: python -m pipelines.cache" in run_to_success("cache", [])
    else:
        assert message in rejection_of(command, arguments, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--signals", "topk", "--k", "100000"), "keep.k: expected 1 to"),
        (("--signals", "sampled", "--draws", "0"), "keep.draws"),
        (("--signals", "hidden", "--layers", "7"), "expected numbers from 0 up to 2, found 7"),
        (("--signals", "hidden", "--layers", "0,-1"), "expected numbers from 0 up to 2, found -1"),
        (("--timeout", "0"), "timeout: expected more than 0 seconds"),
        (("--threads", "-1"), "threads: expected at least 0, found -1"),
        (("--signals", "hidden", "--layers", "a"), "numbers joined by commas"),
        (
            ("--signals", "generated", "--task", "sentence-embedding"),
            "expected signals of sentence-embedding, found generated",
        ),
        (("--task", "masked-lm"), "no head of the task (AutoModelForMaskedLM knows none); name another --task"),
        (("--accelerator", "nowhere"), "--accelerator 'nowhere'"),
        (
            ("--signals", "generated", "--keep.new_tokens", str(MAX_LENGTH - 15)),
            f"data.max_length and keep.new_tokens together: expected at most {MAX_LENGTH} tokens",
        ),
    ],
)
def test_settings_that_do_not_fit_the_teacher_are_rejected(more, message, cache, decoder, texts, tmp_path):
    code, output = cache("write", *write_arguments(decoder, texts, tmp_path / "c"), *more)
    assert code == 2
    assert message in output
    assert not (tmp_path / "c").exists()


def test_gradient_angle_and_distribution_loss_are_exact_on_known_cases():
    torch.manual_seed(0)
    gradient = [torch.randn(3, 4), None, torch.randn(5)]
    assert measure_angle(gradient, [g * 2 if g is not None else None for g in gradient]) < 1e-4
    assert abs(measure_angle([torch.tensor([1.0, 0])], [torch.tensor([0, 1.0])]) - 90) < 1e-4
    logits = torch.randn(6, 9)
    everything = torch.arange(9).expand(6, 9)
    sampled = {"ids": everything, "weights": logits.softmax(-1)}
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(distribution_loss(logits, sampled, 1.0), entropy)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["replicated", "fsdp=2"])
def test_two_processes_write_the_same_bytes_and_print_once(layout, cache, decoder, texts, tmp_path):
    assert cache("write", *write_arguments(decoder, texts, tmp_path / "one"))[0] == 0
    arguments = write_arguments(decoder, texts, tmp_path / "two")
    message = run_to_success("cache", ["write", *arguments, "--devices", "2", "--layout", layout])
    assert message.count("bytes per token") == 1
    assert read_contents(tmp_path / "two") == read_contents(tmp_path / "one")


def read_contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}


def test_the_recorded_template_path_is_absolute(tmp_path, monkeypatch):
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    monkeypatch.chdir(tmp_path)
    recorded = record_settings(WriteConfig("c", "t", data=DataConfig(path="d"), chat=ChatConfig(template="chat.jinja")))
    assert recorded["chat"]["template"] == str(tmp_path / "chat.jinja")
