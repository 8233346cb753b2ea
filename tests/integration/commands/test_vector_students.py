"""Runs whose student has no attention: trained, exported, reported, and used again."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from compress.export.arrays.reader import Reader
from distill.checkpoint.custom_models import load_model_folder
from pipelines import distill, prune
from support.commands import rejection_of, run_to_success, small_run
from support.reports import report_of
from support.run_inputs import make_inputs
from support.task_data import multi_label_data, pair_data, regression_data, tagged_data
from support.tiny_models import FILLERS


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_inputs(tmp_path_factory.mktemp("vectors"))


def read_scores(output: Path) -> dict[tuple[str, str], float]:
    report = report_of(output)
    return {(each["name"], each["runtime"]): each["score"] for each in report["models"]}


@pytest.fixture(scope="module")
def static_run(inputs, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("static") / "run"
    more = (
        "--student",
        "static,ngrams=64",
        "--train.epochs",
        "20",
        "--train.learning_rate",
        "0.02",
        "--export",
        "onnxruntime,numpy",
    )
    tuned = ("--teacher_train.epochs", "30", "--teacher_train.dropout", "0")
    run_to_success("distill", small_run(*inputs, output, *more, *tuned))
    return output


@pytest.mark.slow
def test_a_static_student_is_trained_and_exported(static_run):
    student = load_model_folder(static_run / "student")
    assert (student.config.encoder, student.config.ngram_buckets) == ("static", 64)
    scores, report = read_scores(static_run), report_of(static_run)
    assert scores["student", "numpy"] == scores["student", "onnxruntime"] == scores["student", "pytorch"]
    assert scores["student", "pytorch"] > report["baseline"]["scores"]["accuracy"] + 0.2


@pytest.mark.slow
def test_a_finished_static_student_is_trained_on_and_not_pruned(static_run, inputs, tmp_path, monkeypatch, capsys):
    student = str(static_run / "student")
    run_to_success("distill", small_run(*inputs, tmp_path / "run", "--student", student, "--until", "distill"))
    arguments = ["--model", student, "--data", str(inputs[1]), "--speedup", "2", "--output", str(tmp_path / "pruned")]
    assert "budget: expected none for a static student" in rejection_of(prune, arguments, monkeypatch, capsys)


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "make_data"), [
    ("cnn,hidden=32", tagged_data), ("gru,hidden=32", tagged_data), ("gru", multi_label_data),
    ("cnn", regression_data), ("static", multi_label_data),
])  # fmt: skip
def test_students_of_other_tasks_score_in_their_files_what_they_score_in_torch(spec, make_data, body_folder, tmp_path):
    data = make_data(tmp_path / "data")
    more = ("--student", spec, "--epochs", "10", "--teacher_train.epochs", "5")
    run_to_success("distill", small_run(body_folder, data, tmp_path / "run", *more))
    scores = read_scores(tmp_path / "run")
    assert scores["student", "onnxruntime"] == pytest.approx(scores["student", "pytorch"], abs=1e-6)


@pytest.mark.parametrize("more", [(), ("--quantize", "int8", "--export", "numpy")])
def test_a_dry_run_tells_the_size_of_a_student(more, inputs, tmp_path, capsys):
    distill.main(small_run(*inputs, tmp_path / "run", "--student", "cnn", "--dry-run", "--predict", "false", *more))
    assert "nothing was written" in capsys.readouterr().out


def test_arrays_are_rejected_for_a_student_with_attention(inputs, tmp_path, monkeypatch, capsys):
    arguments = small_run(*inputs, tmp_path / "run", "--student", "layers=2", "--export", "onnxruntime,numpy")
    message = rejection_of(distill, arguments, monkeypatch, capsys)
    assert "export numpy: expected student static or cnn or gru, found 'layers=2'" in message


@pytest.mark.parametrize(("more", "message"), [
    (("--speedup", "4"), "budget: expected none for a static student, found a target speed"),
    (("--quantize", "int4", "--export", "numpy"), "export numpy: doesn't support int4: numpy has no 4-bit integers"),
    (("--student", "static,ngrams=64", "--export", "openvino"), "export openvino: expected a student without ngrams"),
    (("--student", "static,pooling=mean", "--export", "model2vec"),
     "export model2vec: expected student static, pooling=weighted and no ngrams, found static, pooling=mean:"),
    (("--student", "cnn", "--export", "static-embedding"), "found cnn, pooling=mean+max"),
    (("--student", "layers=2", "--export", "model2vec"), "export model2vec: expected student static, found 'layers=2'"),
    (("--loss.hidden", "1"), "loss: expected terms on its outputs for a static student, found hidden"),
    (("--task", "token-classification"), "expected text-classification, multi-label, regression, sentence-embedding"),
    (("--task", "causal-lm"), "found causal-lm; take a student with attention, such as layers=2"),
])  # fmt: skip
def test_settings_that_a_student_without_attention_does_not_support_are_rejected(
    more, message, inputs, tmp_path, monkeypatch, capsys
):
    arguments = small_run(*inputs, tmp_path / "run", "--student", "static", *more)
    assert message in rejection_of(distill, arguments, monkeypatch, capsys)
    assert not list((tmp_path / "run").glob("*/*"))


def test_pairs_are_rejected_before_training_for_a_library_of_single_texts(body_folder, tmp_path, monkeypatch, capsys):
    pytest.importorskip("model2vec")
    more = ("--student", "static", "--export", "model2vec", "--task", "regression")
    arguments = small_run(body_folder, pair_data(tmp_path / "pairs"), tmp_path / "run", *more)
    message = rejection_of(distill, arguments, monkeypatch, capsys)
    assert "export model2vec: expected rows of one text, found pairs" in message
    assert not (tmp_path / "run" / "teacher").exists()


@pytest.fixture
def untyped_folder(body_folder, tmp_path) -> Path:
    """A model whose tokenizer doesn't say which of two texts a token belongs to, as RoBERTa's."""
    folder = Path(shutil.copytree(body_folder, tmp_path / "untyped"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "attention_mask"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_pairs_without_token_types_are_rejected_before_training(untyped_folder, tmp_path, monkeypatch, capsys):
    more = ("--student", "static", "--task", "regression")
    arguments = small_run(untyped_folder, pair_data(tmp_path / "pairs"), tmp_path / "run", *more)
    message = rejection_of(distill, arguments, monkeypatch, capsys)
    assert "student static: expected a tokenizer with token_type_ids for pairs of texts, found" in message
    assert not (tmp_path / "run" / "teacher").exists()


def test_a_frontier_leaves_out_what_cannot_read_pairs(untyped_folder, tmp_path):
    more = ("--frontier", "true", "--speedup", "2", "--task", "regression", "--until", "cache")
    printed = run_to_success(
        "distill", small_run(untyped_folder, pair_data(tmp_path / "pairs"), tmp_path / "run", *more)
    )
    assert "no students without attention: student" in printed
    assert "expected a tokenizer with token_type_ids for pairs of texts" in printed


@pytest.mark.slow
def test_integers_of_a_quantized_student_are_the_same_in_numpy_and_on_runtimes(inputs, tmp_path):
    more = ("--student", "static,ngrams=64", "--quantize", "int8", "--export", "onnxruntime,numpy", "--epochs", "10")
    run_to_success("distill", small_run(*inputs, tmp_path / "run", *more))
    report = report_of(tmp_path / "run")
    rounded = {each["runtime"]: each for each in report["models"] if each["precision"] == "int8"}
    assert {*rounded} == {"numpy", "onnxruntime"}
    for each in rounded.values():
        assert each["parity"]["layers"] < 1e-5
        assert each["parity"]["agreement"] >= 0.995
    stored = np.load(tmp_path / "run" / "student" / "numpy-int8" / "weights.npz")
    assert stored["words"].dtype == stored["ngrams"].dtype == np.int8


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "formats"), [
    ("static", "onnxruntime,numpy,model2vec,static-embedding"), ("cnn,hidden=32", "onnxruntime,numpy"),
])  # fmt: skip
def test_a_sentence_encoders_student_keeps_the_similarity_of_pairs_in_all_its_files(
    spec, formats, body_folder, tmp_path
):
    for library in ("model2vec", "sentence_transformers"):
        pytest.importorskip(library)
    more = ("--student", spec, "--epochs", "20", "--learning-rate", "1e-2", "--task", "sentence-embedding")
    data, output = pair_data(tmp_path / "pairs"), tmp_path / "run"
    run_to_success("distill", small_run(body_folder, data, output, *more, "--export", formats))
    scores = read_scores(output)
    assert scores["student", "pytorch"] > 0.3
    for runtime in ("numpy", "onnxruntime"):
        assert scores["student", runtime] == pytest.approx(scores["student", "pytorch"], abs=1e-3)
    if spec == "static":
        from model2vec import StaticModel
        from sentence_transformers import SentenceTransformer

        vectors = StaticModel.from_pretrained(output / "student" / "model2vec").encode(FILLERS[:9])
        same = SentenceTransformer(str(output / "student" / "static-embedding"), device="cpu").encode(FILLERS[:9])
        np.testing.assert_allclose(vectors, same, atol=1e-6)
    assert "AutoModel.from_pretrained" in (output / "student" / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["static", "gru,hidden=32"])
def test_a_student_without_attention_is_trained_for_regression_on_pairs(spec, body_folder, tmp_path):
    more = ("--student", spec, "--task", "regression", "--export", "onnxruntime,numpy", "--epochs", "10")
    run_to_success("distill", small_run(body_folder, pair_data(tmp_path / "data"), tmp_path / "run", *more))
    scores = read_scores(tmp_path / "run")
    for runtime in ("numpy", "onnxruntime"):
        assert scores["student", runtime] == pytest.approx(scores["student", "pytorch"], abs=1e-6)
    assert load_model_folder(tmp_path / "run" / "student").config.pair


@pytest.mark.slow
def test_exports_truncate_texts_at_the_side_of_the_teachers_tokenizer_and_the_card_counts_them(inputs, tmp_path):
    teacher = Path(shutil.copytree(inputs[0], tmp_path / "teacher"))
    settings = json.loads((teacher / "tokenizer_config.json").read_text())
    (teacher / "tokenizer_config.json").write_text(json.dumps(settings | {"truncation_side": "left"}))
    arguments = small_run(teacher, inputs[1], tmp_path / "run", "--student", "static", "--data.max_length", "8")
    run_to_success("distill", [*arguments, "--export", "onnxruntime,numpy"])
    reader = Reader(tmp_path / "run" / "student" / "numpy")
    beginning, end = " ".join(FILLERS[:8]), " ".join(FILLERS[8:14])
    (_, whole), (_, alone), (_, other) = reader.classify([f"{beginning} {end}", end, beginning], max_length=8)
    np.testing.assert_array_equal(whole, alone)
    assert not np.allclose(whole, other)
    truncated = report_of(tmp_path / "run")["data"]["truncated"]
    assert f"{truncated:,} texts of train and validation exceeded" in (tmp_path / "run/student/README.md").read_text()
