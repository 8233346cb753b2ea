"""What a report becomes: a page that stands alone, a card that parses, a table for the terminal."""

import copy
import random
import re
from html.parser import HTMLParser

import pytest
import yaml

from pipelines.render import render_card, render_html, summary_rows

VOID = {"meta", "link", "br", "hr", "img", "input"}


def entry(name, runtime, score, params, size, ms, ratio, agreement):
    def took(batch, median):
        times = {"median_ms": median, "p10_ms": median * 0.93, "p90_ms": median * 1.21}
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
    quantized["latency"]["median_ms"] = 0.61
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
