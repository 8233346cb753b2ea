"""Tests report rendering: a self-contained page, a model card that parses, and a table for the terminal."""

import copy
import re

import pytest

from pipelines.reports.render import render_card, render_html
from pipelines.reports.tables import build_summary
from support.sample_reports import (
    Page,
    front_matter,
    sample_curves,
    sample_report,
    tiny_model,
    without_teacher,
)


@pytest.fixture
def report():
    return sample_report()


def test_the_page_is_self_contained(report):
    source = render_html(report, sample_curves())
    page = Page(source)
    links = [value for name, value in page.attributes if name.split(":")[-1] in ("src", "href", "srcset", "action")]
    assert links
    assert all(link.startswith(("#", "data:")) for link in links)
    assert "script" not in page.tags
    assert "@import" not in source
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", source))


def test_the_page_contains_the_measured_figures(report):
    text = " ".join(Page(render_html(report, sample_curves())).text.split())
    assert "The student keeps 98.4 % of the teacher's accuracy at 3.60× its speed on ONNX Runtime." in text
    for figure in (
        "91.54 %",
        "93.05 %",
        "22.7 M",
        "19.5 MB",
        "1.25 ms",
        "95.1 %",
        "9,003",
        "1,234.6",
        "1.26 GB",
        "2.13.0",
    ):
        assert figure in text
    assert "The standard error of an accuracy of 91.54 % on 3,080 texts is 0.50 percentage points." in text
    assert "skipped, already complete" in text


def test_the_page_has_a_chart_for_each_log_with_points(report):
    def charts(curves):
        return Page(render_html(report, curves)).tags.count("svg")

    assert charts({}) == 2
    assert charts({"teacher": [], "distill": []}) == 2
    assert charts({"distill": [{"step": 5, "lr": 1e-4}, {"step": 6, "train/loss": float("nan")}]}) == 2
    assert charts({"teacher": [{"step": 5, "train/loss": 1.0, "train/ce": 1.0}]}) == 3
    assert charts(sample_curves()) == 2 + 2 + 3


def test_the_page_escapes_names_chosen_by_users(report):
    evil = "<script>alert('$x$ & y')</script>"
    report["data"]["path"] = report["stages"][0]["folder"] = report["models"][0]["runtime"] = evil
    report["config"] = {evil: evil}
    report["machine"]["processor"] = report["versions"]["torch"] = evil
    page = Page(render_html(report, {evil: [{"step": 1, f"train/{evil}": 1.0}, {"step": 2, f"train/{evil}": 0.5}]}))
    assert "script" not in page.tags
    assert page.text.count(evil) >= 7


def test_rendering_the_same_report_twice_gives_the_same_page(report):
    assert render_html(report, sample_curves()) == render_html(report, sample_curves())


def test_a_report_without_a_teacher_renders(report):
    alone = without_teacher(report)
    text = Page(render_html(alone, {})).text
    assert "The student reaches 91.54 % accuracy in 1.25 ms per text on ONNX Runtime." in text
    assert "teacher's" not in text
    assert "trained on its teacher's predictions" not in render_card(alone)
    assert build_summary(alone)[1][0][-2:] == ["–", "–"]


def test_a_report_with_scores_of_zero_renders(report):
    for model in report["models"]:
        model["score"] = 0.0
    assert "reaches 0.00 % accuracy" in render_html(report, {})


def test_the_headline_names_the_fastest_runtime_and_precision(report):
    quantized = copy.deepcopy(report["models"][3])
    quantized |= {"runtime": "openvino", "precision": "int8", "latency_batched": None, "parity": None}
    quantized["latency"]["best_ms"] = 0.61
    quantized["speedup"] = {"vs_teacher_pytorch": 15.6, "vs_teacher_same_runtime": None}
    report["models"].append(quantized)
    text = Page(render_html(report, {})).text
    assert "keeps 98.4 % of the teacher's accuracy and takes 0.61 ms per text on OpenVINO int8." in text


def test_the_summary_has_a_row_for_each_model_and_runtime(report):
    header, rows = build_summary(report)
    assert header == ["model", "runtime", "accuracy", "params", "size in MB", "ms, batch 1", "speedup", "agreement"]
    assert rows[3] == ["student", "ONNX Runtime", "91.54 %", "4.8 M", "19.5", "1.25", "3.60×", "95.1 %"]
    assert {len(row) for row in rows} == {len(header)}


def test_the_cards_front_matter_parses(report):
    expected = {
        "library_name": "transformers",
        "pipeline_tag": "text-classification",
        "tags": ["stillroom", "knowledge-distillation"],
    }
    assert front_matter(render_card(report)) == expected
    assert front_matter(render_card(report | {"license": "apache-2.0"})) == expected | {"license": "apache-2.0"}


def test_the_cards_table_escapes_its_cells(report):
    report["models"][0]["runtime"] = "a|b\n<script>"
    lines = [line for line in render_card(report).splitlines() if line.startswith("|")]
    assert len(lines) == 6
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {9}
    assert "<script>" not in "".join(lines)


def test_the_card_lists_known_problems_of_the_data(report):
    card = render_card(report)
    assert "- Test: 29 of 3,080 texts also occur in train, and stay in both.\n" in card
    assert "too long" not in card


@pytest.mark.slow
def test_the_cards_snippets_run(report, tmp_path, capsys):
    """The snippets run unchanged on a tiny model that is exported for them."""
    from compress.export.common.huggingface import export_huggingface
    from compress.export.onnx.graph import export_onnx

    model, tokenizer = tiny_model(tmp_path)
    folders = [tmp_path / 'a "quoted" folder', tmp_path / "onnx"]
    export_huggingface(model, tokenizer, folders[0])
    export_onnx(model, tokenizer, folders[1], ["input_ids", "attention_mask"])
    for model_entry, folder in zip(report["models"][2:], folders, strict=True):
        model_entry["path"] = str(folder)
    snippets = re.findall(r"```python\n(.*?)```", render_card(report), re.DOTALL)
    assert len(snippets) == 2
    for snippet in snippets:
        exec(compile(snippet, "card", "exec"), {})
        assert re.search("arrival|pin", capsys.readouterr().out)
