"""Tests the recommended student for each acceptable drop in score."""

import pytest

from pipelines.reports.pruning_table import write_pruning_notes
from pipelines.reports.recommendation import build_recommendations, recommend_students, write_recommendations
from pipelines.reports.render import render_html
from support.sample_reports import WHOLE, family_curves, family_report

KEPT = {"teacher": 0.9, "student-2x": 0.9, "student-4x": 0.882, "student-8x": 0.891, "student-15x": 0.84}


@pytest.fixture
def family():
    report = family_report()
    for entry in report["models"]:
        entry.pop("validation", None)
        precision = "fp32" if entry["name"] == "teacher" else "int8"
        if (entry["runtime"], entry["precision"]) == ("onnxruntime", precision):
            entry["validation"] = KEPT[entry["name"]]
    return report


def test_the_fastest_student_that_keeps_enough_is_recommended(family):
    recommended = recommend_students(family)
    assert [(each.score_drop, each.name) for each in recommended] == [
        (0.0, "student-2x"),
        (0.01, "student-8x"),
        (0.1, "student-15x"),
    ]
    assert recommended[1].kept == pytest.approx(0.99)
    speeds = [each.speedup for each in recommended]
    assert speeds == sorted(speeds)


def test_a_slower_student_that_keeps_less_is_never_recommended(family):
    assert "student-4x" not in {each.name for each in recommend_students(family)}


def test_the_table_and_the_page_name_the_recommended_students(family):
    table = build_recommendations(family)
    assert [row[:2] for row in table.rows] == [
        ["0.0 %", "student-2x"], ["1.0 %", "student-8x"], ["10.0 %", "student-15x"],
    ]  # fmt: skip
    page = render_html(family, family_curves())
    for sentence in write_recommendations(family):
        assert sentence.replace("'", "&#39;") in page


def test_without_validation_scores_nothing_is_recommended():
    report = family_report()
    for entry in report["models"]:
        entry.pop("validation", None)
    assert build_recommendations(report) is None
    assert "Which student to take" not in render_html(report, family_curves())


def test_a_student_with_all_layers_and_units_is_noted(family):
    assert not any("has all layers and units" in note for note in write_pruning_notes(family))
    family["pruning"]["students"][0]["sizes"] = WHOLE
    (note,) = [note for note in write_pruning_notes(family) if "has all layers and units" in note]
    assert note.startswith("student-2x has all layers and units: the whole model in int8 is fast enough.")
