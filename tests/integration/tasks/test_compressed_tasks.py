"""Students of every task pruned to a speed or quantized by the distill command."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from compress.quantize.store import is_quantized
from distill.checkpoint.custom_models import load_model_folder
from distill.models.sentence_encoder import PooledModel
from support.commands import run_to_success, small_run
from support.reports import report_of
from support.task_data import books_data, multi_label_data, pair_data, question_data, regression_data, tagged_data
from support.tiny_models import FILLERS, VOCABULARY, build_model, saved

# Latencies of batches of four texts, since each of a search's measurements times all of its batches 60 times.
SEARCH = ("--budget.runtime", "pytorch", "--budget.precision", "fp32", "--budget.batch", "4")
SEARCH += ("--prune.samples", "16", "--prune.trial_steps", "8", "--budget.retries", "0")
STILL = ("--teacher_train.dropout", "0", "--train.dropout", "0")
pytestmark = pytest.mark.slow
KINDS = {
    "token-classification": tagged_data,
    "multi-label": multi_label_data,
    "regression": regression_data,
    "question-answering": question_data,
}


def train_student(kind: str, folder: Path, body: Path, *more: str) -> tuple[Path, str]:
    output = folder / "run"
    epochs = ("--teacher_train.epochs", "12", "--epochs", "20", "--learning-rate", "3e-3")
    arguments = small_run(body, KINDS[kind](folder / "data"), output, *epochs, *STILL, *more)
    return output, run_to_success("distill", arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_a_student_of_each_task_is_pruned_and_trained(kind, body_folder, tmp_path):
    output, message = train_student(kind, tmp_path, body_folder, "--speedup", "1.2", "--student", "teacher", *SEARCH)
    assert f"task: {kind}" in message
    report = report_of(output)
    entries = {(each["name"], each["runtime"]): each for each in report["models"]}
    whole, small = entries["teacher", "pytorch"], entries["student", "pytorch"]
    assert small["params"] < whole["params"]
    assert small["score"] > 0.4 * whole["score"] > 0.1
    (student,) = report["pruning"]["students"]
    assert student["teacher_score"] > 0.1
    assert all(each["divergences"][-1] > 0 for each in student["trials"] if each["divergences"])
    assert load_model_folder(output / "student").num_parameters() == small["params"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_student_of_each_task_is_quantized(kind, body_folder, tmp_path):
    output, message = train_student(kind, tmp_path, body_folder, "--quantize", "int8", "--quantize.samples", "32")
    assert "layers round as int8-static" in message
    entries = {(e["name"], e["runtime"], e["precision"]): e for e in report_of(output)["models"]}
    rounded, whole = entries["student", "onnxruntime", "int8"], entries["student", "onnxruntime", "fp32"]
    assert abs(rounded["score"] - whole["score"]) <= 0.1
    assert rounded["bytes"] < 0.7 * whole["bytes"]
    assert rounded["parity"]["layers"] <= 1e-5
    assert is_quantized(output / "student")


@pytest.fixture
def decoder_teacher(tmp_path, tokenizer) -> Path:
    sizes = {"hidden_size": 32, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(VOCABULARY), max_position_embeddings=64, num_key_value_heads=2, **sizes)
    return saved(LlamaForCausalLM(config).eval(), tokenizer, tmp_path / "decoder")


@pytest.mark.parametrize("head", ["ForCausalLM", "ForMaskedLM"])
@pytest.mark.parametrize("how", ["pruned", "quantized"])
def test_a_language_model_is_pruned_or_quantized(head, how, decoder_teacher, tokenizer, tmp_path):
    teacher = decoder_teacher
    if head == "ForMaskedLM":
        teacher = saved(build_model("bert", head), tokenizer, tmp_path / "masked")
    trained = ("--teacher.finetune", "always", "--teacher_train.epochs", "8", "--epochs", "6", "--temperature", "1")
    rates = ("--teacher_train.learning_rate", "5e-3", "--learning-rate", "5e-3", *STILL)
    more = ("--speedup", "1.2", *SEARCH) if how == "pruned" else ("--quantize", "int8", "--quantize.samples", "16")
    arguments = small_run(teacher, books_data(tmp_path / "books"), tmp_path / "run", *trained, *rates, *more)
    run_to_success("distill", [*arguments, "--student", "teacher"])
    report = report_of(tmp_path / "run")
    entries = {(e["name"], e["runtime"], e["precision"]): e for e in report["models"]}
    whole = entries["teacher", "pytorch", "fp32"]
    small = entries["student", *(("pytorch", "fp32") if how == "pruned" else ("onnxruntime", "int8"))]
    assert small["scores"]["perplexity"] < 2 * whole["scores"]["perplexity"] < len(VOCABULARY) / 2
    if how == "pruned":
        assert small["params"] < whole["params"]
        assert report["pruning"]["start"]["tokens"] == len(tokenizer), "tokens that it generates were removed"
        (student,) = report["pruning"]["students"]
        assert all(each["divergences"][-1] > 0 for each in student["trials"] if each["divergences"])


@pytest.mark.parametrize("how", ["pruned", "quantized"])
def test_a_compressed_sentence_encoder_keeps_its_vector_width(how, tokenizer, tmp_path):
    body = saved(build_model("bert", "Model", intermediate_size=512), tokenizer, tmp_path / "body")
    teacher, output = PooledModel.from_pretrained(body), tmp_path / "run"
    teacher.save_pretrained(tmp_path / "encoder")
    tokenizer.save_pretrained(tmp_path / "encoder")
    more = ("--speedup", "1.2", *SEARCH) if how == "pruned" else ("--quantize", "int8", "--quantize.samples", "32")
    arguments = small_run(tmp_path / "encoder", pair_data(tmp_path / "pairs"), output, "--epochs", "20", *more)
    run_to_success("distill", [*arguments, "--learning-rate", "3e-3", "--student", "teacher"])
    student = PooledModel.from_pretrained(output / "student")
    batch = tokenizer(FILLERS[:20], return_tensors="pt")
    with torch.no_grad():
        vectors, expected = student(**batch).logits, teacher(**batch).logits
    assert vectors.shape == expected.shape
    assert torch.cosine_similarity(vectors, expected).mean() > 0.7
    if how == "pruned":
        assert student.num_parameters() < teacher.num_parameters()
        assert type(student).__name__ == "BertModel", "a stock body, which SentenceTransformer loads"
        (pruning,) = report_of(output)["pruning"]["students"]
        assert all(each["divergences"][-1] > 0 for each in pruning["trials"] if each["divergences"])
    else:
        assert is_quantized(output / "student")
