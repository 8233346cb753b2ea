"""Checkpoints whose head has no weights, or whose positions or problem type don't fit the task."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

import support.broken_checkpoints as broken
from distill.checkpoint.custom_models import save_model_folder
from distill.checkpoint.sentence_form import DenseProjection, SentenceForm
from pipelines import cache, distill, evaluate, harness
from support.broken_checkpoints import without
from support.commands import ROOT, rejection_of, run_to_success, small_run
from support.task_data import multi_label_data
from support.tiny_models import build_model, saved
from support.two_tokenizers import byte_level
from unit.distill.checkpoint.test_model_folder import shipped
from unit.distill.checkpoint.test_sentence_folder import build as sentence_encoder

SHORT = ["--until", "cache", "--teacher_train.epochs", "1"]


def test_a_head_without_weights_is_trained_and_reported(checkpoints, changed_copy, tmp_path):
    folder = changed_copy("headed", without("classifier"))
    message = run_to_success("distill", small_run(folder, checkpoints / "data", tmp_path / "run", *SHORT))
    assert re.search(
        r"fine-tuned first \(the files have no weights of its head \(classifier\.bias, classifier\.", message
    )
    assert "it is used unchanged" not in message
    (manifest,) = (tmp_path / "run" / "teacher").glob("*/manifest.json")
    assert json.loads(manifest.read_text())["metrics"]["trained"]


@pytest.mark.slow
def test_a_head_without_weights_is_trained_where_the_precision_is_measured(checkpoints, changed_copy, tmp_path):
    folder = changed_copy("headed", without("classifier"))
    automatic = ["--precision", "auto", *SHORT]
    message = run_to_success("distill", small_run(folder, checkpoints / "data", tmp_path / "run", *automatic))
    assert "fine-tuned first (the files have no weights of its head" in message


@pytest.mark.slow
def test_a_student_whose_head_has_no_weights_gets_a_new_one(checkpoints, changed_copy, tmp_path):
    folder = changed_copy("headed", without("classifier"))
    arguments = ["--student", str(folder), "--until", "distill"]
    run_to_success("distill", small_run(checkpoints / "headed", checkpoints / "data", tmp_path / "run", *arguments))


@pytest.mark.slow
def test_a_renamed_head_counts_as_missing_and_its_weights_are_named(checkpoints, changed_copy, tmp_path):
    folder = changed_copy("headed", broken.renamed("classifier", "klassifier"))
    message = run_to_success("distill", small_run(folder, checkpoints / "data", tmp_path / "run", *SHORT))
    assert "but klassifier.bias, klassifier.weight" in message


@pytest.mark.slow
def test_a_complete_head_is_used_without_training(checkpoints, tmp_path):
    message = run_to_success(
        "distill", small_run(checkpoints / "headed", checkpoints / "data", tmp_path / "run", *SHORT)
    )
    assert "its head has these 5 labels, in the same order: it is used unchanged" in message


def test_an_incomplete_head_is_rejected(checkpoints, changed_copy, tmp_path, monkeypatch, capsys):
    folder = changed_copy("headed", without("classifier.bias"))
    arguments = small_run(folder, checkpoints / "data", tmp_path / "run", *SHORT)
    assert re.search(r"1 missing \(classifier\.bias\)", rejection_of(distill, arguments, monkeypatch, capsys))


def test_a_missing_head_is_rejected_when_fine_tuning_is_disabled(
    checkpoints, changed_copy, tmp_path, monkeypatch, capsys
):
    folder = changed_copy("headed", without("classifier"))
    arguments = small_run(folder, checkpoints / "data", tmp_path / "run", "--teacher.finetune", "never")
    expected = rejection_of(distill, arguments, monkeypatch, capsys)
    assert (
        "the files have no weights of its head (classifier.bias, classifier.weight); and --teacher.finetune" in expected
    )


@pytest.mark.parametrize("command", ["cache", "evaluate"])
def test_commands_that_train_nothing_reject_a_missing_head(
    command, checkpoints, changed_copy, tmp_path, monkeypatch, capsys
):
    folder, data = str(changed_copy("headed", without("classifier"))), str(checkpoints / "data")
    module, arguments = {
        "cache": (cache, ["write", "--teacher", folder, "--data", data, "--cache", str(tmp_path / "c")]),
        "evaluate": (evaluate, ["--model", folder, "--data", data, "--output", str(tmp_path / "e")]),
    }[command]
    assert re.search(r"2 missing \(classifier\.bias", rejection_of(module, arguments, monkeypatch, capsys))


def test_a_checkpoint_without_a_head_is_not_cached_as_a_classifier(checkpoints, tmp_path, monkeypatch, capsys):
    arguments = [
        "write",
        "--teacher",
        str(checkpoints / "body"),
        "--data",
        str(checkpoints / "data"),
        "--cache",
        str(tmp_path / "c"),
    ]
    expected = rejection_of(cache, [*arguments, "--task", "text-classification"], monkeypatch, capsys)
    assert re.search(r"2 missing \(classifier\.bias", expected)


def test_a_masked_language_model_without_head_weights_is_rejected(
    checkpoints, changed_copy, tmp_path, monkeypatch, capsys
):
    folder = changed_copy("masked", without("cls."))
    arguments = small_run(folder, checkpoints / "data", tmp_path / "run", "--task", "masked-lm")
    assert re.search(r"missing \(cls\.predictions\.", rejection_of(distill, arguments, monkeypatch, capsys))


def test_the_harness_rejects_a_decoder_whose_weights_are_renamed(tmp_path, monkeypatch, capsys):
    tokenizer = byte_level()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    folder = saved(LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)), tokenizer, tmp_path / "decoder")
    broken.renamed("mlp.up_proj", "mlp.upper")(folder)
    arguments = ["--model", str(folder), "--tasks", "hellaswag", "--output", str(tmp_path / "run")]
    expected = rejection_of(harness, arguments, monkeypatch, capsys)
    assert re.search(r"2 missing \(model\.layers\.0\.mlp\.up_proj\.weight", expected)


def test_a_multi_label_head_is_rejected_for_single_label_classification(
    checkpoints, tmp_path, monkeypatch, capsys, tokenizer
):
    folder = saved(build_model("bert", problem_type="multi_label_classification"), tokenizer, tmp_path / "several")
    arguments = small_run(folder, checkpoints / "data", tmp_path / "run", "--task", "text-classification")
    expected = rejection_of(distill, arguments, monkeypatch, capsys)
    assert "trained for multi-label (problem_type multi_label_classification in config.json)" in expected
    assert not (tmp_path / "run").exists()


def test_a_single_label_head_is_rejected_for_multi_label_classification(
    checkpoints, tmp_path, monkeypatch, capsys, tokenizer
):
    folder = saved(build_model("bert", problem_type="single_label_classification"), tokenizer, tmp_path / "single")
    data = multi_label_data(tmp_path / "several")
    expected = rejection_of(
        distill, small_run(folder, data, tmp_path / "run", "--task", "multi-label"), monkeypatch, capsys
    )
    assert "trained for text-classification" in expected


def remove_length(arguments: list[str]) -> list[str]:
    position = arguments.index("--data.max_length")
    return arguments[:position] + arguments[position + 2 :]


@pytest.mark.slow
def test_texts_are_truncated_at_the_models_positions_by_default(checkpoints, changed_copy, tmp_path):
    folder = changed_copy("headed", broken.positions(16))
    message = run_to_success(
        "distill", remove_length(small_run(folder, checkpoints / "data", tmp_path / "run", *SHORT))
    )
    assert "texts are cut at 16 tokens: the teacher has 16 positions" in message
    (manifest,) = (tmp_path / "run" / "teacher").glob("*/manifest.json")
    assert json.loads(manifest.read_text())["config"]["max_length"] == 16


def test_a_requested_length_beyond_the_positions_is_rejected(checkpoints, changed_copy, tmp_path, monkeypatch, capsys):
    folder = changed_copy("headed", broken.positions(16))
    expected = rejection_of(distill, small_run(folder, checkpoints / "data", tmp_path / "run"), monkeypatch, capsys)
    assert "data.max_length: expected at most 16 tokens, the positions of the teacher, found 32" in expected


def test_evaluate_rejects_a_length_beyond_the_positions(checkpoints, changed_copy, tmp_path, monkeypatch, capsys):
    folder = changed_copy("headed", broken.positions(16))
    arguments = ["--model", str(folder), "--data", str(checkpoints / "data"), "--output", str(tmp_path / "e")]
    expected = rejection_of(evaluate, [*arguments, "--data.max_length", "32"], monkeypatch, capsys)
    assert "data.max_length: expected at most 16 tokens, the positions of the model, found 32" in expected


@pytest.mark.parametrize("what", ["config.json", "model.safetensors", "."])
def test_files_without_read_permission_are_named(what, checkpoints, changed_copy, tmp_path, monkeypatch, capsys):
    folder = changed_copy("headed", lambda folder: None)
    for parent in (*tmp_path.parents[:-2], tmp_path, folder):
        parent.chmod(0o755)
    (folder / what).chmod(0)
    (tmp_path / "out").mkdir()
    (tmp_path / "out").chmod(0o777)
    arguments = small_run(folder, checkpoints / "data", tmp_path / "out" / "run")
    with broken.as_nobody():
        expected = rejection_of(distill, arguments, monkeypatch, capsys)
    (folder / what).chmod(0o755)
    assert str(folder) in expected
    assert "denied" in expected
    assert "write" not in expected


def save_encoder(folder: Path, tokenizer: PreTrainedTokenizerBase, change: broken.Break) -> Path:
    """Saves a sentence encoder with one Dense module and applies `change` to that module's folder."""
    form = SentenceForm("mean", (DenseProjection(16),))
    saved(sentence_encoder("bert", form), tokenizer, folder)
    (dense,) = folder.glob("*_Dense")
    change(dense)
    return folder


def cut_dense_rows(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({name: value[:8].clone() for name, value in tensors.items()}, folder / "model.safetensors")


def write_nan(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["linear.weight"][0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut_dense_rows, r"expected weights \{'weight': \[16, 32\], 'bias': \[16\]\} of Dense module 1.*\[8, 32\]"),
        (write_nan, "expected finite floating-point numbers in Dense module 1, found others in weight"),
    ],
)
def test_a_sentence_encoder_with_broken_projections_is_rejected(
    change, message, checkpoints, tmp_path, monkeypatch, capsys, tokenizer
):
    folder = save_encoder(tmp_path / "encoder", tokenizer, change)
    arguments = small_run(folder, checkpoints / "data", tmp_path / "run", "--task", "sentence-embedding")
    assert re.search(message, rejection_of(distill, arguments, monkeypatch, capsys))


POOLING, DENSE = "1_Pooling/config.json", "2_Dense/config.json"
MODULE = {"path": "", "type": "sentence_transformers.models.Transformer"}


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("modules.json", [MODULE, MODULE | {"path": "../other"}], r"expected folders of modules beside .*'\.\./other'"),
        ("modules.json", [MODULE, MODULE | {"path": "/etc"}], "expected folders of modules beside .*'/etc'"),
        (POOLING, [], "expected a JSON object, found a list"),
        (POOLING, {"pooling_mode": 5}, "expected one pooling among mean, .* found 5"),
        (POOLING, {"pooling_mode": [["mean"]]}, "expected one pooling among mean, "),
        (DENSE, {"out_features": "wide"}, "expected a Dense with out_features"),
        (DENSE, {"out_features": 16, "module_input_name": ["x"]}, "expected a Dense with out_features"),
        ("sentence_bert_config.json", [], "expected a JSON object, found a list"),
        ("sentence_bert_config.json", {"max_seq_length": "long"}, "expected a whole number .* max_seq_length .*'long'"),
        ("config_sentence_transformers.json", "x", "expected a JSON object, found a str"),
        ("config_sentence_transformers.json", {"prompts": ["query: "]}, "expected prompts by name in "),
    ],
)
def test_a_sentence_encoder_with_settings_of_another_shape_is_rejected(
    file, content, message, checkpoints, tmp_path, monkeypatch, capsys, tokenizer
):
    folder = save_encoder(tmp_path / "encoder", tokenizer, lambda dense: None)
    (folder / file).write_text(json.dumps(content))
    arguments = small_run(folder, checkpoints / "data", tmp_path / "run", "--task", "sentence-embedding")
    assert re.search(message, rejection_of(distill, arguments, monkeypatch, capsys))


def test_a_pruned_model_whose_weights_are_missing_is_rejected(checkpoints, tmp_path, monkeypatch, capsys, tokenizer):
    save_model_folder(shipped("bert"), tmp_path / "pruned")
    tokenizer.save_pretrained(tmp_path / "pruned")
    broken.without("layer.1.output.dense")(tmp_path / "pruned")
    arguments = [
        "--model",
        str(tmp_path / "pruned"),
        "--data",
        str(checkpoints / "data"),
        "--output",
        str(tmp_path / "e"),
    ]
    assert re.search(r"2 missing \(", rejection_of(evaluate, arguments, monkeypatch, capsys))


def test_a_broken_config_is_rejected_without_importing_torch(checkpoints, changed_copy):
    folder = changed_copy("headed", broken.config_with(model_type="bertt"))
    code = (
        "import sys\nfrom distill.checkpoint.folder import locate_checkpoint\nfrom distill.errors import InputError\n"
        f"try: locate_checkpoint({str(folder)!r})\nexcept InputError as error: print(error)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=True)
    assert "the nearest is 'bert'" in done.stdout
