"""`--frontier` on tiny models: pruned students beside students without attention, and which of them to take."""

from pathlib import Path

import pytest

from distill.checkpoint.custom_models import load_model_folder
from pipelines import distill, prune
from support.commands import QUICK_MEASUREMENT, rejection_of, run_to_success, small_run
from support.reports import report_of
from support.run_inputs import make_classifier_inputs, make_inputs

UNREACHABLE = "4000x"
VECTORS = "static,embeddings=8;gru,hidden=16,embeddings=8"
STUDENTS = ("student-1.3x", "student-static-embeddings8", "student-gru-hidden16-embeddings8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a classifier and its data."""
    folder = tmp_path_factory.mktemp("frontier")
    make_classifier_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def arguments(folder) -> list[str]:
    return [
        *("--model", str(folder / "model"), "--data", str(folder / "data"), "--output", str(folder / "run")),
        *("--frontier", "true", "--speedup", f"1.3,{UNREACHABLE.removesuffix('x')}"),
        *("--student.attention_free", VECTORS, "--epochs", "2", "--batch-size", "8"),
        *("--attention_free_train.epochs", "2", "--attention_free_train.batch_size", "16"),
        *("--precision", "32", "--threads", "1", *QUICK_MEASUREMENT),
        *("--data.max_length", "32", "--learning-rate", "1e-3"),
        *("--prune.samples", "32", "--prune.trial_steps", "2", "--budget.rounds", "1", "--budget.retries", "0"),
        *("--budget.runtime", "pytorch", "--budget.precision", "fp32"),
    ]


@pytest.fixture(scope="module")
def printed(arguments) -> str:
    return run_to_success("prune", arguments)


@pytest.mark.slow
def test_every_family_is_trained_scored_and_published(folder, printed):
    report = report_of(folder / "run")
    assert {entry["name"] for entry in report["models"]} == {"teacher", *STUDENTS}
    judged = {entry["name"] for entry in report["models"] if "validation" in entry}
    assert judged == {"teacher", *STUDENTS}
    for name in STUDENTS:
        assert load_model_folder(folder / "run" / name).config.num_labels == 5
    assert [each["name"] for each in report["pruning"]["students"]] == [STUDENTS[0]]


@pytest.mark.slow
def test_a_speed_that_no_shape_reaches_has_no_pruned_student(folder, printed):
    assert f"shape-{UNREACHABLE}: no pruned student: budget {UNREACHABLE}: expected a shape" in printed
    assert not (folder / "run" / f"distill-{UNREACHABLE}").exists()


@pytest.mark.slow
def test_the_report_says_which_student_to_take(folder, printed):
    assert "Which student to take" in printed
    page = (folder / "run" / "report.html").read_text()
    assert "<h2>Which student to take</h2>" in page
    assert "of the teacher's accuracy, take student-" in page.replace("&#39;", "'")


@pytest.mark.slow
def test_the_same_command_skips_everything(folder, printed, arguments):
    again = run_to_success("prune", arguments)
    assert "started" not in again


@pytest.mark.slow
def test_an_unreachable_speed_is_rejected_by_a_later_run_without_a_frontier(
    folder, printed, arguments, monkeypatch, capsys
):
    start = arguments.index("--frontier")
    alone = [*arguments[:start], *("--speedup", UNREACHABLE.removesuffix("x")), *arguments[start + 6 :]]
    assert f"budget {UNREACHABLE}: expected a shape" in rejection_of(prune, alone, monkeypatch, capsys)


def test_a_dry_run_lists_the_stages_of_all_students(tmp_path):
    inputs = make_inputs(tmp_path)
    dry = small_run(*inputs, tmp_path / "run", "--frontier", "true", "--dry-run", "--predict", "false")
    printed = run_to_success("distill", dry)
    for stage in ("shape-128x", "distill-2x", "distill-static", "distill-gru-hidden128", "export-cnn", "speed-64x"):
        assert stage in printed


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--latency-ms", "2"), "budget.frontier: expected speed-ups or nothing else, found latency_ms"),
        (
            ("--quantize", "int4"),
            "quantize.scheme: expected none (int8 is the budget's precision) with budget.frontier",
        ),
        (("--prune.schedule", "gradual"), "prune.schedule: expected oneshot with budget.frontier, found gradual"),
        (("--student.attention_free", "static;static"), "student.attention_free: expected different students"),
        (
            ("--student.attention_free", "layers=2"),
            "student.attention_free: expected specs of static, cnn, gru, found 'layers=2'",
        ),
        (("--student.attention_free", "cnm"), "cnm"),
        (("--student.attention_free", "static,layers=2"), "layers has no meaning for a static student"),
        (
            ("--student.attention_free", "static", "--task", "token-classification"),
            "student.attention_free static: expected text-classification",
        ),
    ],
)
def test_what_a_frontier_cannot_have_is_rejected_before_any_stage(more, message, tmp_path, monkeypatch, capsys):
    inputs = make_inputs(tmp_path)
    run_arguments = small_run(*inputs, tmp_path / "run", "--frontier", "true", *more)
    assert message in rejection_of(distill, run_arguments, monkeypatch, capsys)
    assert not (tmp_path / "run").exists()
