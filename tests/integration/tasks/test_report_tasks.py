"""Reports of every task: all scores with task-specific wording, and model card snippets that run."""

import json
import math
import re

import pytest
import torch

from distill.checkpoint.sentence_form import SentenceForm
from distill.data.batches.batches import EvalBatches
from distill.data.config import DataConfig
from distill.tasks.choose import TASKS
from pipelines.report import redraw
from pipelines.reports.charts import draw_figure, draw_speed
from pipelines.reports.formatting import LOWER_IS_BETTER, format_quantity, format_score
from pipelines.reports.headline import write_headline
from pipelines.reports.render import render_card, render_html
from pipelines.reports.tables import build_scores
from pipelines.reports.wording import WORDING
from pipelines.stages.deliver.report import print_results
from support.sample_reports import Page, front_matter, sample_curves, sample_report, without_teacher
from support.task_data import (
    books_data,
    labelled_data,
    multi_label_data,
    pair_data,
    question_data,
    regression_data,
    tagged_data,
)
from support.tiny_models import LABELS, VOCABULARY, build_model
from unit.distill.checkpoint.test_sentence_folder import build

SCORES = {  # (teacher's score, student's score)
    "text-classification": {"accuracy": (0.9305, 0.9154), "macro F1": (0.9312, 0.9158)},
    "multi-label": {"micro F1": (0.81, 0.79), "macro F1": (0.6, 0.5), "exact match": (0.7, 0.65)},
    "regression": {"Spearman": (0.9, 0.88), "Pearson": (0.91, 0.89), "RMSE": (0.45, 0.52)},
    "token-classification": {
        "span F1": (0.5872, 0.5511),
        "precision": (0.5565, 0.54),
        "recall": (0.6214, 0.5627),
        "accuracy": (0.6752, 0.66),
    },
    "question-answering": {"F1": (0.88, 0.85), "exact match": (0.81, 0.775)},
    "sentence-embedding": {"Spearman": (0.8123, 0.8), "Pearson": (0.7987, 0.79)},
    "masked-lm": {"token accuracy": (0.6, 0.55), "perplexity": (8.83, 10.2)},
    "causal-lm": {"token accuracy": (0.5547, 0.5312), "perplexity": (29.64, 1234.5)},
    "chat": {"token accuracy": (0.71, 0.69), "perplexity": (4.2, 5.1)},
}


def report_of(task):
    report = sample_report() | {"task": task, "metric": next(iter(SCORES[task]))}
    for each in report["models"]:
        each["scores"] = {name: pair[each["name"] == "student"] for name, pair in SCORES[task].items()}
        each["score"] = each["scores"][report["metric"]]
    return report


class RecordingConsole:
    """A console that records the tables passed to it."""

    def __init__(self):
        self.tables = {}

    def table(self, title, header, rows):
        self.tables[title] = (list(header), [list(row) for row in rows])

    def say(self, text):
        pass


def text_of(report, curves=None):
    return " ".join(Page(render_html(report, curves or {})).text.split())


@pytest.mark.parametrize("task", SCORES)
def test_all_scores_of_a_task_are_shown_with_explanations(task):
    report, console = report_of(task), RecordingConsole()
    page, card = text_of(report), " ".join(render_card(report).split())
    print_results(console, report, {})
    header, rows = console.tables["Scores"]
    assert [name.partition(" (")[0] for name in header] == ["model", "runtime", *SCORES[task]]
    assert [row[:2] for row in rows] == [[e["name"], f"{'ONNX Runtime' if i % 2 else 'PyTorch'}"]
                                         for i, e in enumerate(report["models"])]  # fmt: skip
    for column, (name, pair) in enumerate(SCORES[task].items(), 2):
        better = "lower is better" if name in LOWER_IS_BETTER else "higher is better"
        note = f"{name[0].upper()}{name[1:]}: {WORDING[task].scores[name]}; {better}."
        assert note in page
        assert note.replace("&", "&amp;") in card
        assert [rows[0][column], rows[3][column]] == [format_score(score, name) for score in pair]
        for score in pair:
            assert format_score(score, name) in page
            assert format_score(score, name) in card


def test_the_teacher_is_listed_first_even_if_measured_last():
    report = report_of("causal-lm")
    report["models"].reverse()
    assert [row[0] for row in build_scores(report).rows] == ["teacher", "teacher", "student", "student"]


def test_a_single_score_gets_no_separate_table():
    report, console = report_of("text-classification"), RecordingConsole()
    for each in report["models"]:
        each["scores"].pop("macro F1")
    print_results(console, report, {})
    assert list(console.tables) == ["Result"]
    assert "<h2>Scores</h2>" not in render_html(report, {})
    assert "All scores" not in render_card(report)


def test_scores_of_another_tokenizer_get_a_warning():
    report = report_of("causal-lm")
    warning = "The scores of student are on other tokens than the teacher's"
    assert warning not in text_of(report)
    assert warning not in text_of(without_teacher(report_of("causal-lm")))
    for each in report["models"][2:]:
        each["agreement_with_teacher"] = None
    assert warning in text_of(report)


def test_shares_are_written_in_percent_and_other_scores_as_numbers():
    formatted = {name: format_score(0.5, name) for scores in SCORES.values() for name in scores}
    numbers = {"Spearman": "0.5000", "Pearson": "0.5000", "RMSE": "0.5000", "perplexity": "0.50"}
    assert formatted == dict.fromkeys(formatted, "50.00 %") | numbers
    assert format_score(1234.5, "perplexity") == "1,234.50"


TASK_DATA = {  # data, and the width of the logits of each row or token
    "text-classification": (lambda folder: labelled_data(folder, lambda text, label: label), "labels"),
    "multi-label": (multi_label_data, "labels"),
    "regression": (regression_data, 1),
    "token-classification": (tagged_data, "labels"),
    "question-answering": (question_data, 2),
    "sentence-embedding": (pair_data, 8),
    "masked-lm": (books_data, len(VOCABULARY)),
    "causal-lm": (books_data, len(VOCABULARY)),
}


@pytest.mark.parametrize("name", TASK_DATA)
def test_every_score_of_a_task_has_a_wording(name, tokenizer, tmp_path):
    make, width = TASK_DATA[name]
    splits = TASKS[name].read(DataConfig(path=str(make(tmp_path / "data"))), 0)
    task = TASKS[name].build(splits.labels, {})
    rows = task.encode(tokenizer, splits.test, 32)
    scorer, batches = task.scorer(rows), EvalBatches(rows, 4, 0)
    alone = name in ("text-classification", "multi-label", "regression", "sentence-embedding")
    for row_numbers, batch in zip(batches.order, batches, strict=True):
        shape = batch["input_ids"].shape[: 1 if alone else 2]
        scorer.record(row_numbers, batch, torch.randn(*shape, len(task.labels) if width == "labels" else width))
    assert set(scorer.scores()) == set(WORDING[name].scores) == set(SCORES[name])


def test_every_task_has_a_wording():
    assert set(WORDING) == set(TASKS) == set(SCORES)
    assert set(WORDING["chat"].scores) == set(WORDING["causal-lm"].scores)


def test_the_validation_curve_has_the_name_of_the_tasks_validation_metric():
    report = report_of("token-classification")
    report["metric"] = "accuracy"
    assert "Validation accuracy" in text_of(report, sample_curves())
    assert "Validation span F1" in text_of(report_of("token-classification"), sample_curves())
    assert "Validation start and end accuracy" in text_of(report_of("question-answering"), sample_curves())


def test_taggers_and_language_models_have_their_own_wording():
    tagger, writer = text_of(report_of("token-classification")), report_of("causal-lm")
    writer["data"] |= {"classes": 0, "train": 4, "test": 1}
    page, card = text_of(writer), render_card(writer)
    assert "Span F1 and speed" in tagger
    assert "Span f1" not in tagger
    assert "of the words of the test split get the teacher's tag" in tagger
    assert "Span F1 is measured on the 3,080 sentences of the test split." in tagger
    assert "100.0 % get the same tag." in tagger
    assert "standard error" not in tagger
    assert "Token accuracy is measured on the 1 document of the test split." in page
    assert "classes" not in page
    assert "# Language model\n" in card
    assert "It was trained on 4 documents and" in card
    assert "classif" not in card
    assert front_matter(card)["pipeline_tag"] == "text-generation"
    assert format_quantity(1, "pairs of sentences") == "1 pair of sentences"


@pytest.mark.parametrize("index", range(4))
def test_an_undefined_correlation_does_not_appear_as_nan(index):
    """The correlation is NaN for a model that predicts the same number for every text."""
    report = report_of("sentence-embedding")
    report["models"][index]["score"] = report["models"][index]["scores"]["Spearman"] = math.nan
    assert "nan" not in text_of(report)
    assert "nan" not in render_card(report)


def test_the_headline_gives_the_absolute_score_when_the_teachers_is_negative():
    report = report_of("regression")
    for each in report["models"][:2]:
        each["score"] = -0.1
    assert write_headline(report) == (
        "The student reaches 0.8800 Spearman correlation in 1.25 ms per text on ONNX Runtime."
    )


def test_the_label_of_the_latency_axis_fits_the_figure():
    models = sample_report()["models"]
    with draw_figure("latency", draw_speed, models, "latency", "accuracy") as figure:
        figure.draw_without_rendering()
        label, (width, _) = figure.axes[0].xaxis.label.get_window_extent(), figure.canvas.get_width_height()
    assert label.x0 >= 0
    assert label.x1 <= width


def test_redrawing_with_chart_files_draws_each_chart_once(tmp_path, monkeypatch):
    folder = tmp_path / "report" / "0a1b"
    folder.mkdir(parents=True)
    for target in (folder, tmp_path):  # the stage's copy and the published copy
        (target / "report.json").write_text(json.dumps(sample_report()))
    (folder / "curves.json").write_text(json.dumps(sample_curves()))
    captions = []

    def counting(caption, *content):
        captions.append(caption)
        return draw_figure(caption, *content)

    monkeypatch.setattr("pipelines.reports.charts.draw_figure", counting)
    redraw(tmp_path, RecordingConsole(), charts=True)
    files = list((tmp_path / "charts").glob("*.svg"))
    assert len(files) == len(captions) == Page((tmp_path / "report.html").read_text()).tags.count("svg")
    assert "<svg" in files[0].read_text()


HEADS = {
    "multi-label": ("ForSequenceClassification", {"problem_type": "multi_label_classification"}),
    "regression": (
        "ForSequenceClassification",
        {"num_labels": 1, "id2label": {0: "number"}, "label2id": {"number": 0}},
    ),
    "token-classification": ("ForTokenClassification", {}),
    "question-answering": ("ForQuestionAnswering", {"num_labels": 2, "id2label": {0: "a", 1: "b"}, "label2id": {}}),
    "masked-lm": ("ForMaskedLM", {}),
    "causal-lm": ("LMHeadModel", {"is_decoder": True}),
    "chat": ("LMHeadModel", {"is_decoder": True}),
    "sentence-embedding": ("Model", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("task", HEADS)
def test_snippets_of_the_model_card_run_for_every_task(task, tokenizer, tmp_path, capsys):
    """Executes the unmodified snippets on a tiny model of the task."""
    from compress.export.common.source import Source
    from compress.export.common.targets import find_target
    from compress.export.write import write_target

    head, changes = HEADS[task]
    model = build("bert", SentenceForm("mean")) if head == "Model" else build_model("bert", head, **changes)
    source, report = Source(model, tokenizer), report_of(task)
    for each, target in zip(report["models"][2:], ("huggingface", "onnx"), strict=True):
        write_target(source, find_target(target), tmp_path)
        each["path"] = str(tmp_path / target)
    snippets = re.findall(r"```python\n(.*?)```", render_card(report), re.DOTALL)
    assert len(snippets) == 2
    for snippet in snippets:
        exec(compile(snippet, "card", "exec"), {})
        message = capsys.readouterr().out
        assert message
        if task == "token-classification":
            assert any(label in message for label in LABELS)
