"""Tests the report of a frontier in which no pruned model reaches a requested speed."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from distill.tasks.text_classification import TextClassification
from pipelines.reports.pruning_summary import UNREACHED
from pipelines.reports.render import render_cards, render_html
from pipelines.reports.schema import EVALUATION
from pipelines.runs.console import Console
from pipelines.runs.stage import Artefact
from pipelines.stages.deliver.report import build_report, print_results
from support.sample_reports import sample_report

CONDITIONS = {"runtime": "onnxruntime", "precision": "int8", "batch": 1, "length": 0, "threads": 1}
RUN: Any = SimpleNamespace(seed=7)


def write_stage(folder: Path, name: str, config: dict[str, Any], metrics: dict[str, Any]) -> Artefact:
    (folder / name).mkdir()
    measured = {"wall_seconds": 1.0, "peak_memory_bytes": 1, "resumed": False, "versions": {}}
    manifest: Any = {"config": config, "metrics": metrics, **measured}
    return Artefact(name, folder / name, "digest", manifest)


@pytest.fixture
def stages(tmp_path) -> list[Artefact]:
    """The stages of a frontier without a pruned student."""
    sample, start = sample_report(), {"tokens": 9, "params": 9}
    stages = [
        write_stage(tmp_path, "data", {}, sample["data"]),
        write_stage(tmp_path, "teacher", {}, {}),
        write_stage(tmp_path, "start", {"student": "teacher"}, start),
        write_stage(tmp_path, "scores", {}, {}),
        write_stage(tmp_path, "shape-128x", {"budget": CONDITIONS}, {UNREACHED: "no shape is as fast"}),
        write_stage(tmp_path, "evaluate", {}, {}),
    ]
    (tmp_path / "teacher" / "model").mkdir()
    (tmp_path / "teacher" / "model" / "config.json").write_text(json.dumps({"vocab_size": 9}))
    save_file({"layers": torch.zeros(2)}, tmp_path / "scores" / "scores.safetensors")
    models = [each | {"scores": {"accuracy": each["score"]}} for each in sample["models"]]
    (tmp_path / "evaluate" / EVALUATION).write_text(json.dumps(models))
    return stages


def test_a_frontier_without_a_pruned_student_has_a_report_of_the_others(stages, capsys):
    task = TextClassification(tuple(map(str, range(77))))
    report = build_report(RUN, {"data": {}, "budget": {"frontier": True}}, task, stages[-1], stages)
    assert "pruning" not in report
    assert "The student keeps" in render_html(report, {})
    assert render_cards(report)
    print_results(Console(), report, {})
    assert "student" in capsys.readouterr().out
