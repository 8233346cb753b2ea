"""`--quantize` on a tiny student: the deployed files compute the same as the trained student."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from compress.export.common.targets import ExportTarget
from compress.export.onnx.graph import ONNX_FILE, OnnxModel
from compress.export.onnx.quantized import quantize_graph
from compress.export.write import check_layers
from compress.quantize.store import load_quantization, save_quantization
from pipelines import distill, quantize
from pipelines.stages.deliver.export_verification import load_source
from support.commands import rejection_of, run_to_success, small_run
from support.reports import report_of
from support.run_inputs import make_inputs, stage_folder
from support.tiny_models import make_rows


@pytest.fixture(scope="module")
def quantized_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], str]:
    """(output folder, arguments, printed output) of a run up to its student, trained in 8 bits (static ranges)."""
    folder = tmp_path_factory.mktemp("quantize")
    teacher, data = make_inputs(folder)
    arguments = small_run(teacher, data, folder / "run", "--epochs", "20", "--teacher_train.epochs", "20")
    arguments += ["--quantize", "int8", "--quantize.samples", "32"]
    return folder / "run", arguments, run_to_success("distill", [*arguments, "--until", "distill"])


@pytest.fixture(scope="module")
def finished_run(quantized_run) -> tuple[Path, str]:
    """(output folder, printed output) of the same run with its exports and its report."""
    output, arguments, _ = quantized_run
    return output, run_to_success("distill", arguments)


def test_every_layer_of_the_student_is_trained_in_8_bits_and_it_tells_classes_apart(quantized_run):
    output, _, message = quantized_run
    assert "layers round as int8-static" in message
    checkpoint = stage_folder(output, "quantize") / "model"
    quantization, source = load_quantization(checkpoint), load_source(checkpoint)
    assert {quantized.scheme.name for quantized in quantization.values() if quantized.scheme is not None} == {
        "int8-static"
    }
    logits = source.runner(tokenize(checkpoint))
    assert len(set(logits.argmax(-1))) > 2


def test_a_quantized_checkpoint_is_exported_with_its_scales_for_labels_in_another_order(quantized_run, tmp_path):
    output, arguments, _ = quantized_run
    checkpoint = stage_folder(output, "quantize") / "model"
    other = Path(shutil.copytree(checkpoint, tmp_path / "other"))
    reverse_labels(other)
    data = arguments[arguments.index("--data") + 1]
    export = ["--model", str(other), "--data", data, "--export", "onnx", "--output", str(tmp_path / "x")]
    message = run_to_success("export", [*export, "--parity", "8", "--max_length", "24"])
    assert "as trained" in message
    (exported,) = (tmp_path / "x").rglob("onnx-int8")
    batch = tokenize(checkpoint)
    expected = load_source(checkpoint).runner(batch)
    assert np.abs(OnnxModel(exported, 1)(batch) - expected).max() < 1e-4


def reverse_labels(checkpoint: Path) -> None:
    """Reverses the order of a quantized classifier's labels, in its config, its weights and its scales."""
    config = json.loads((checkpoint / "config.json").read_text())
    names = list(config["id2label"].values())[::-1]
    config |= {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
    (checkpoint / "config.json").write_text(json.dumps(config))
    weights = load_file(checkpoint / "model.safetensors")
    weights |= {name: weights[name].flip(0) for name in ("classifier.weight", "classifier.bias")}
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    quantization = load_quantization(checkpoint)
    head = quantization["classifier"]
    save_quantization({**quantization, "classifier": replace(head, scales=head.scales.flip(0))}, checkpoint)


def tokenize(checkpoint: Path) -> dict[str, np.ndarray]:
    tokens = AutoTokenizer.from_pretrained(checkpoint)(
        [text for text, _ in make_rows(40, 2)], padding=True, return_tensors="np"
    )
    return {name: value.astype(np.int64) for name, value in tokens.items()}


@pytest.mark.slow
def test_the_deployed_student_computes_the_same_as_the_trained_one(finished_run):
    output, _ = finished_run
    checkpoint = stage_folder(output, "quantize") / "model"
    quantization, source = load_quantization(checkpoint), load_source(checkpoint)
    batch = tokenize(checkpoint)
    expected = source.runner(batch)
    for target in ("onnx-int8", "onnxruntime-int8"):
        found = OnnxModel(output / "student" / target, 1)(batch)
        assert (found.argmax(-1) == expected.argmax(-1)).all(), target
    # The deployed file equals the plain file rounded with the numbers that are stored beside the checkpoint.
    exported = next((output / "export").iterdir())
    quantize_graph(exported / "onnx" / ONNX_FILE, output / "again" / ONNX_FILE, source.layers)
    assert (output / "again" / ONNX_FILE).read_bytes() == (output / "student" / "onnx-int8" / ONNX_FILE).read_bytes()
    for target in (ExportTarget("onnx", "int8"), ExportTarget("onnxruntime", "int8")):
        assert check_layers(source, target, output / "student", batch) <= 1e-5
    assert load_quantization(output / "student").keys() == quantization.keys(), "the checkpoint lost its numbers"


@pytest.mark.slow
def test_the_report_contains_the_int8_student_with_its_parity(finished_run):
    output, message = finished_run
    entries = report_of(output)["models"]
    by_format = {(e["name"], e["runtime"], e["precision"]): e for e in entries}
    small, whole = by_format["student", "onnxruntime", "int8"], by_format["student", "onnxruntime", "fp32"]
    assert small["bytes"] < 0.7 * whole["bytes"]
    assert abs(small["score"] - whole["score"]) <= 0.1
    proofs = json.loads(next((output / "export").glob("*/manifest.json")).read_text())["metrics"]["parity"]
    deployed = {proof["target"]: proof for proof in proofs if proof["target"].endswith("int8")}
    assert set(deployed) == {"onnx-int8", "onnxruntime-int8"}
    for proof in deployed.values():
        assert proof["layers"] <= 1e-5
        assert proof["agreement"] >= 0.995
        assert abs(proof["score"] - proof["trained_score"]) <= 0.001
        assert proof["peak_bytes"] > 20e6
        assert "as trained" in message


def test_quantization_without_teacher_logits_or_with_an_unknown_scheme_is_rejected(tmp_path, monkeypatch, capsys):
    teacher, data = make_inputs(tmp_path)
    arguments = small_run(teacher, data, tmp_path / "run", "--quantize", "int8")
    message = rejection_of(distill, [*arguments, "--loss.kl", "0", "--loss.ce", "1"], monkeypatch, capsys)
    assert "on the teacher's cached logits" in message
    message = rejection_of(distill, [*arguments[:-1], "int3"], monkeypatch, capsys)
    assert "quantize.scheme: expected one of int8-static" in message


# --- quantization of a trained model


@pytest.fixture(scope="module")
def float_student(quantized_run) -> Path:
    """The float student of the run above."""
    return stage_folder(quantized_run[0], "distill") / "model"


def quantize_arguments(float_student: Path, data: Path, output: Path) -> list[str]:
    return ["--model", str(float_student), "--data", str(data), "--output", str(output), "--quantize.samples", "32"] + [
        "--measure.texts", "4", "--measure.rounds", "2", "--measure.batch", "2", "--data.max_length", "24",
        "--measure.seconds", "0",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_trained_model_is_quantized_without_training(float_student, tmp_path):
    data = tmp_path / "data"
    make_inputs(tmp_path)
    arguments = quantize_arguments(float_student, data, tmp_path / "run")
    message = run_to_success("quantize", [*arguments, "--method", "ptq", "--scheme", "auto"])
    assert "student: distilling" not in message
    assert "layers have more bits" in message
    manifest = json.loads(next((tmp_path / "run" / "quantize").glob("*/manifest.json")).read_text())
    assert manifest["metrics"]["val/calibrated"] >= 0.99 * manifest["metrics"]["val/float"]
    report = report_of(tmp_path / "run")
    assert {(e["name"], e["precision"]) for e in report["models"]} >= {("teacher", "fp32"), ("student", "int8")}


@pytest.mark.slow
def test_a_format_with_another_scheme_gets_its_own_student(float_student, tmp_path):
    make_inputs(tmp_path)
    arguments = quantize_arguments(float_student, tmp_path / "data", tmp_path / "run")
    run_to_success("quantize", [*arguments, "--method", "ptq", "--export", "onnx,executorch"])
    report = report_of(tmp_path / "run")
    formats = {(e["name"], e["runtime"], e["precision"]) for e in report["models"]}
    assert ("student-int8-dynamic", "executorch", "int8") in formats
    assert ("student", "executorch", "int8") not in formats
    for name, scheme in (("student", "int8-static"), ("student-int8-dynamic", "int8-dynamic")):
        quantization = load_quantization(tmp_path / "run" / name)
        assert {each.scheme.name for each in quantization.values() if each.scheme is not None} == {scheme}
    assert list((tmp_path / "run" / "student-int8-dynamic" / "executorch-int8").glob("*.pte"))


@pytest.mark.slow
def test_a_pruned_student_is_quantized_and_judged_in_int8(tmp_path):
    teacher, data = make_inputs(tmp_path)
    arguments = small_run(
        teacher, data, tmp_path / "run", "--epochs", "2", "--quantize", "int8", "--quantize.samples", "32"
    )
    arguments += ["--speedup", "1.5", "--student", "teacher", "--prune.samples", "16", "--prune.trial_steps", "16"]
    arguments += ["--budget.retries", "0"]
    arguments += ["--min-score-share", "0.01", "--quantize.rounding", "gptq", "--quantize.smoothquant", "0.5"]
    run_to_success("distill", arguments)
    report = report_of(tmp_path / "run")
    (student,) = report["pruning"]["students"]
    assert student["quantized"]["precision"] == "int8"
    whole, cut = (next(e for e in report["models"] if e["name"] == name) for name in ("teacher", "student"))
    assert cut["params"] < whole["params"]
    judged = {(e["name"], e["runtime"], e["precision"]) for e in report["models"] if "validation" in e}
    assert judged == {("teacher", "onnxruntime", "fp32"), ("student", "onnxruntime", "int8")}
    proofs = json.loads(next((tmp_path / "run").glob("export-*/*/manifest.json")).read_text())["metrics"]["parity"]
    assert {p["target"] for p in proofs} >= {"onnx"}


def test_a_dry_run_lists_the_stages_of_a_student_with_a_separate_teacher(float_student, tmp_path):
    teacher, data = make_inputs(tmp_path)
    message = run_to_success(
        "quantize",
        [
            *quantize_arguments(float_student, data, tmp_path / "run"),
            "--teacher",
            str(teacher),
            "--dry-run",
            "--predict",
            "false",
        ],
    )
    assert not (tmp_path / "run").exists()
    for stage in ("data", "cache", "student-by-label", "quantize", "export", "evaluate", "report"):
        assert f" {stage} " in message, stage


def test_a_quantized_model_is_rejected(quantized_run, tmp_path, monkeypatch, capsys):
    make_inputs(tmp_path)
    arguments = quantize_arguments(
        stage_folder(quantized_run[0], "quantize") / "model", tmp_path / "data", tmp_path / "run"
    )
    message = rejection_of(quantize, arguments, monkeypatch, capsys)
    assert "already quantized (quantization.safetensors)" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--export", "executorch", "--scheme", "int8-static"],
            "export executorch: doesn't support int8-static: XNNPACK",
        ),
        (["--export", "tflite"], "export: expected one or several of"),
        (["--speedup", "4"], "budget: expected none with student.trained"),
        (["--student.spec", "layers=2"], "student.trained: expected a checkpoint or teacher"),
        (["--quantize.samples", "1"], "expected at least 2 texts to calibrate on, found 1"),
    ],
)
def test_invalid_settings_are_rejected_before_the_run(arguments, message, float_student, tmp_path, monkeypatch, capsys):
    make_inputs(tmp_path)
    usual = quantize_arguments(float_student, tmp_path / "data", tmp_path / "run")
    if "--student.spec" in arguments:
        usual = ["--teacher", *usual[1:]]
    assert message in rejection_of(quantize, [*usual, *arguments], monkeypatch, capsys)


def test_a_missing_runtime_is_rejected_with_the_package_to_install(float_student, tmp_path, monkeypatch, capsys):
    make_inputs(tmp_path)
    monkeypatch.setattr("compress.export.common.targets.find_spec", lambda name: None)
    arguments = [*quantize_arguments(float_student, tmp_path / "data", tmp_path / "run"), "--export", "openvino"]
    assert "pip install -e '.[openvino]'" in rejection_of(quantize, arguments, monkeypatch, capsys)


def test_weights_that_are_not_finite_are_rejected(float_student, tmp_path, monkeypatch, capsys):
    make_inputs(tmp_path)
    broken = tmp_path / "broken"
    shutil.copytree(float_student, broken)
    weights = load_file(broken / "model.safetensors")
    name = next(n for n in weights if n.endswith("intermediate.dense.weight"))
    weights[name][0, 0] = float("nan")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    message = rejection_of(
        quantize, quantize_arguments(broken, tmp_path / "data", tmp_path / "run"), monkeypatch, capsys
    )
    assert "NaN" in message or "aren't finite" in message
