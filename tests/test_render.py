"""What a report becomes: a page that stands alone, a card that parses, a table for the terminal."""

import copy
import json
import random
import re
from html.parser import HTMLParser

import pytest
import yaml

from pipelines.charts import drawn
from pipelines.pareto import Point, draw_front, marked, pareto_charts
from pipelines.render import headline, render_card, render_cards, render_html, shown, summary_rows, why_shown
from pipelines.road import code_of, road_of
from pipelines.road_text import road_table, verdicts
from pipelines.stage import Artefact

VOID = {"meta", "link", "br", "hr", "img", "input"}


def entry(name, runtime, score, params, size, ms, ratio, agreement):
    def took(batch, best):
        times = {"median_ms": best * 1.1, "p10_ms": best * 1.03, "p90_ms": best * 1.31, "best_ms": best}
        return {"batch": batch, "length": 14, "threads": 1, "repeats": 320} | times

    speedup = {"vs_teacher_pytorch": ratio * 1.1, "vs_teacher_same_runtime": ratio}
    parity = {"texts": 256, "max_difference": 1.4e-6, "mean_difference": 1e-7, "same_class": 1.0}
    return {
        "name": name,
        "stage": "teacher" if name == "teacher" else "distill",
        "path": f"runs/x/{name}/{runtime}",
        "runtime": runtime,
        "precision": "fp32",
        "score": score,
        "params": params,
        "bytes": size,
        "latency": took(1, ms),
        "latency_batched": took(32, ms * 19),
        "speedup": speedup,
        "speedup_batched": speedup,
        "agreement_with_teacher": agreement,
        "parity": None if runtime == "pytorch" else parity,
    }


def sample_report():
    """Two models on two runtimes, with round figures in unround places."""
    return {
        "task": "text-classification",
        "metric": "accuracy",
        "seed": 7,
        "license": None,
        "data": {
            "path": "examples/data/banking77",
            "train": 9003,
            "validation": 1000,
            "test": 3080,
            "unlabelled": 0,
            "classes": 77,
            "test_texts_also_in_train": 29,
            "truncated": 0,
        },
        "models": [
            entry("teacher", "pytorch", 0.9305, 22713221, 91_000_000, 9.5, 1.0, 1.0),
            entry("teacher", "onnxruntime", 0.9305, 22713221, 91_400_000, 4.5, 1.0, 1.0),
            entry("student", "pytorch", 0.9154, 4_800_077, 19_300_000, 3.6, 2.64, 0.9512),
            entry("student", "onnxruntime", 0.9154, 4_800_077, 19_500_000, 1.25, 3.6, 0.9512),
        ],
        "stages": [stage("teacher", True), stage("distill", False)],
        "config": {"teacher": {"model": "minilm"}, "data": {"max_length": 64}, "loss": {"kl": 1.0, "ce": 0.5}},
        "machine": {"processor": "Xeon", "cores": 2, "platform": "Linux-6.1-x86_64", "threads": 2},
        "versions": {"python": "3.11.9", "torch": "2.13.0", "onnxruntime": "1.23.0"},
        "commit": "abc1234",
        "created": "2026-11-21T07:00:00+00:00",
    }


def stage(name, skipped):
    folder = f"runs/x/{name}/0a1b2c3d4e5f"
    times = {"wall_seconds": 1234.56, "peak_memory_bytes": 1_260_000_000}
    return {"name": name, "folder": folder, "resumed": False, "skipped": skipped, "metrics": {}} | times


def sample_curves():
    """A stage of one term and a stage of two."""
    draw = random.Random(0)
    teacher, student = [], []
    for step in range(0, 1700, 25):
        ce, kl = (0.1 + 4 * 0.5 ** (step / scale) * draw.uniform(0.8, 1.2) for scale in (200, 300))
        teacher.append({"step": step, "train/loss": ce, "train/ce": ce, "train/ce_weight": 1.0, "lr": 1e-4})
        student.append(
            {"step": step, "train/loss": kl + ce / 2, "train/kl": kl, "train/ce": ce, "train/kl_weight": 1.0}
        )
        student[-1] |= {"train/ce_weight": 0.5, "train/kl_gradient_share": 0.7, "train/ce_gradient_share": 0.3}
    for number in range(1, 7):
        student.append({"step": 281 * number, "val/score": 0.92 - 0.3 * 0.4**number, "val/loss": 0.3})
    return {"teacher": teacher, "distill": student}


@pytest.fixture
def report():
    return sample_report()


class Page(HTMLParser):
    """Checks that what is opened is closed; collects attributes and text."""

    def __init__(self, source):
        super().__init__()
        self.open, self.attributes, self.text, self.tags = [], [], "", []
        self.feed(source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_page_stands_alone(report):
    source = render_html(report, sample_curves())
    page = Page(source)
    links = [value for name, value in page.attributes if name.split(":")[-1] in ("src", "href", "srcset", "action")]
    assert links
    assert all(link.startswith(("#", "data:")) for link in links)
    assert "script" not in page.tags
    assert "@import" not in source
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", source))


def test_page_holds_the_figures(report):
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
    assert "The standard error of an accuracy of 91.54 % on 3,080 texts is 0.50 points." in text
    assert "skipped, done before" in text


def test_page_has_a_chart_for_each_log_that_has_points(report):
    def charts(curves):
        return Page(render_html(report, curves)).tags.count("svg")

    assert charts({}) == 2
    assert charts({"teacher": [], "distill": []}) == 2
    assert charts({"distill": [{"step": 5, "lr": 1e-4}, {"step": 6, "train/loss": float("nan")}]}) == 2
    assert charts({"teacher": [{"step": 5, "train/loss": 1.0, "train/ce": 1.0}]}) == 3
    assert charts(sample_curves()) == 2 + 1 + 3


def test_page_escapes_what_users_name(report):
    evil = "<script>alert('$x$ & y')</script>"
    report["data"]["path"] = report["stages"][0]["folder"] = report["models"][0]["runtime"] = evil
    report["config"] = {evil: evil}
    report["machine"]["processor"] = report["versions"]["torch"] = evil
    page = Page(render_html(report, {evil: [{"step": 1, f"train/{evil}": 1.0}, {"step": 2, f"train/{evil}": 0.5}]}))
    assert "script" not in page.tags
    assert page.text.count(evil) >= 7


def test_page_is_the_same_for_the_same_report(report):
    assert render_html(report, sample_curves()) == render_html(report, sample_curves())


def without_teacher(report):
    report["models"] = report["models"][3:]
    for model in report["models"]:
        model |= {"speedup": None, "speedup_batched": None, "agreement_with_teacher": None}
    return report


def test_report_of_one_model_renders(report):
    alone = without_teacher(report)
    text = Page(render_html(alone, {})).text
    assert "The student reaches 91.54 % accuracy in 1.25 ms a text on ONNX Runtime." in text
    assert "teacher's" not in text
    assert "learned from its teacher" not in render_card(alone)
    assert summary_rows(alone)[1][0][-2:] == ["–", "–"]


def test_untrained_teacher_renders(report):
    for model in report["models"]:
        model["score"] = 0.0
    assert "reaches 0.00 % accuracy" in render_html(report, {})


def test_other_runtimes_and_precisions_render(report):
    quantized = copy.deepcopy(report["models"][3])
    quantized |= {"runtime": "openvino", "precision": "int8", "latency_batched": None, "parity": None}
    quantized["latency"]["best_ms"] = 0.61
    quantized["speedup"] = {"vs_teacher_pytorch": 15.6, "vs_teacher_same_runtime": None}
    report["models"].append(quantized)
    text = Page(render_html(report, {})).text
    assert "keeps 98.4 % of the teacher's accuracy and takes 0.61 ms a text on OpenVINO int8." in text


def test_summary_has_a_row_for_each_model_and_runtime(report):
    header, rows = summary_rows(report)
    assert header == ["model", "runtime", "accuracy", "params", "size in MB", "ms, batch 1", "speedup", "agreement"]
    assert rows[3] == ["student", "ONNX Runtime", "91.54 %", "4.8 M", "19.5", "1.25", "3.60×", "95.1 %"]
    assert {len(row) for row in rows} == {len(header)}


def front_matter(card):
    assert card.startswith("---\n")
    return yaml.safe_load(card.split("---\n")[1])


def test_card_front_matter_parses(report):
    expected = {
        "library_name": "transformers",
        "pipeline_tag": "text-classification",
        "tags": ["stillroom", "knowledge-distillation"],
    }
    assert front_matter(render_card(report)) == expected
    assert front_matter(render_card(report | {"license": "apache-2.0"})) == expected | {"license": "apache-2.0"}


def test_card_table_is_whole(report):
    report["models"][0]["runtime"] = "a|b\n<script>"
    lines = [line for line in render_card(report).splitlines() if line.startswith("|")]
    assert len(lines) == 6
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {9}
    assert "<script>" not in "".join(lines)


def test_card_says_what_is_known_to_be_wrong(report):
    card = render_card(report)
    assert "29 of the 3,080 test texts are also in the training data" in card
    assert "too long" not in card


def test_card_snippets_run(report, tmp_path, capsys):
    """The snippets are run as they stand, on a tiny model that was exported for them."""
    from compress.export.huggingface import export_huggingface
    from compress.export.onnx import export_onnx

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


def tiny_model(folder):
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "my", "card", "pin", "how", "."]
    (folder / "vocab.txt").write_text("\n".join(words))
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    names = {0: "arrival", 1: "pin"}
    config = BertConfig(vocab_size=len(words), id2label=names, label2id={v: k for k, v in names.items()}, **sizes)
    return BertForSequenceClassification(config).eval(), BertTokenizerFast(str(folder / "vocab.txt"))


# --- a family of students, pruned to several speeds


STUDENTS = {  # asked: (fp32 accuracy, int8 accuracy, parameters, fp32 and int8 bytes, fp32 and int8 speed-up)
    "2x": (0.9292, 0.9286, 12_900_000, 52_100_000, 13_400_000, 1.31, 2.06),
    "4x": (0.9240, 0.9211, 7_900_000, 32_000_000, 8_300_000, 2.14, 4.03),
    "8x": (0.9136, 0.9088, 4_900_000, 19_900_000, 5_200_000, 3.97, 8.11),
    "15x": (0.8904, 0.8811, 3_070_000, 12_600_000, 3_430_000, 6.80, 14.21),
}
OUTLINES = {
    "2x": {"hidden": 384, "heads": [12, 9, 11, 10, 12, 12], "ffn": [640, 608, 704, 512, 576, 448]},
    "4x": {"hidden": 288, "heads": [12, 8, 11, 12], "ffn": [352, 288, 320, 224]},
    "8x": {"hidden": 192, "heads": [10, 9, 12], "ffn": [256, 224, 192]},
    "15x": {"hidden": 192, "heads": [9], "ffn": [96]},
}
WHOLE = {"hidden": 384, "heads": [12] * 6, "ffn": [1536] * 6}


def pruned(name, asked, figures, code="modeling_pruned.py"):
    """Entries of a student: PyTorch, ONNX Runtime, and that in int8."""
    whole, rounded, params, size, small, ratio, fast = figures
    entries = [
        entry(name, "pytorch", whole, params, size, 9.5 / ratio, ratio, 0.96),
        entry(name, "onnxruntime", whole, params, size, 4.5 / ratio, ratio, 0.96),
        entry(name, "onnxruntime", rounded, params, small, 4.5 / fast, fast, 0.95) | {"precision": "int8"},
    ]
    places = ("huggingface", "onnxruntime", "onnxruntime-int8")
    for each, place in zip(entries, places, strict=True):
        each |= {"stage": f"distill-{asked}", "path": f"runs/x/{name}/{place}"} | ({"code": code} if code else {})
    return entries


def road_student(name, asked, figures, score):
    trials = [
        {"label": "width 384, layers 5:12x608", "divergences": [3.167, 2.339]},
        {"label": "width 192, layers 0:9x96, 4:8x96, 5:12x32", "divergences": [2.607, 2.013, 1.341, 0.957, 0.659]},
        {"label": "width 288, layers 0:12x288, 5:12x128", "divergences": [2.604, 1.818, 1.285, 0.851, 0.893]},
    ]
    speedup = float(asked.removesuffix("x"))
    fast = {"label": "", "teacher_ms": 4.6, "best_ms": 4.6 / (speedup * 1.01), "bytes": figures[4]}
    return {
        "name": name,
        "target": {"name": asked, "speedup": speedup, "latency_ms": 0.0},
        "outline": OUTLINES[asked],
        "predicted_ms": 4.5 / (speedup * 0.98),
        "predicted_speedup": speedup * 0.98,
        "measurements": [fast | {"speedup": speedup * share, "by_all": speedup * share} for share in (0.8, 1.01)],
        "trials": trials,
        "teacher_score": 0.9359,
        "score": score,
        "params": figures[2],
    }


def family_report(names=tuple(STUDENTS), min_score=0.98):
    report = sample_report()
    own = {name: f"student-{name}" if len(names) > 1 else "student" for name in names}
    report["models"] = report["models"][:2] + [e for n in names for e in pruned(own[n], n, STUDENTS[n])]
    report["stages"] += [stage("start", False)] + [
        stage(f"{kind}-{n}", False) for n in names for kind in ("shape", "distill")
    ]
    report["config"] |= {"budget": {"speedup": ",".join(names), "min_score": min_score}}
    scores = {"2x": 0.9339, "4x": 0.9299, "8x": 0.9198, "15x": 0.8978}
    report["road"] = {
        "conditions": {"runtime": "onnxruntime", "precision": "int8", "batch": 1, "length": 0, "threads": 1},
        "teacher": {"words": 30522},
        "start": {"words": 11024, "params": 15_255_629, "student": "teacher", "vocabulary": True, "outline": WHOLE},
        "students": [road_student(own[n], n, STUDENTS[n], scores[n]) for n in names],
    }
    return report


@pytest.fixture
def family():
    return family_report()


def family_curves():
    """A student whose layers were matched in each step, after units of it closed."""
    curves, rows = sample_curves(), []
    for step in range(0, 1700, 25):
        first, second = (2 if step < 600 else 3), (4 if step < 300 else 5)
        rows.append({"step": step, "train/loss": 1.0 / (1 + step), "train/kl": 0.6 / (1 + step), "train/hidden": 0.3})
        rows[-1] |= {"train/matched_1": first, "train/matched_2": second, "train/matched_10": 6}
        rows[-1] |= {"train/cost": 1 - step / 2000, "train/cost_wanted": max(0.2, 1 - step / 1800)}
    return curves | {"distill-15x": rows}


def cells(report, stage, label):
    header, stages = road_table(report)
    (row,) = [row for name, row in dict(stages)[stage] if name == label]
    return dict(zip(header, row, strict=True))


def test_the_road_of_a_family_loses_what_a_stage_did(family):
    whole = "start: words removed", "shape: units removed", "trained", "int8", "target"
    assert [stage for stage, _ in road_table(family)[1]] == list(whole)
    assert cells(family, whole[0], "words") == {"teacher": "30,522"} | dict.fromkeys(
        [f"student-{name}" for name in STUDENTS], "11,024"
    )
    assert cells(family, whole[0], "fp32 weights that go")["student-4x"] == "29.8 MB"
    assert cells(family, whole[1], "layers")["student-8x"] == "3 of 6"
    assert cells(family, whole[1], "heads")["student-8x"] == "31 of 72"
    assert cells(family, whole[1], "neurons")["student-15x"] == "96 of 9,216"
    assert cells(family, whole[1], "width")["student-4x"] == "288 of 384"
    assert cells(family, whole[1], "speed-up predicted")["student-4x"] == "3.92×"
    assert cells(family, whole[1], "speed-up measured")["student-4x"] == "4.04×"
    assert cells(family, whole[1], "KL after the trials")["student-2x"] == "0.659"
    assert cells(family, whole[2], "validation accuracy")["teacher"] == "93.59 %"
    assert cells(family, whole[2], "of the teacher's")["student-15x"] == "95.9 %"
    assert cells(family, whole[3], "test accuracy, int8")["student-8x"] == "90.88 %"
    assert cells(family, whole[3], "change by int8")["student-8x"] == "-0.48 points"
    assert cells(family, whole[3], "change by int8")["teacher"] == "–"
    assert cells(family, whole[4], "asked")["student-15x"] == "15×"
    assert cells(family, whole[4], "met")["student-15x"] == "14.21×, missed by 5.3 %"
    assert cells(family, whole[4], "on disk (teacher fp32, students int8)")["student-8x"] == "5.2 MB"


def made(folder, name, config, metrics, **files):
    """A complete stage."""
    for file, content in files.items():
        place = folder / name / file.replace("__", "/").replace("_json", ".json")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(content))
    return Artefact(name, folder / name, "digest", {"config": config, "metrics": metrics})


def family_stages(folder):
    """What a run of two targets leaves, one of which was reached in two rounds."""
    import torch
    from safetensors.torch import save_file

    budget = {"runtime": "onnxruntime", "precision": "int8", "batch": 1, "length": 0, "threads": 1, "uniform": False}
    fitted = {"coefficients": [0.5, 0, 0, 0, 0.01, 0, 0.001, 0], "error": 0.02}
    costs = {"teacher": {"best_ms": 5.0}, "costs": fitted}
    start = {"student": "teacher", "vocabulary": True, "unseen": 0.002}
    stages = [
        made(folder, "data", {}, {}),
        made(folder, "teacher", {}, {"trained": False}, model__config_json={"vocab_size": 30522}),
        made(folder, "start", start, {"words": 11024, "params": 15_255_629}),
        made(folder, "costs", {"budget": budget}, {"teacher_ms": 5.0, "error": 0.02}, costs_json=costs),
        made(folder, "scores", {}, {}, about_json={}),
    ]
    sizes = {f"values.layers.{i}.{kind}": n for i in range(6) for kind, n in (("heads", 12), ("ffn", 1536))}
    scores = {name: torch.zeros(count) for name, count in (sizes | {"values.hidden": 384, "layers": 6}).items()}
    save_file(scores, folder / "scores/scores.safetensors")
    for name in ("2x", "8x-round1", "8x"):
        found = road_student(name, name.removesuffix("-round1"), STUDENTS["8x"], 0.9198)
        shape = {key: found[key] for key in ("outline", "trials", "measurements")}
        settings = {"target": found["target"]} | ({"round": 1} if "round" in name else {"budget": budget})
        scored = {"teacher_score": 0.9359}
        stages.append(made(folder, f"shape-{name}", settings, scored, shape_json=shape))
        stages.append(made(folder, f"distill-{name}", {}, {"val/score": 0.9198, "params": 4_900_000}))
    return stages


def test_what_was_refused_or_proven_layer_by_layer_is_not_told():
    report = sample_report()
    proof = {"layers": 4.8e-7, "load_ms": 31.0, "peak_bytes": 164e6, "score": 0.9248, "trained_score": 0.9253}
    report["models"][-1]["parity"] |= proof | {"same_class": 0.9981}
    report["models"][-1]["precision"] = "int8"
    report["refused"] = [
        {"stage": "export", "target": "onnx-int8", "where": "refused/onnx-int8", "reason": "query gives other products"}
    ]
    page = " ".join(Page(render_html(report, sample_curves())).text.split())
    assert "by at most 4.8e-07 of its largest value; loaded in a fresh process (31.00 ms, 164 MB at most)" in page
    assert "99.81 % of 256 texts" in page
    assert "an accuracy of 92.48 %, 92.53 % as trained" in page
    assert "onnx-int8 was refused and lies aside in refused/onnx-int8: query gives other products." in page


def test_the_road_is_not_that_of_the_stages(tmp_path):
    stages = family_stages(tmp_path)
    road = road_of(stages)
    assert road["conditions"] == family_report()["road"]["conditions"]
    assert road["teacher"] == {"words": 30522}
    assert road["start"]["outline"] == WHOLE
    assert [each["name"] for each in road["students"]] == ["student-2x", "student-8x"]
    _, last = road["students"]
    assert last["outline"] == OUTLINES["8x"]
    assert last["predicted_ms"] == pytest.approx(0.5 + 0.01 * 31 + 0.001 * 672)
    assert last["predicted_speedup"] == pytest.approx(5.0 / last["predicted_ms"])
    assert (last["score"], last["teacher_score"], last["params"]) == (0.9198, 0.9359, 4_900_000)
    alone = [each for each in stages if not each.name.endswith("2x")]
    assert [each["name"] for each in road_of(alone)["students"]] == ["student"]
    assert road_of(stages[:2]) is None
    assert render_html(family_report(["2x", "8x"]) | {"road": road}, {})


def test_a_missed_target_or_score_is_not_said(family):
    said = verdicts(family)
    assert (True, "student-8x: 8× asked, 8.11× met.") in said
    assert (False, "student-15x: 15× asked, 14.21×, missed by 5.3 %.") in said
    least = "at least 98.0 % of the teacher's validation accuracy asked"
    assert (True, f"student-8x: {least}, 98.28 % kept.") in said
    assert (False, f"student-15x: {least}, 95.93 % kept: missed.") in said
    page = Page(render_html(family, {}))
    text = " ".join(page.text.split())
    assert all(sentence in text for _, sentence in said)
    assert page.attributes.count(("class", "missed")) == 3  # two sentences and a cell


def test_a_least_score_is_judged_by_weights_that_are_not_deployed(family):
    for entry in family["models"]:
        if (entry["name"], entry["precision"]) in (("teacher", "fp32"), ("student-8x", "int8")):
            entry["validation"] = 0.90 if entry["name"] == "teacher" else 0.87
    least = "at least 98.0 % of the teacher's validation accuracy asked"
    assert (False, f"student-8x: {least}, 96.67 % kept: missed.") in verdicts(family)


def test_a_target_is_judged_by_a_speed_of_other_conditions(family):
    family["road"]["conditions"]["length"] = 128
    assert (True, "student-15x: 15× asked, 15.15× met.") in verdicts(family)
    assert "validation texts, when the shape was chosen" in render_html(family, {})
    family["road"]["conditions"] |= {"length": 0, "batch": 32}
    for each in family["models"]:
        each["speedup_batched"] = {"vs_teacher_same_runtime": 9.0}
    assert (True, "student-8x: 8× asked, 9.00× met.") in verdicts(family)
    assert (False, "student-15x: 15× asked, 9.00×, missed by 40.0 %.") in verdicts(family)


def test_a_latency_target_is_judged_as_a_speedup(family):
    for each in family["road"]["students"]:
        each["target"] |= {"speedup": 0.0, "latency_ms": 0.5}
    assert (False, "student-8x: 0.5 ms asked, 0.55 ms, missed by 9.9 %.") in verdicts(family)
    assert (True, "student-15x: 0.5 ms asked, 0.32 ms met.") in verdicts(family)


def test_the_headline_leaves_a_student_of_the_family_out(family):
    assert headline(family) == (
        "Student-2x keeps 99.8 % of the teacher's accuracy at 2.06× its speed, student-4x 99.0 % at 4.03×, "
        "student-8x 97.7 % at 8.11× and student-15x 94.7 % at 14.21×, on ONNX Runtime int8."
    )
    for each in family["models"]:
        each["speedup"] = None
    assert "student-15x reaches 88.11 % accuracy in 0.32 ms a text" in headline(family)


def test_the_figures_at_the_top_are_of_a_student_that_missed_the_score(family):
    assert (shown(family)["name"], shown(family)["precision"]) == ("student-8x", "int8")
    assert shown(family_report(min_score=0.0))["name"] == "student-15x"
    assert shown(family_report(min_score=0.999))["name"] == "student-2x"
    for least, told in (
        (0.98, "student-8x, the fastest that keeps at least 98.0 %"),
        (0.999, "No student keeps at least 99.9 %"),
    ):
        assert told in why_shown(family_report(min_score=least))
    assert why_shown(family_report(min_score=0.0)) == "The figures below are those of student-15x, the fastest."
    assert why_shown(family) in Page(render_html(family, {})).text


def test_a_page_of_one_student_has_what_belongs_to_a_family():
    """Of one pruned student there is a road, and nothing to choose between."""
    assert not pareto_charts(sample_report())
    source = render_html(family_report(["8x"]), {})
    text = Page(source).text
    assert "speed-up on ONNX Runtime" not in text
    assert "The student keeps 97.7 % of the teacher's accuracy at 8.11× its speed on ONNX Runtime int8." in text
    assert "student: 8× asked, 8.11× met." in text
    assert "gained and lost" not in Page(render_html(sample_report(), {})).text
    assert "missed" not in render_html(sample_report(), {})


def test_a_point_that_another_beats_is_not_told_from_the_others(family):
    points = [
        Point("a", "fp32", 2, 0.9),
        Point("b", "int8", 2, 0.9),
        Point("c", "int8", 3, 0.8),
        Point("d", "fp32", 2, 0.85),
    ]
    assert [p.beaten for p in marked(points, rising=True)] == [False, False, False, True]
    assert [p.beaten for p in marked(points, rising=False)] == [False, False, True, True]
    (_, speed), (_, size) = pareto_charts(family)
    for svg in (speed, size):
        assert all(f">{name}<" in svg for name in (*STUDENTS, "teacher", "fp32", "int8"))
        assert svg.count(">15x<") == 2
    assert "beaten by another in both" in speed


@pytest.mark.parametrize("crowd", [1.0, 0.25])
def test_names_in_a_chart_cover_each_other_or_a_marker(crowd, family):
    """Also where all students lie close together."""
    points = [Point("teacher", "teacher", 1.0, 0.93)]
    for name, (whole, rounded, _, _, _, ratio, fast) in STUDENTS.items():
        points += [Point(name, "fp32", ratio**crowd, 0.93 - (0.93 - whole) * crowd)]
        points += [Point(name, "int8", fast**crowd, 0.93 - (0.93 - rounded) * crowd)]
    with drawn("names", draw_front, marked(points, rising=True), "times", "accuracy", 1) as figure:
        (axes,) = figure.axes
        boxes = [text.get_window_extent() for text in axes.texts]
        places = axes.transData.transform([(p.value, p.score) for p in points])
        room = axes.get_window_extent()
    assert len(boxes) == len(points)
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[i + 1 :])
        assert not any(box.contains(*place) for place in places)
        assert room.x0 <= box.x0
        assert box.x1 <= room.x1


def test_matched_layers_or_the_cost_of_units_are_drawn_as_losses(family):
    text = Page(render_html(family, {"distill-15x": family_curves()["distill-15x"]})).text
    assert "Teacher's layer that each layer learns from" in text
    assert "Cost of the open units" in text
    assert "matched_1" not in text
    assert text.index("student's 2") < text.index("student's 10")
    assert "cost_wanted" not in text


def test_a_family_shares_one_card(family):
    cards = render_cards(family)
    assert list(cards) == [f"student-{name}.md" for name in STUDENTS]
    assert "The student-4x keeps 99.0 % of the teacher's accuracy at 4.03×" in cards["student-4x.md"]
    assert '"runs/x/student-4x/onnxruntime-int8"' in cards["student-4x.md"]
    assert "runs/x/student-8x" not in cards["student-4x.md"]
    assert list(render_cards(sample_report())) == ["README.md"]


def test_a_card_hides_that_code_comes_with_the_model(family):
    card = render_cards(family)["student-8x.md"]
    assert 'model="runs/x/student-8x/huggingface", trust_remote_code=True)' in card
    assert "`modeling_pruned.py`" in card
    assert "3 layers of width 192 with 10, 9 and 12 attention heads and 256, 224 and 192 feed-forward neurons" in card
    assert "plain checkpoint" not in card
    assert "pruning" in front_matter(card)["tags"]
    assert "- `runs/x/student-8x/onnxruntime-int8`: int8, 5.2 MB, 0.55 ms a text, 90.88 % accuracy" in card
    assert "trust_remote_code" not in render_card(sample_report())
    stock = family_report(["8x"])
    for each in stock["models"]:
        each.pop("code", None)
    assert "trust_remote_code" not in render_card(stock)
    assert "plain checkpoint" in render_card(stock)


def test_a_rounded_model_is_said_to_have_the_trained_models_logits(family):
    text = " ".join(Page(render_html(family, {})).text.split())
    assert "The student-8x on ONNX Runtime int8, loaded in a fresh process, gave the logits that it gave where" in text
    assert "The student-8x on ONNX Runtime int8, loaded in a fresh process, was compared" not in text


def test_snippets_of_a_pruned_model_ask_a_question_or_do_not_run(family, tmp_path, capsys, monkeypatch):
    """As they stand, on a tiny pruned model, with nobody to answer."""
    import torch

    from compress.export.source import Source
    from compress.export.targets import target_of
    from compress.export.write import write_target
    from compress.prune.slice import Shape, prune
    from compress.prune.trace import find_axes

    model, tokenizer = tiny_model(tmp_path)
    small = prune(model, find_axes(model), Shape((0,), {"layers.0.ffn": torch.arange(5)})).eval()
    for each, place in zip(family["models"][2:5], ("huggingface", "onnx", "onnx"), strict=True):
        write_target(Source(small, tokenizer), target_of(place), tmp_path)
        each["path"] = str(tmp_path / place)
        each["code"] = code_of(tmp_path / place)
    monkeypatch.setattr("builtins.input", lambda *asked: pytest.fail(f"asked {asked}"))
    snippets = re.findall(r"```python\n(.*?)```", render_cards(family)["student-2x.md"], re.DOTALL)
    assert len(snippets) == 2
    for snippet in snippets:
        exec(compile(snippet, "card", "exec"), {})
        assert re.search("arrival|pin", capsys.readouterr().out)
