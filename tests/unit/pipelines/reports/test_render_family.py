"""Tests reports of a family of students: the pipeline table, verdicts, Pareto charts, and one card per student."""

import json
import re

import pytest

from pipelines.reports.charts import assign_colors, draw_figure
from pipelines.reports.headline import explain_headline_entry, headline_entry, write_headline
from pipelines.reports.pareto import Point, draw_front, draw_pareto_charts, mark_dominated
from pipelines.reports.pruning_summary import find_code, read_pruning
from pipelines.reports.pruning_table import build_pruning_table, build_speed_table
from pipelines.reports.render import render_card, render_cards, render_html
from pipelines.reports.targets import find_target_speed, write_verdicts
from pipelines.runs.stage import Artefact
from support.sample_reports import (
    SIZES,
    STUDENTS,
    WHOLE,
    Page,
    family_curves,
    family_report,
    front_matter,
    pruned_student_details,
    sample_curves,
    sample_report,
    tiny_model,
)


@pytest.fixture
def family():
    return family_report()


def test_a_pruned_student_beside_others_has_a_color_of_its_own():
    names = ["teacher", "student", "student-static", "student-cnn"]
    assert assign_colors(names) == {"teacher": 0, "student": 1, "student-static": 2, "student-cnn": 3}


def cells(report, stage, label):
    header, stages = build_pruning_table(report)
    (row,) = [row for name, row in dict(stages)[stage] if name == label]
    return dict(zip(header, row, strict=True))


def test_the_pipeline_table_of_a_family_shows_the_effect_of_every_stage(family):
    whole = "start: vocabulary", "shape: pruned units", "training", "int8", "target"
    assert [stage for stage, _ in build_pruning_table(family)[1]] == list(whole)
    assert cells(family, whole[0], "tokens of the vocabulary") == {"teacher": "30,522"} | dict.fromkeys(
        [f"student-{name}" for name in STUDENTS], "11,024"
    )
    assert cells(family, whole[0], "fp32 weights removed")["student-4x"] == "29.8 MB"
    assert cells(family, whole[1], "layers")["student-8x"] == "3 of 6"
    assert cells(family, whole[1], "heads")["student-8x"] == "31 of 72"
    assert cells(family, whole[1], "neurons")["student-15x"] == "96 of 9,216"
    assert cells(family, whole[1], "width")["student-4x"] == "288 of 384"
    assert cells(family, whole[1], "speedup, predicted")["student-4x"] == "3.92×"
    assert cells(family, whole[1], "speedup, measured")["student-4x"] == "4.04×"
    assert cells(family, whole[1], "KL after the trials")["student-2x"] == "0.659"
    assert cells(family, whole[2], "validation accuracy")["teacher"] == "93.59 %"
    assert cells(family, whole[2], "share of the teacher's")["student-15x"] == "95.9 %"
    assert cells(family, whole[3], "test accuracy, int8")["student-8x"] == "90.88 %"
    assert cells(family, whole[3], "change by int8")["student-8x"] == "-0.48 points"
    assert cells(family, whole[3], "change by int8")["teacher"] == "–"
    assert cells(family, whole[4], "requested")["student-15x"] == "15×"
    assert cells(family, whole[4], "measured")["student-15x"] == "14.21×, missed by 5.3 %"
    assert cells(family, whole[4], "on disk (teacher fp32, students int8)")["student-8x"] == "5.2 MB"


def write_stage(folder, name, config, metrics, **files):
    """Writes the files of a complete stage and returns its artefact."""
    for file, content in files.items():
        path = folder / name / file.replace("__", "/").replace("_json", ".json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    return Artefact(name, folder / name, "digest", {"config": config, "metrics": metrics})


def family_stages(folder):
    """Returns the stages of a run with two targets, one of which took two rounds."""
    import torch
    from safetensors.torch import save_file

    budget = {"runtime": "onnxruntime", "precision": "int8", "batch": 1, "length": 0, "threads": 1, "uniform": False}
    fitted = {"coefficients": [0.5, 0, 0, 0, 0.01, 0, 0.001, 0], "error": 0.02}
    costs = {"lengths": [{"length": 0, "teacher": {"best_ms": 5.0}, "costs": fitted}]}
    start = {"student": "teacher", "vocabulary": True, "unseen": 0.002}
    stages = [
        write_stage(folder, "data", {}, {}),
        write_stage(folder, "teacher", {}, {"trained": False}, model__config_json={"vocab_size": 30522}),
        write_stage(folder, "start", start, {"tokens": 11024, "params": 15_255_629}),
        write_stage(folder, "costs", {"budget": budget}, {"teacher_ms": 5.0, "error": 0.02}, costs_json=costs),
        write_stage(folder, "scores", {}, {}, about_json={}),
    ]
    sizes = {f"values.layers.{i}.{kind}": n for i in range(6) for kind, n in (("heads", 12), ("ffn", 1536))}
    scores = {name: torch.zeros(count) for name, count in (sizes | {"values.hidden": 384, "layers": 6}).items()}
    save_file(scores, folder / "scores/scores.safetensors")
    for name in ("2x", "8x-round1", "8x"):
        details = pruned_student_details(name, name.removesuffix("-round1"), STUDENTS["8x"], 0.9198)
        shape = {key: details[key] for key in ("sizes", "trials", "measurements")}
        settings = {"target": details["target"]} | ({"round": 1} if "round" in name else {"budget": budget})
        scored = {"teacher_score": 0.9359}
        stages.append(write_stage(folder, f"shape-{name}", settings, scored, shape_json=shape))
        stages.append(write_stage(folder, f"distill-{name}", {}, {"val/score": 0.9198, "params": 4_900_000}))
    return stages


def test_rejected_targets_and_layer_by_layer_proofs_are_reported():
    report = sample_report()
    proof = {"layers": 4.8e-7, "load_ms": 31.0, "peak_bytes": 164e6, "score": 0.9248, "trained_score": 0.9253}
    report["models"][-1]["parity"] |= proof | {"agreement": 0.9981}
    report["models"][-1]["precision"] = "int8"
    report["rejected"] = [
        {
            "stage": "export",
            "target": "onnx-int8",
            "where": "rejected/onnx-int8",
            "reason": "query gives other products",
        }
    ]
    page = " ".join(Page(render_html(report, sample_curves())).text.split())
    assert "by at most 4.8e-07 of the largest value. Reloaded in a fresh process (31.00 ms, peak memory 164 MB)" in page
    assert "99.81 % of 256 texts" in page
    assert "an accuracy of 92.48 % (92.53 % in PyTorch)" in page
    assert "onnx-int8 failed its verification and was moved to rejected/onnx-int8: query gives other products." in page


def test_the_pipeline_summary_is_read_from_the_stages(tmp_path):
    stages = family_stages(tmp_path)
    pruning = read_pruning(stages)
    assert pruning["conditions"] == family_report()["pruning"]["conditions"]
    assert pruning["teacher"] == {"tokens": 30522}
    assert pruning["start"]["sizes"] == WHOLE
    assert [each["name"] for each in pruning["students"]] == ["student-2x", "student-8x"]
    _, last = pruning["students"]
    assert last["sizes"] == SIZES["8x"]
    assert last["predicted_ms"] == pytest.approx(0.5 + 0.01 * 31 + 0.001 * 672)
    assert last["predicted_speedup"] == pytest.approx(5.0 / last["predicted_ms"])
    assert (last["score"], last["teacher_score"], last["params"]) == (0.9198, 0.9359, 4_900_000)
    alone = [each for each in stages if not each.name.endswith("2x")]
    assert [each["name"] for each in read_pruning(alone)["students"]] == ["student"]
    assert read_pruning(stages[:2]) is None
    assert render_html(family_report(["2x", "8x"]) | {"pruning": pruning}, {})


def test_missed_targets_and_scores_are_reported(family):
    verdicts = write_verdicts(family)
    measured = "Timed on 144 texts, 8 times each; two copies of the teacher's file differed by 0.4 %."
    assert (
        True,
        f"student-8x: requested 8×, measured 8.11× (95 % interval 8.03× to 8.19×): met. {measured}",
    ) in verdicts
    missed = "measured 14.21× (95 % interval 14.07× to 14.35×): missed by 5.3 %."
    assert (False, f"student-15x: requested 15×, {missed} {measured}") in verdicts
    required = "required 98.0 % of the teacher's validation accuracy"
    assert (True, f"student-8x: {required}, kept 98.28 %: met.") in verdicts
    assert (False, f"student-15x: {required}, kept 95.93 %: missed.") in verdicts
    page = Page(render_html(family, {}))
    text = " ".join(page.text.split())
    assert all(sentence in text for _, sentence in verdicts)
    assert page.attributes.count(("class", "missed")) == 3  # two sentences and a cell


def test_a_minimum_score_is_judged_by_the_deployed_weights(family):
    for entry in family["models"]:
        if (entry["name"], entry["precision"]) in (("teacher", "fp32"), ("student-8x", "int8")):
            entry["validation"] = 0.90 if entry["name"] == "teacher" else 0.87
    required = "required 98.0 % of the teacher's validation accuracy"
    assert (False, f"student-8x: {required}, kept 96.67 %: missed.") in write_verdicts(family)


def test_without_an_evaluation_a_target_is_judged_by_the_measurement_of_its_shape(family):
    for entry in family["models"]:
        entry.pop("target", None)
    assert (True, "student-15x: requested 15×, measured 15.15×: met.") in write_verdicts(family)
    assert "validation texts, when the shape was chosen" in render_html(family, {})
    _, rows = build_speed_table(family)
    assert rows[-1] == ["student-15x", "15×", "15.15×", "–", "met", "–"]


@pytest.mark.parametrize(
    ("target", "wanted", "measured"),
    [
        (
            {"speedup": 0.0, "latency_ms": 0.5},
            "0.5 ms",
            "0.53 ms (95 % interval 0.52 ms to 0.53 ms): missed by 5.3 %.",
        ),
        (
            {"speedup": 0.0, "latency_ms": 32.0, "texts_per_second": 1000.0},
            "1,000 texts/s",
            "947.3 texts/s (95 % interval 937.9 texts/s to 956.8 texts/s): missed by 5.3 %.",
        ),
    ],
)
def test_latencies_and_throughputs_are_reported_in_their_own_unit(family, target, wanted, measured):
    family["pruning"]["students"][-1]["target"] |= target
    (verdict,) = [each for each in write_verdicts(family) if each.sentence.startswith("student-15x: requested")]
    assert verdict.sentence.startswith(f"student-15x: requested {wanted}, measured {measured}")


def test_the_speed_table_has_the_requested_and_measured_speeds_with_intervals(family):
    header, rows = build_speed_table(family)
    assert header == ["student", "requested", "measured", "95 % interval", "outcome", "copy of the teacher"]
    assert rows[2:] == [
        ["student-8x", "8×", "8.11×", "8.03× to 8.19×", "met", "1.00×"],
        ["student-15x", "15×", "14.21×", "14.07× to 14.35×", "missed by 5.3 %", "1.00×"],
    ]
    assert build_speed_table(sample_report()) is None
    assert cells(family, "target", "95 % interval")["student-8x"] == "8.03× to 8.19×"


def test_a_speed_slightly_below_the_request_counts_as_met_and_is_reported_as_short(family):
    target = find_target_speed(family, family["pruning"]["students"][-1])
    target["share"] = {"value": 0.97, "low": 0.96, "high": 0.98}
    (verdict,) = [each for each in write_verdicts(family) if each.sentence.startswith("student-15x: requested")]
    assert verdict.met
    assert "measured 14.55× (95 % interval 14.40× to 14.70×): short by 3.0 %." in verdict.sentence


def test_a_speed_far_above_the_request_is_explained(family):
    student = family["pruning"]["students"][-1]
    find_target_speed(family, student)["share"] = {"value": 1.12, "low": 1.11, "high": 1.13}
    (verdict,) = [each for each in write_verdicts(family) if each.sentence.startswith("student-15x: requested")]
    assert verdict.met
    assert "It was 15.15× on validation texts when its shape was chosen: texts and the load" in verdict.sentence
    student["sizes"] = WHOLE
    (verdict,) = [each for each in write_verdicts(family) if each.sentence.startswith("student-15x: requested")]
    assert verdict.sentence.endswith("It is faster than requested although it has all layers and units.")


def test_repeated_pruning_and_the_reason_for_its_end_are_reported(family):
    target = find_target_speed(family, family["pruning"]["students"][-1])
    target |= {"retries": 2, "reason": "budget.retries allows 2", "settled": False, "length": 64, "other_load": 0.45}
    page = " ".join(Page(render_html(family, {})).text.split())
    assert (
        "missed by 5.3 %. Timed on 144 texts of 64 tokens, 8 times each, until the limit of time or texts, before the "
        "interval was narrow; two copies of the teacher's file differed by 0.4 %; meanwhile other "
        "processes used 45 % of this machine's processors, so latencies may be too high. It was pruned and trained "
        "again 2 times. It wasn't pruned again: budget.retries allows 2."
    ) in page


def test_the_headline_names_every_student_of_the_family(family):
    assert write_headline(family) == (
        "Student-2x keeps 99.8 % of the teacher's accuracy at 2.06× its speed, student-4x 99.0 % at 4.03×, "
        "student-8x 97.7 % at 8.11× and student-15x 94.7 % at 14.21×, on ONNX Runtime int8."
    )
    for each in family["models"]:
        each["speedup"] = None
    assert "student-15x reaches 88.11 % accuracy in 0.32 ms per text" in write_headline(family)


def test_the_figures_at_the_top_are_those_of_the_fastest_student_that_keeps_the_score(family):
    assert (headline_entry(family)["name"], headline_entry(family)["precision"]) == ("student-8x", "int8")
    assert headline_entry(family_report(min_score_share=0.0))["name"] == "student-15x"
    assert headline_entry(family_report(min_score_share=0.999))["name"] == "student-2x"
    for least, expected in (
        (0.98, "student-8x, the fastest student that keeps at least 98.0 %"),
        (0.999, "No student keeps at least 99.9 %"),
    ):
        assert expected in explain_headline_entry(family_report(min_score_share=least))
    fastest = "The figures below are those of student-15x, the fastest student."
    assert explain_headline_entry(family_report(min_score_share=0.0)) == fastest
    assert explain_headline_entry(family) in Page(render_html(family, {})).text


def test_a_page_of_one_student_has_no_family_comparison():
    """The page of one pruned student describes its pipeline, but compares no students."""
    assert not draw_pareto_charts(sample_report())
    source = render_html(family_report(["8x"]), {})
    text = Page(source).text
    assert "speedup on ONNX Runtime" not in text
    assert "The student keeps 97.7 % of the teacher's accuracy at 8.11× its speed on ONNX Runtime int8." in text
    assert "student: requested 8×, measured 8.11× (95 % interval 8.03× to 8.19×): met." in text
    assert "Effect of each stage" not in Page(render_html(sample_report(), {})).text
    assert "missed" not in render_html(sample_report(), {})


def test_dominated_points_are_marked_in_the_pareto_charts(family):
    points = [
        Point("a", "fp32", 2, 0.9),
        Point("b", "int8", 2, 0.9),
        Point("c", "int8", 3, 0.8),
        Point("d", "fp32", 2, 0.85),
    ]
    assert [p.dominated for p in mark_dominated(points, rising=True)] == [False, False, False, True]
    assert [p.dominated for p in mark_dominated(points, rising=False)] == [False, False, True, True]
    (_, speed), (_, size) = draw_pareto_charts(family)
    for svg in (speed, size):
        assert all(f">{name}<" in svg for name in (*STUDENTS, "teacher", "fp32", "int8"))
        assert svg.count(">15x<") == 2
    assert "dominated in both" in speed


def test_models_without_a_speedup_are_in_the_chart_of_sizes_alone(family):
    for entry in family["models"]:
        if entry["speedup"]:
            entry["speedup"]["vs_teacher_same_runtime"] = None  # the teacher has no file for this runtime
    ((caption, _),) = draw_pareto_charts(family)
    assert "against size" in caption


@pytest.mark.parametrize("spread", [1.0, 0.25])
def test_names_in_a_chart_overlap_neither_each_other_nor_markers(spread, family):
    """The second case has all students close together."""
    points = [Point("teacher", "teacher", 1.0, 0.93)]
    for name, (whole, rounded, _, _, _, ratio, fast) in STUDENTS.items():
        points += [Point(name, "fp32", ratio**spread, 0.93 - (0.93 - whole) * spread)]
        points += [Point(name, "int8", fast**spread, 0.93 - (0.93 - rounded) * spread)]
    with draw_figure("names", draw_front, mark_dominated(points, rising=True), "times", "accuracy", 1) as figure:
        (axes,) = figure.axes
        boxes = [text.get_window_extent() for text in axes.texts]
        markers = axes.transData.transform([(p.value, p.score) for p in points])
        area = axes.get_window_extent()
    assert len(boxes) == len(points)
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[i + 1 :])
        assert not any(box.contains(*marker) for marker in markers)
        assert area.x0 <= box.x0
        assert box.x1 <= area.x1


def test_matched_layers_and_unit_costs_have_their_own_charts(family):
    text = Page(render_html(family, {"distill-15x": family_curves()["distill-15x"]})).text
    assert "Teacher layer matched by each student layer" in text
    assert "Cost of the unmasked units" in text
    assert "matched_1" not in text
    assert text.index("student's 2") < text.index("student's 10")
    assert "scheduled_cost" not in text


def test_each_student_of_a_family_has_its_own_card(family):
    cards = render_cards(family)
    assert list(cards) == [f"student-{name}.md" for name in STUDENTS]
    assert "The student keeps 99.0 % of the teacher's accuracy at 4.03×" in cards["student-4x.md"]
    assert '"runs/x/student-4x/onnxruntime-int8"' in cards["student-4x.md"]
    assert "runs/x/student-8x" not in cards["student-4x.md"]
    assert list(render_cards(sample_report())) == ["README.md"]


def test_a_card_mentions_the_code_that_comes_with_a_pruned_model(family):
    card = render_cards(family)["student-8x.md"]
    assert 'model="runs/x/student-8x/huggingface", trust_remote_code=True)' in card
    assert "`modeling_pruned.py`" in card
    assert "3 layers of width 192 with 10, 9 and 12 attention heads and 256, 224 and 192 feed-forward neurons" in card
    assert "plain checkpoint" not in card
    assert "pruning" in front_matter(card)["tags"]
    assert "- `runs/x/student-8x/onnxruntime-int8`: int8, 5.2 MB, 0.55 ms per text, 90.88 % accuracy" in card
    assert "trust_remote_code" not in render_card(sample_report())
    stock = family_report(["8x"])
    for each in stock["models"]:
        each.pop("code", None)
    assert "trust_remote_code" not in render_card(stock)
    assert "plain checkpoint" in render_card(stock)


def test_a_quantized_model_is_compared_with_its_own_logits(family):
    text = " ".join(Page(render_html(family, {})).text.split())
    assert "Student-8x on ONNX Runtime int8, reloaded in a fresh process, reproduced the logits of" in text
    assert "Student-8x on ONNX Runtime int8, reloaded in a fresh process, was compared" not in text


@pytest.mark.slow
def test_snippets_of_a_pruned_model_run_without_prompting(family, tmp_path, capsys, monkeypatch):
    """The snippets run unchanged on a tiny pruned model, and any call of input() fails."""
    import torch

    from compress.export.common.source import Source
    from compress.export.common.targets import find_target
    from compress.export.write import write_target
    from distill.slicing import Shape, find_axes, prune

    model, tokenizer = tiny_model(tmp_path)
    small = prune(model, find_axes(model), Shape((0,), {"layers.0.ffn": torch.arange(5)})).eval()
    for each, target in zip(family["models"][2:5], ("huggingface", "onnx", "onnx"), strict=True):
        write_target(Source(small, tokenizer), find_target(target), tmp_path)
        each["path"] = str(tmp_path / target)
        each["code"] = find_code(tmp_path / target)
    monkeypatch.setattr("builtins.input", lambda *prompts: pytest.fail(f"prompted: {prompts}"))
    snippets = re.findall(r"```python\n(.*?)```", render_cards(family)["student-2x.md"], re.DOTALL)
    assert len(snippets) == 2
    for snippet in snippets:
        exec(compile(snippet, "card", "exec"), {})
        assert re.search("arrival|pin", capsys.readouterr().out)
