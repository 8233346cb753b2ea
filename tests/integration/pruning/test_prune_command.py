"""`python -m pipelines.prune` on tiny models: budgets, the built students, the report and rejections."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForSequenceClassification, BertForSequenceClassification

from compress.prune.budget import TOLERANCE, Budget
from compress.prune.reconstruction import load_moments
from distill.checkpoint.custom_models import load_model_folder
from distill.data.config import DataConfig
from distill.errors import InputError
from distill.teacher.config import TeacherConfig
from distill.train.config import TrainConfig
from pipelines import prune
from pipelines.runs.files import write_json
from pipelines.runs.stage import Artefact
from pipelines.settings.commands.distill import DistillConfig
from pipelines.stages.prepare.vocabulary import load_student_tokenizer
from pipelines.stages.run_stages import check_scores
from pipelines.stages.train.student_start import MOMENTS, StudentStart
from support.commands import QUICK_MEASUREMENT, rejection_of, run_to_success, start
from support.reports import report_of
from support.run_inputs import write_csv, write_data
from support.tiny_models import LABELS, VOCABULARY, build_model, make_rows, saved, word_tokenizer

UNUSED = [f"{word}ish" for word in VOCABULARY[-40:]]
# No exports during the search for a shape, and few calls in each of its measurements.
SEARCH = ("--budget.runtime", "pytorch", "--budget.precision", "fp32", "--budget.batch", "4", "--budget.retries", "0")


def prune_arguments(model: Path, data: Path, output: Path, *more: str) -> list[str]:
    return [
        *("--model", str(model), "--data", str(data), "--output", str(output), "--epochs", "2", "--batch-size", "8"),
        *("--precision", "32", "--threads", "1", *QUICK_MEASUREMENT),
        *("--data.max_length", "32", "--learning-rate", "1e-3"),
        *("--prune.samples", "32", "--prune.trial_steps", "2", *more),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("prune")


@pytest.fixture(scope="module")
def model(folder) -> Path:
    """A classifier with layers wide enough for measurable latencies, and with tokens that no text uses."""
    vocabulary = [*VOCABULARY, *UNUSED]
    model = build_model("bert", intermediate_size=512, vocab_size=len(vocabulary))
    return saved(model, word_tokenizer(vocabulary), folder / "model")


@pytest.fixture(scope="module")
def data(folder) -> Path:
    return write_data(folder / "data")


def make_faultless_teacher(folder: Path) -> tuple[Path, Path]:
    """Returns a classifier, and data that are labelled by its own answers."""
    classifier, tokenizer = build_model("bert", intermediate_size=512), word_tokenizer()
    texts = [text for text, _ in make_rows(160, 1)]
    encoded = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        classifier.classifier.bias -= classifier(**encoded).logits.mean(0)  # otherwise all answers are the same
        answers = classifier(**encoded).logits.argmax(1)
    rows = [(text, LABELS[answer]) for text, answer in zip(texts, answers, strict=True)]
    (folder / "data").mkdir()
    for split, part in (("train", rows[:120]), ("test", rows[120:])):
        write_csv(folder / "data" / f"{split}.csv", part)
    return saved(classifier, tokenizer, folder / "model"), folder / "data"


@pytest.fixture(scope="module")
def family(folder, model, data) -> tuple[Path, str]:
    """The output folder of a run with two students, and its printed output."""
    output = folder / "family"
    return output, run_to_success("prune", prune_arguments(model, data, output, "--speedup", "1.3,1.8", *SEARCH))


def read_metrics(output: Path, stage: str) -> dict:
    (manifest,) = (output / stage).glob("*/manifest.json")
    return json.loads(manifest.read_text())["metrics"]


def measurements_of(output: Path, stage: str) -> list[dict]:
    (shape,) = (output / stage).glob("*/shape.json")
    return json.loads(shape.read_text())["measurements"]


@pytest.mark.slow
def test_every_student_of_the_family_is_saved_and_the_fastest_is_smaller(family):
    output, _ = family
    entries = report_of(output)["models"]
    assert {entry["name"] for entry in entries} == {"teacher", "student-1.3x", "student-1.8x"}
    params = {entry["name"]: entry["params"] for entry in entries}
    assert params["student-1.8x"] < params["teacher"]
    for name in ("student-1.3x", "student-1.8x"):
        student = load_model_folder(output / name)
        assert student.num_parameters() == params[name]
        assert [student.config.id2label[i] for i in range(5)] == list(LABELS)
        assert (output / name / "onnx" / "model.onnx").is_file()


@pytest.mark.slow
def test_trials_run_where_the_mode_of_checkpointing_is_chosen_by_memory(model, data, tmp_path):
    more = ("--speedup", "1.3", *SEARCH, "--train.checkpointing", "auto", "--until", "distill")
    printed = run_to_success("prune", prune_arguments(model, data, tmp_path / "run", *more))
    assert re.search(r"candidates tried, .* learns best", printed)
    assert list((tmp_path / "run").glob("distill*/*/model"))


@pytest.mark.slow
def test_the_printed_speed_up_is_the_measured_one_and_misses_are_reported(family):
    output, message = family
    for name, requested in (("1.3x", 1.3), ("1.8x", 1.8)):
        shape = read_metrics(output, f"shape-{name}")
        assert shape["speedup"] == pytest.approx(shape["teacher_ms"] / shape["best_ms"])
        assert f"{shape['speedup']:.2f}x" in message
        missed = measurements_of(output, f"shape-{name}")[-1]["pooled_speedup"] < (1 - TOLERANCE) * requested
        assert missed == (f"shape-{name}: the target was missed" in message)


@pytest.mark.slow
def test_the_students_weights_have_the_sizes_of_the_shape(family):
    output, _ = family
    shape = json.loads(next((output / "shape-1.8x").glob("*/shape.json")).read_text())
    student = load_model_folder(output / "student-1.8x")
    sizes = shape["sizes"]
    assert student.config.hidden_size == sizes["hidden"]
    assert [layer.intermediate.dense.out_features for layer in student.bert.encoder.layer] == sizes["ffn"]
    heads = [layer.attention.self.query.out_features // 8 for layer in student.bert.encoder.layer]
    assert heads == sizes["heads"]
    assert len(shape["shape"]["layers"]) == len(heads)


@pytest.mark.slow
def test_tokens_that_no_text_uses_are_removed(family, data):
    output, _ = family
    tokenizer = load_student_tokenizer(output / "student-1.8x")
    assert len(tokenizer) == load_model_folder(output / "student-1.8x").config.vocab_size <= len(VOCABULARY)
    assert not set(UNUSED) & set(tokenizer.get_vocab())
    for text, _ in [*make_rows(40, 2), (" ".join(UNUSED), "")]:
        assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"]


@pytest.mark.slow
def test_another_speed_up_reuses_the_measured_stages(family, model, data):
    output, _ = family
    message = run_to_success(
        "prune", prune_arguments(model, data, output, "--speedup", "1.5", "--until", "distill", *SEARCH)
    )
    for stage in ("data", "teacher", "cache", "start", "costs", "scores"):
        assert f"{stage}: already complete, skipped" in message, stage
    assert "shape-1.5x: started" in message


@pytest.mark.slow
def test_exported_files_respect_the_size_limit_or_are_rejected(family, model, data, monkeypatch, capsys):
    output, _ = family
    max_bytes = int(0.97 * read_metrics(output, "shape-1.3x")["bytes"])
    requested = ("--speedup", "1.3", "--prune.trial_steps", "0", "--until", "distill", "--max-bytes")
    run_to_success("prune", prune_arguments(model, data, output, *requested, str(max_bytes), *SEARCH))
    sizes = [json.loads(file.read_text())["bytes"] for file in (output / "shape-1.3x").glob("*/shape.json")]
    assert min(sizes) <= max_bytes
    message = rejection_of(prune, prune_arguments(model, data, output, *requested, "9kB", *SEARCH), monkeypatch, capsys)
    assert "MB for the best shape, width " in message


@pytest.mark.slow
def test_a_uniform_student_is_a_stock_class_without_custom_code(folder, model, data):
    output = folder / "uniform"
    run_to_success("prune", prune_arguments(model, data, output, "--speedup", "1.5", "--uniform", "true", *SEARCH))
    config = json.loads((output / "student" / "config.json").read_text())
    assert "auto_map" not in config
    student = AutoModelForSequenceClassification.from_pretrained(output / "student")
    assert type(student) is BertForSequenceClassification
    (file,) = (output / "student").glob("*.safetensors")
    with safe_open(file, "pt") as weights:
        assert not [name for name in weights.keys() if "mask" in name or "gate" in name]  # noqa: SIM118


@pytest.mark.slow
def test_an_int8_student_is_deployed_as_it_was_measured(folder, model, data):
    output = folder / "int8"
    run_to_success(
        "prune",
        prune_arguments(model, data, output, "--speedup", "1.3", "--prune.trial_steps", "0", "--budget.retries", "0"),
    )
    entries = {(e["name"], e["runtime"], e["precision"]): e for e in report_of(output)["models"]}
    assert ("student", "onnxruntime", "int8") in entries
    assert ("teacher", "onnxruntime", "int8") not in entries, "the teacher is the one in fp32"
    small = entries["student", "onnxruntime", "int8"]
    measured = small["target"]
    assert small["speedup"]["vs_teacher_same_runtime"] == measured["speedup"]["value"]
    assert measured["speedup"]["value"] == pytest.approx(
        measured["teacher"]["best_ms"] / measured["student"]["best_ms"]
    )
    assert (output / "student" / "onnxruntime-int8" / "model.onnx").is_file()


@pytest.mark.slow
def test_a_pruned_student_can_be_pruned_again(family, folder, data):
    output, _ = family
    again = folder / "again"
    start = output / "student-1.3x"
    run_to_success(
        "prune", prune_arguments(start, data, again, "--speedup", "1.2", "--prune.trial_steps", "0", *SEARCH)
    )
    assert load_model_folder(again / "student").num_parameters() <= load_model_folder(start).num_parameters()


# --- rejections


@pytest.mark.slow
def test_an_unreachable_speed_up_is_rejected_with_the_best_point(folder, model, data, monkeypatch, capsys):
    output = folder / "unreachable"
    message = rejection_of(
        prune, prune_arguments(model, data, output, "--speedup", "5000", *SEARCH), monkeypatch, capsys
    )
    assert "budget 5000x: expected a shape that takes 0.00" in message
    assert "found none: the smallest, width 8, layers" in message
    assert list((output / "scores").glob("*/manifest.json")), "what was computed is kept"


@pytest.mark.slow
def test_a_student_below_the_minimum_score_is_written_and_the_command_ends_with_code_2(tmp_path):
    (model, data), output = make_faultless_teacher(tmp_path), tmp_path / "run"
    barely_trained = ("--epochs", "1", "--learning-rate", "1e-7", "--prune.trial_steps", "0", "--budget.rounds", "1")
    budget = ("--speedup", "1.5", "--min-score-share", "1.0", *SEARCH)
    process = start("prune", prune_arguments(model, data, output, *barely_trained, *budget))
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 2, printed
    assert "error: budget.min_score_share 1: expected at least 100.0% of the teacher's validation score" in printed
    scores = {entry["name"]: entry["validation"] for entry in report_of(output)["models"] if "validation" in entry}
    assert scores["teacher"] == 1
    assert scores["student"] < 0.9
    assert f"found that student keeps {scores['student']:.1%}. All files were written" in printed
    assert load_model_folder(output / "student").num_labels == len(LABELS)
    assert (output / "student" / "onnx" / "model.onnx").is_file()
    assert f"kept {100 * scores['student']:.2f} %" in (output / "report.html").read_text()


def test_students_below_the_minimum_score_are_rejected_by_name(data, tmp_path):
    config = DistillConfig(
        "out",
        teacher=TeacherConfig("t"),
        data=DataConfig(str(data)),
        budget=Budget(speedup="2,4", min_score_share=0.95),
    )
    evaluation = Artefact("evaluate", tmp_path, "", {})
    scored = {"teacher": 0.8, "student-2x": 0.79, "student-4x": 0.72}
    entries = [{"name": name, "precision": "fp32"} for name in scored]  # not deployed, so not judged
    entries += [{"name": name, "validation": score} for name, score in scored.items()]
    write_json(tmp_path / "evaluation.json", entries[:-1])
    check_scores(config, evaluation)
    write_json(tmp_path / "evaluation.json", entries)
    with pytest.raises(InputError, match=r"min_score_share 0.95: .* student-4x keeps 90.0%.* student-2x keeps 98.8%"):
        check_scores(config, evaluation)
    check_scores(replace(config, budget=Budget(speedup="2,4")), evaluation)


@pytest.mark.parametrize(
    ("scored", "message"),
    [
        (
            {"teacher": 0.8, "student-2x": 0.79, "student-4x": math.nan},
            r"found that student-4x keeps an undefined share\.",
        ),
        ({"teacher": math.nan, "student-2x": 0.79}, "found that student-2x keeps an undefined share"),
    ],
)
def test_an_undefined_score_is_below_the_minimum(scored, message, data, tmp_path):
    budget = Budget(speedup="2,4", min_score_share=0.95)
    config = DistillConfig("out", teacher=TeacherConfig("t"), data=DataConfig(str(data)), budget=budget)
    write_json(tmp_path / "evaluation.json", [{"name": name, "validation": score} for name, score in scored.items()])
    with pytest.raises(InputError, match=message):
        check_scores(config, Artefact("evaluate", tmp_path, "", {}))


@pytest.mark.parametrize(
    ("spec", "rank", "untrained"),
    [("teacher", 0, False), ("runs/x", 0, False), ("layers=2", 0, True), ("teacher", 8, True)],
)
def test_newly_built_students_count_as_untrained(spec, rank, untrained, tmp_path):
    start = Artefact("start", tmp_path, "", {"config": {"student": spec, "embedding_rank": rank}})
    pruned = StudentStart("4x", start, None, start)
    assert pruned.is_untrained is untrained
    if untrained:
        student, train = build_model("bert"), TrainConfig(learning_rate=1e-3)
        assert not pruned.is_unpruned(student), "it would be handed over as it was built"
        assert pruned.adapt_training(train, student) == train


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ((), "budget: expected a --speedup such as 10"),
        (("--speedup", "4", "--latency-ms", "2"), "found speedup and latency_ms: all but one"),
        (("--texts-per-second", "900", "--budget.length", "16,5000"), "budget.length: expected at most 64 tokens"),
        (("--speedup", "4", "--teacher.online", "true"), "recovers on the teacher's cached logits"),
        (("--speedup", "4", "--max-bytes", "10 potatoes"), "expected a size such as 10MB"),
        (
            ("--speedup", "4", "--budget.length", "5000"),
            "budget.length: expected at most 64 tokens, the positions of",
        ),
        (("--speedup", "4", "--budget.runtime", "tpu"), "expected onnxruntime, openvino, pytorch, found 'tpu'"),
    ],
)
def test_invalid_budgets_and_settings_are_rejected_before_the_run(
    more, expected, folder, model, data, monkeypatch, capsys
):
    output = folder / "rejected"
    assert expected in rejection_of(prune, prune_arguments(model, data, output, *more), monkeypatch, capsys)
    assert not output.exists()


@pytest.mark.slow
def test_a_dry_run_lists_the_stages_and_writes_nothing(folder, model, data):
    output = folder / "dry"
    message = run_to_success(
        "prune", prune_arguments(model, data, output, "--speedup", "1.3,5000", "--dry-run", *SEARCH)
    )
    assert not output.exists()
    planned, predicted = message.split("Predicted from a sample of the data")
    for stage in ("start", "costs", "scores", "shape-1.3x", "distill-5000x", "export-5000x", "evaluate", "report"):
        assert stage in planned, stage
    for stage in ("start", "costs", "scores", "shape-1.3x", "distill-1.3x"):
        assert stage in predicted, stage
    assert "the sample's student was rejected: budget 5000x: expected a shape" in predicted


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [("oneshot",), ("gradual",), ("iterative", "--prune.rounds", "2")])
def test_a_dry_run_predicts_every_stage_of_a_pruned_and_quantized_student(folder, model, data, schedule):
    more = ("--speedup", "1.3", "--prune.schedule", *schedule, "--quantize", "int8")
    message = run_to_success("prune", prune_arguments(model, data, folder / "predicted", *more, "--dry-run", *SEARCH))
    planned, predicted = message.split("Predicted from a sample of the data")
    stages = re.findall(r"│ (\S+) +│ will run", planned)
    assert re.findall(r"│ (\S+) +│ +[\d,]+ MB", predicted) == [
        *(stage for stage in stages if stage not in ("data", "report")),
        "all",
    ]


@pytest.mark.slow
def test_a_reconstructed_student_starts_from_other_weights_of_the_same_units(folder, model, data):
    output = folder / "reconstructed"
    run_to_success(
        "prune", prune_arguments(model, data, output, "--speedup", "1.3", *SEARCH, "--prune.reconstruct", "true")
    )
    scores, shape, start = (
        Artefact(stage, next((output / stage).glob("*")), "digest", {}) for stage in ("scores", "shape-1.3x", "start")
    )
    assert len(load_moments(scores.folder / MOMENTS)) == 8  # two layers of each of four read units
    plain, fitted = (StudentStart("1.3x", start, shape, None, moments).build_student() for moments in (None, scores))
    same, other = plain.state_dict(), fitted.state_dict()
    changed = {name for name, value in other.items() if not torch.equal(value, same[name])}
    assert changed
    assert all(name.endswith(("output.dense.weight", "output.dense.bias")) for name in changed)
