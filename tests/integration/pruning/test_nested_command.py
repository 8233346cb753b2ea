"""A nested family: students of several speeds as slices of one set of weights."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from compress.prune.importance.restrict import restrict_scores
from compress.prune.importance.scores import Scores, compute_fingerprint
from distill.checkpoint.custom_models import load_model_folder
from distill.slicing import Shape, find_axes, prune
from distill.slicing.nested import load_slice
from pipelines import distill
from pipelines.settings.plan import nested_stages
from pipelines.stages.prune import faster_shape
from support.commands import rejection_of, run_to_success, small_run
from support.measured_speeds import list_finished, record_speed
from support.pruning_axes import tiny_model_with_axes
from support.reports import report_of
from support.run_inputs import make_classifier_inputs, make_inputs

NAMES = ("1.2x", "1.5x", "2x")
FAMILY = ("--student", "teacher", "--speedup", "1.2,1.5,2", "--nested", "true", "--prune.trial_steps", "2")
FAMILY += ("--budget.runtime", "pytorch", "--budget.precision", "fp32", "--budget.batch", "4", "--budget.rounds", "2")
FAMILY += ("--prune.samples", "32", "--epochs", "2", "--prune.vocabulary", "false", "--budget.retries", "0")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> tuple[Path, Path]:
    return make_classifier_inputs(tmp_path_factory.mktemp("nested"))


@pytest.fixture(scope="module")
def family(inputs, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("family") / "run"
    run_to_success("distill", small_run(*inputs, output, *FAMILY))
    return output


def find_stage(output: Path, name: str) -> Path:
    (folder,) = (output / name).glob("*/manifest.json")
    return folder.parent


def count_products(sizes: dict) -> int:
    """Returns the multiplications per token in the matrices of a shape's layers; heads are 8 wide."""
    return sizes["hidden"] * (4 * 8 * sum(sizes["heads"]) + 2 * sum(sizes["ffn"]))


def copy_with_slow_student(family: Path, output: Path) -> Path:
    """Copies a finished run to `output`, with measurements by which its second student alone is too slow."""
    shutil.copytree(family, output)
    for name, share in zip(NAMES, (1.0, 0.8, 1.0), strict=True):
        (speed,) = list_finished(output, f"speed-{name}")
        record_speed(speed, share)
    return output


@pytest.mark.slow
def test_every_student_is_a_slice_of_the_largest_and_is_exported_alone(family):
    largest = load_model_folder(family / "nested").state_dict()
    sizes = []
    for name in NAMES:
        student, piece = load_model_folder(family / f"student-{name}"), load_slice(family / "nested", name)
        weights, cut = student.state_dict(), piece.state_dict()
        assert list(weights) == list(cut)
        assert all(torch.equal(weights[each], cut[each]) for each in cut)
        assert (family / f"student-{name}" / "onnxruntime" / "model.onnx").is_file()
        sizes.append(student.num_parameters())
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1]
    assert sum(each.numel() for each in largest.values()) >= sizes[0]


@pytest.mark.slow
def test_the_family_is_trained_once_and_reported_as_other_students_are(family):
    report = report_of(family)
    assert {each["name"] for each in report["models"]} == {"teacher", *(f"student-{name}" for name in NAMES)}
    assert [each["name"] for each in report["pruning"]["students"]] == [f"student-{name}" for name in NAMES]
    logs = [name for name in NAMES if list(find_stage(family, f"distill-{name}").glob("logs/*/metrics.csv"))]
    assert logs == ["1.2x"], "slices have no training of their own"


@pytest.mark.slow
def test_a_family_is_trained_to_the_same_bits_again(family, inputs):
    before = (find_stage(family, "distill-1.2x") / "model" / "model.safetensors").read_bytes()
    for name in NAMES:
        find_stage(family, f"distill-{name}").rename(family / f"old-{name}")
    run_to_success("distill", small_run(*inputs, family, *FAMILY, "--until", "distill"))
    assert (find_stage(family, "distill-1.2x") / "model" / "model.safetensors").read_bytes() == before


@pytest.fixture(scope="module")
def family_cut_again(family, inputs, tmp_path_factory) -> tuple[Path, str]:
    """The family after its second student was measured as too slow, and what the command printed."""
    output = copy_with_slow_student(family, tmp_path_factory.mktemp("again") / "run")
    return output, run_to_success("distill", small_run(*inputs, output, *FAMILY, "--budget.retries", "1"))


@pytest.mark.slow
def test_a_family_with_a_student_that_is_too_slow_is_cut_again_from_that_student_on(family_cut_again):
    output, message = family_cut_again
    assert "speed-1.5x: too slow: pruned again, to 1.25 times its speed, and trained again" in message
    counts = {name: len(list_finished(output, name)) for name in ("shape-1.2x", "shape-1.5x", "shape-2x", "cut-1.5x")}
    assert counts == {"shape-1.2x": 1, "shape-1.5x": 2, "shape-2x": 2, "cut-1.5x": 2}
    before, after = (
        json.loads((folder / "shape.json").read_text())["sizes"] for folder in list_finished(output, "shape-1.5x")
    )
    assert count_products(after) < count_products(before), "fewer units, or a narrower or shallower shape"
    for name in NAMES:
        student, piece = load_model_folder(output / f"student-{name}"), load_slice(output / "nested", name)
        assert all(torch.equal(value, piece.state_dict()[each]) for each, value in student.state_dict().items())
    retries = {each["name"]: each["target"]["retries"] for each in report_of(output)["models"] if "target" in each}
    assert retries == {"student-1.2x": 0, "student-1.5x": 1, "student-2x": 0}


@pytest.mark.slow
def test_a_repeated_command_cuts_no_family_again(family_cut_again, inputs):
    output, _ = family_cut_again
    message = run_to_success("distill", small_run(*inputs, output, *FAMILY, "--budget.retries", "1"))
    assert ": started (" not in message


@pytest.mark.slow
def test_a_family_whose_students_have_no_faster_shape_stays_as_it_is(family, inputs, tmp_path, monkeypatch, capsys):
    output = copy_with_slow_student(family, tmp_path / "run")
    monkeypatch.setattr(faster_shape, "shrink_shape", lambda *_: None)
    monkeypatch.setattr(faster_shape, "find_other_shape", lambda *_: None)
    distill.main(small_run(*inputs, output, *FAMILY, "--budget.retries", "1"))
    assert "no faster shape was found" in capsys.readouterr().out
    assert len(list_finished(output, "distill-1.2x")) == 1


def test_the_plan_lists_the_stages_of_a_family():
    assert nested_stages(["4x", "10x", "15x"]) == [
        "shape-4x", "cut-4x", "shape-10x", "cut-10x", "shape-15x", "distill-4x", "distill-10x", "distill-15x",
    ]  # fmt: skip


def test_restricted_scores_are_those_of_the_remaining_units():
    model, axes = tiny_model_with_axes("bert")
    values = {axis.name: torch.randn(axis.units, dtype=torch.float64) for axis in axes if axis.kind != "vocabulary"}
    scores = Scores("fisher", values, torch.arange(4.0), 8, 80, compute_fingerprint(model))
    kept_units = {
        "hidden": torch.arange(0, 32, 2),
        "layers.3.heads": torch.tensor([1, 2]),
        "layers.1.ffn": torch.tensor([7]),
    }
    shape = Shape((1, 3), kept_units)
    small = prune(model, axes, shape)
    restricted = restrict_scores(scores, shape, small, find_axes(small))
    assert restricted.fingerprint == compute_fingerprint(small)
    assert restricted.layers.tolist() == [1.0, 3.0]
    assert torch.equal(restricted.values["hidden"], values["hidden"][::2])
    assert torch.equal(restricted.values["layers.1.heads"], values["layers.3.heads"][1:3])
    assert torch.equal(restricted.values["layers.0.heads"], values["layers.1.heads"])
    assert "layers.0.ffn" not in restricted.values, "one neuron is left, so that nothing can be chosen"


@pytest.mark.parametrize(("more", "message"), [
    (("--speedup", "2"), "budget.speedup: expected two or more speeds, such as 4,10,15, with prune.nested, found 2"),
    (("--prune.schedule", "gradual"), "prune.schedule: expected oneshot with prune.nested, found gradual"),
    (("--prune.embedding_rank", "8"), "prune.embedding_rank: expected 0 with prune.nested, found 8"),
    (("--loss.hidden", "1"), "loss: expected terms on outputs with prune.nested, found terms on layers"),
    (("--loss.balance_every", "10"), "loss.balance_every: expected 0 with prune.nested, found 10"),
    (("--sparsity.pattern", "2:4"), "sparsity.pattern: expected none with prune.nested, found 2:4"),
])  # fmt: skip
def test_what_a_nested_family_cannot_have_is_rejected_before_any_stage(more, message, tmp_path, monkeypatch, capsys):
    teacher, data = make_inputs(tmp_path)
    arguments = small_run(teacher, data, tmp_path / "run", *FAMILY, *more)
    assert message in rejection_of(distill, arguments, monkeypatch, capsys)
    assert not list((tmp_path / "run").glob("*/*"))
