"""The complete distill pipeline on a tiny teacher: its results, skipped stages and rejections."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from distill.data.config import DataConfig
from distill.losses.config import LayerSizes
from distill.tasks.choose import TASKS
from distill.teacher.config import TeacherConfig
from pipelines import distill
from pipelines.runs.manifest import hash_file
from pipelines.settings.commands.cache import KeepConfig
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.facts import Facts
from pipelines.settings.rules.tasks import check_ignored_keep
from pipelines.stages.cache.stage import choose_signals
from support.commands import rejection_of, run_to_success, small_run, start
from support.reports import report_of
from support.run_inputs import make_inputs, stage_folder, write_csv
from support.tiny_models import LABELS, VOCABULARY, build_model, make_rows, saved, word_tokenizer


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory):
    """(output folder, printed output, arguments) of an undisturbed run with wandb offline."""
    folder = tmp_path_factory.mktemp("finished")
    teacher, data = make_inputs(folder)
    arguments = small_run(
        teacher, data, folder / "run", "--epochs", "2", "--teacher_train.epochs", "3", "--wandb", "offline"
    )
    return folder / "run", run_to_success("distill", arguments, fresh=True), arguments


def test_the_student_is_a_stock_checkpoint_with_card_and_onnx(finished_run):
    output, _, _ = finished_run
    student = AutoModelForSequenceClassification.from_pretrained(output / "student")
    tokenizer = AutoTokenizer.from_pretrained(output / "student")
    assert student.config.num_hidden_layers == 2
    assert [student.config.id2label[i] for i in range(5)] == list(LABELS)
    assert tokenizer("badi")["input_ids"]
    for name in ("README.md", "model.safetensors", "onnx/model.onnx", "onnx/tokenizer.json", "onnx/config.json"):
        assert (output / "student" / name).is_file(), name


def test_onnx_and_checkpoint_agree_on_texts_of_different_lengths(finished_run):
    from compress.export.common.huggingface import TorchModel
    from compress.export.onnx.graph import OnnxModel

    output, _, _ = finished_run
    tokenizer = AutoTokenizer.from_pretrained(output / "student")
    batch = dict(tokenizer([text for text, _ in make_rows(7, 5)], padding=True, return_tensors="np"))
    ours = TorchModel(output / "student")(batch)
    theirs = OnnxModel(output / "student" / "onnx", 1)(batch)
    np.testing.assert_allclose(theirs, ours, atol=1e-3)


def test_the_report_contains_every_model_in_every_runtime(finished_run):
    output, _, _ = finished_run
    report = report_of(output)
    assert {(m["name"], m["runtime"]) for m in report["models"]} == {
        (name, runtime) for name in ("teacher", "student") for runtime in ("pytorch", "onnxruntime")
    }
    assert [stage["name"] for stage in report["stages"]] == [
        *("data", "teacher", "cache", "distill", "export-teacher", "export", "evaluate")
    ]
    for model in report["models"]:
        times = {"median_ms", "p10_ms", "p90_ms", "best_ms"}
        assert set(model["latency"]) == {"batch", "length", "threads", "repeats"} | times
        assert model["latency"]["batch"] == 1
        assert model["latency"]["threads"] == 1
        assert model["latency_batched"]["batch"] == 4
        assert model["parity"]["max_difference"] < 1e-3
        assert Path(model["path"]).is_dir()
    assert (output / "report.html").read_text().lstrip().lower().startswith("<!doctype html>")


def test_scores_in_the_report_match_the_exported_student(finished_run):
    output, _, _ = finished_run
    report = report_of(output)
    model = AutoModelForSequenceClassification.from_pretrained(output / "student").eval()
    tokenizer = AutoTokenizer.from_pretrained(output / "student")
    right = 0
    with torch.no_grad():
        for text, label in make_rows(40, 2):
            row = model(**tokenizer(text, return_tensors="pt")).logits[0]
            right += model.config.id2label[int(row.argmax())] == label
    scores = [m["score"] for m in report["models"] if m["name"] == "student"]
    assert scores == pytest.approx([right / 40] * 2)
    params = {m["params"] for m in report["models"] if m["name"] == "student"}
    assert params == {model.num_parameters()}


def test_every_manifest_lists_its_files_with_their_hashes(finished_run):
    output, _, _ = finished_run
    for name in ("data", "teacher", "cache", "distill", "export", "evaluate", "report"):
        folder = stage_folder(output, name)
        manifest = json.loads((folder / "manifest.json").read_text())
        assert {"inputs", "config", "seed", "versions", "metrics", "wall_seconds", "peak_memory_bytes"} <= set(manifest)
        on_disk = {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()} - {"manifest.json"}
        assert set(manifest["outputs"]) == on_disk
        for file, stated in manifest["outputs"].items():
            assert hash_file(folder / file) == stated["sha256"]


def test_loss_terms_are_logged_with_weight_and_gradient_share(finished_run):
    output, _, _ = finished_run
    (file,) = (stage_folder(output, "distill") / "logs").glob("attempt-*/metrics.csv")
    header = file.read_text().splitlines()[0].split(",")
    for name in ("train/kl", "train/kl_weight", "train/kl_gradient_share", "val/score", "lr"):
        assert name in header
    assert list((output / "wandb").rglob("*.wandb"))


def test_repeating_the_command_skips_every_stage(finished_run):
    output, _, arguments = finished_run
    before = {f: f.stat().st_mtime_ns for f in output.rglob("manifest.json")}
    message = run_to_success("distill", arguments)
    for name in ("data", "teacher", "cache", "distill", "export-teacher", "export", "evaluate", "report"):
        assert f"{name}: already complete, skipped" in message
    assert {f: f.stat().st_mtime_ns for f in output.rglob("manifest.json")} == before


@pytest.mark.slow
def test_another_setting_adds_a_new_result_and_keeps_the_old(finished_run, tmp_path):
    output, _, arguments = finished_run
    copy = shutil.copytree(output, tmp_path / "copy")
    old = hash_file(stage_folder(copy, "distill") / "model/model.safetensors")
    changed = [str(copy) if word == str(output) else word for word in arguments]
    message = run_to_success("distill", [*changed, "--temperature", "5", "--until", "distill"])
    assert "cache: already complete, skipped" in message
    assert "distill: started" in message
    hashes = {hash_file(f) for f in (copy / "distill").glob("*/model/model.safetensors")}
    assert len(hashes) == 2
    assert old in hashes


@pytest.mark.parametrize("more", [("--loss.kl", "0", "--loss.ce", "1"), ("--teacher.online", "true")])
def test_a_dry_run_without_a_cache_reports_no_cache_size(more, tmp_path, capsys):
    distill.main([*small_run(*make_inputs(tmp_path), tmp_path / "run", *more), "--dry-run", "--predict", "false"])
    message = capsys.readouterr().out
    assert "nothing was written" in message
    assert "at most" not in message


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--keep.signals", "topk"), "keep.signals: expected none for text-classification, found 'topk'"),
        (("--keep.draws", "9"), "keep.draws: expected none for text-classification, found 9"),
    ],
)
def test_cache_settings_for_tokens_are_rejected_for_a_classifier(more, message, tmp_path, monkeypatch, capsys):
    assert message in rejection_of(
        distill, small_run(*make_inputs(tmp_path), tmp_path / "run", *more), monkeypatch, capsys
    )


def test_requested_cache_formats_are_used_for_a_classifier():
    task, sizes = TASKS["text-classification"], LayerSizes(4, 32, 4)
    config = DistillConfig("o", TeacherConfig("t"), data=DataConfig("d"))
    assert choose_signals(config, task, sizes, sizes) == KeepConfig(signals="logits")
    requested = replace(config, keep=KeepConfig(dtype="float16", compression="zstd", signals="logits"))
    check_ignored_keep(Facts(requested, 1, "text-classification"))
    chosen = choose_signals(requested, task, sizes, sizes)
    assert (chosen.dtype, chosen.compression, chosen.signals) == ("float16", "zstd", "logits")


@pytest.mark.slow
def test_a_dry_run_prints_the_plan_and_writes_nothing(finished_run, tmp_path):
    output, _, arguments = finished_run
    message = run_to_success("distill", [*arguments, "--dry-run", "--predict", "false"])
    assert message.count("complete, will be skipped") >= 7
    fresh = [str(tmp_path / "none") if word == str(output) else word for word in arguments]
    message = run_to_success("distill", [*fresh, "--dry-run"])
    assert message.count("will run") == 8
    assert "Predicted from a sample of the data" in message
    assert "110 / 10 / 40 texts" in message
    assert not (tmp_path / "none").exists()


def test_two_runs_at_once_in_one_folder_are_rejected(finished_run, tmp_path):
    output, _, arguments = finished_run
    arguments = [str(tmp_path / "shared") if word == str(output) else word for word in arguments]
    first = start("distill", arguments)
    for line in first.stdout:
        if "started" in line:
            break
    second = start("distill", arguments)
    message, _ = second.communicate(timeout=120)
    first.kill()
    first.wait()
    assert second.returncode == 2
    assert "another process is writing there" in message


def test_a_finished_run_is_redrawn_with_charts_of_defined_colors(finished_run):
    output, _, _ = finished_run
    assert "report.html" in run_to_success("report", ["--run", str(output), "--charts", "true"])
    charts = {file.name: file.read_text() for file in (output / "charts").iterdir()}
    assert {"accuracy-against-latency-1-text-per-call.svg", "distill-training-loss.svg"} <= charts.keys()
    for name, svg in charts.items():
        used = set(re.findall(r"var\((--[\w-]+)\)", svg))
        assert used, name
        assert all(f"{each}:" in svg for each in used), f"{name}: a color without a value"


def test_a_changed_output_file_is_rejected_by_name(finished_run, tmp_path):
    output, _, arguments = finished_run
    copy = shutil.copytree(output, tmp_path / "copy")
    weights = stage_folder(copy, "teacher") / "model/model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-7] ^= 1
    weights.write_bytes(content)
    process = start("distill", [str(copy) if word == str(output) else word for word in arguments])
    message, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "model/model.safetensors was changed" in message


def bad_head(folder: Path, tokenizer) -> str:
    return str(saved(build_model("bert", "ForMultipleChoice"), tokenizer, folder / "chooser"))


def other_tokenizer(folder: Path) -> str:
    vocabulary = [*VOCABULARY[:5], *reversed(VOCABULARY[5:])]
    tokenizer = word_tokenizer(vocabulary)
    return str(saved(build_model("bert"), tokenizer, folder / "other"))


def pickled(folder: Path) -> str:
    torch.save({"weight": torch.zeros(1)}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return str(folder)


def occupied(folder: Path) -> str:
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    return str(folder)


BAD = {
    "no such teacher": (lambda t, d, p, k: {"--teacher": str(p / "nowhere")}, "no such folder here"),
    "another task": (lambda t, d, p, k: {"--teacher": bad_head(p, k)}, "trained for another task"),
    "a pickle": (lambda t, d, p, k: {"--teacher": pickled(t)}, "a pickle (pytorch_model.bin)"),
    "tokenizers differ": (lambda t, d, p, k: {"--student": other_tokenizer(p)}, "expected the teacher's tokenizer"),
    "no such preset": (lambda t, d, p, k: {"--student": "layers=9"}, "the teacher has 4 layers"),
    "a missing column": (lambda t, d, p, k: {"--data.text": "txt"}, "did you mean 'text'"),
    "folder in use": (lambda t, d, p, k: {"--output": occupied(p / "full")}, "thesis.txt"),
    "output is a file": (lambda t, d, p, k: {"--output": str(d / "train.csv")}, "found a file"),
    "layer map": (lambda t, d, p, k: {"--loss.hidden": "1", "--loss.layer_map": "9:1"}, "found 9:1"),
    "no head, never trained": (
        lambda t, d, p, k: {"--teacher.finetune": "never"},
        "--teacher.finetune never rules out",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_ends_with_one_message(case, body_folder, data_folder, tmp_path, tokenizer, monkeypatch, capsys):
    change, expected = BAD[case]
    arguments = small_run(body_folder, data_folder, tmp_path / "run")
    for flag, value in change(body_folder, data_folder, tmp_path, tokenizer).items():
        arguments += [flag, value]
    assert expected in rejection_of(distill, arguments, monkeypatch, capsys)
    assert not list(tmp_path.rglob("manifest.json")) or case == "no head, never trained"


def text_file(name: str, content: bytes | list[tuple[str, str]]):
    def write(data: Path) -> None:
        if isinstance(content, bytes):
            (data / name).write_bytes(content)
        else:
            write_csv(data / name, content)

    return write


def broken_parquet(data: Path) -> None:
    rows = make_rows(2000, 3)
    table = pa.table({"text": [t for t, _ in rows], "label": [v for _, v in rows]})
    pa.parquet.write_table(table, data / "train.parquet", row_group_size=500, compression="zstd")
    content = bytearray((data / "train.parquet").read_bytes())
    middle = len(content) // 2
    content[middle : middle + 400] = bytes(400)
    (data / "train.parquet").write_bytes(content)


BAD_DATA = {
    "empty file": (text_file("train.csv", b""), "the file is empty"),
    "header only": (text_file("train.csv", b"text,label\n"), "found none below the header"),
    "one class": (text_file("train.csv", [("a", "x"), ("b", "x")]), "at least two classes"),
    "label in test only": (text_file("test.csv", [("a", "billing"), ("b", "mystery")]), "'mystery' (1 rows)"),
    "broken csv": (text_file("train.csv", b"text,label\na,x\nb,y,z\n"), "#3"),
    "broken jsonl": (text_file("train.jsonl", b'{"text": "a", "label": "x"}\n{"text": \n'), "row 2"),
    "broken parquet": (broken_parquet, "are damaged"),
    "no label": (text_file("train.csv", [("a", "x"), ("b", ""), ("c", "y")]), "contains no label in row 2, 1 in all"),
    "another encoding": (text_file("train.csv", "text,label\nä,x\nb,y\n".encode("latin-1")), "UTF-8"),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data_ends_with_one_message(case, body_folder, data_folder, tmp_path, monkeypatch, capsys):
    write, expected = BAD_DATA[case]
    if "json" in case or "parquet" in case:
        (data_folder / "train.csv").unlink()
    write(data_folder)
    arguments = small_run(body_folder, data_folder, tmp_path / "run")
    assert expected in rejection_of(distill, arguments, monkeypatch, capsys)
    assert not list(tmp_path.rglob("manifest.json"))
