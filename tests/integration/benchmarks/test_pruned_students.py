"""The benchmark of pruned students at tiny size, with the real peer libraries."""

import csv
import json
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.pruning.settings import RATES
from compress.export.common.huggingface import TorchModel
from compress.export.common.source import Source
from compress.export.common.targets import ExportTarget
from compress.export.onnx.graph import OnnxModel
from compress.export.write import write_targets
from compress.prune.budget import Budget
from distill.data.config import DataConfig
from distill.student.build import build_student
from distill.teacher.config import TeacherConfig
from distill.train.config import TrainConfig
from pipelines.settings.commands.distill import DistillConfig
from support.tiny_models import LABELS, build_model, make_rows, saved

PEERS = ("textbrewer", "torch_pruning")
ABSENT = [name for name in PEERS if find_spec(name) is None]
needs_peers = pytest.mark.skipif(bool(ABSENT), reason=f"{', '.join(ABSENT)} not installed: pip install -e '.[bench]'")
METHODS = ["ours", "layers", "layers-slower", "fresh", "fresh-slower", "textbrewer", "torch-pruning"]
WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 512}  # so that width affects latency


@pytest.fixture(scope="module")
def teacher(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A teacher with 4 layers, 4 heads of width 32 and 512 neurons, trained on the task."""
    torch.manual_seed(0)
    scattered = build_model("bert", **WIDE)
    model = type(scattered)(scattered.config).train()  # a new model has small initial weights
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = make_rows(160, 1)
    for start in [*range(0, 160, 16)] * 6:
        texts, labels = zip(*rows[start : start + 16], strict=True)
        batch = tokenizer(list(texts), padding=True, return_tensors="pt")
        model(**batch, labels=torch.tensor([LABELS.index(label) for label in labels])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def read_sizes(model: PreTrainedModel) -> tuple[list[int], list[int]]:
    """Returns the number of heads and of neurons of each layer."""
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "intermediate")]
    return (
        [layer.attention.self.num_attention_heads for layer in layers],
        [layer.intermediate.dense.out_features for layer in layers],
    )


@needs_peers
@pytest.mark.slow
@pytest.mark.parametrize("per_layer", [False, True])
def test_a_model_pruned_by_torch_pruning_computes_the_same_after_export(
    teacher: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, per_layer: bool
):
    from benchmarks.pruning.peers import prune_with_torch_pruning

    before = {name: weight.clone() for name, weight in teacher.state_dict().items()}
    small = prune_with_torch_pruning(teacher, 0.5, per_layer=per_layer)
    heads, neurons = read_sizes(small)
    if per_layer:
        assert heads == [2] * 4
        assert neurons == [256] * 4
    assert sum(neurons) < 4 * 512
    assert sum(heads) < 16
    assert all(torch.equal(weight, before[name]) for name, weight in teacher.state_dict().items())
    model = TorchModel.of(small)
    write_targets(Source(small, tokenizer), [ExportTarget("onnxruntime")], tmp_path)
    batch = {name: np.ones((2, 7), np.int64) for name in model.names}
    batch["input_ids"] = np.random.default_rng(0).integers(5, 100, (2, 7))
    assert np.abs(OnnxModel(tmp_path / "onnxruntime", 1)(batch) - model(batch)).max() < 1e-4


def test_find_ratio_returns_the_smallest_ratio_that_is_fast_enough():
    from benchmarks.pruning.peers import LARGEST_RATIO, find_ratio

    ratio = find_ratio(lambda ratio: 1 / (1 - ratio), 3.0)
    assert 3.0 <= 1 / (1 - ratio) <= 3.0 * 1.025
    assert find_ratio(lambda ratio: 1 + ratio, 3.0) == LARGEST_RATIO


def test_textbrewer_students_have_the_sizes_and_weights_of_its_examples(teacher: PreTrainedModel):
    from benchmarks.pruning.textbrewer import TextBrewerSize, build_textbrewer_student, list_sizes

    student_sizes = list_sizes(teacher)
    assert TextBrewerSize("T3", 2, 128, 512) in student_sizes
    assert TextBrewerSize("T3-small", 4, 64, 256) in student_sizes
    assert all(size.hidden % 4 == 0 for size in student_sizes)
    copied = build_textbrewer_student(teacher, TextBrewerSize("T3", 2, 128, 512), 0).state_dict()
    expected = build_student(teacher, "layers=0,1").state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in copied.items())
    narrow: Any = build_textbrewer_student(teacher, TextBrewerSize("T3-small", 3, 64, 256), 0)
    other: Any = build_textbrewer_student(teacher, TextBrewerSize("T3-small", 3, 64, 256), 1)
    assert narrow.config.num_attention_heads == 4
    assert not torch.equal(narrow.classifier.weight, other.classifier.weight)


def test_every_layer_is_matched_and_narrower_layers_are_projected():
    from benchmarks.pruning.textbrewer import match_layers

    matches = match_layers(2, 6, (64, 128))
    assert [(each["layer_S"], each["layer_T"]) for each in matches] == [(0, 0), (1, 3), (2, 6)]
    assert all(each["proj"] == ["linear", 64, 128] for each in matches)
    assert all("proj" not in each for each in match_layers(2, 6, (128, 128)))


def test_a_row_limit_keeps_every_class_of_train(tmp_path: Path):
    from benchmarks.pruning.settings import limit_rows
    from distill.data.sources.tables import read_splits

    data = write_data(tmp_path / "data")
    splits = read_splits(limit_rows(str(data), 10, tmp_path))
    assert sorted(splits["train"]["label"].to_pylist()) == sorted(2 * list(dict(make_rows(5, 0)).values()))
    assert splits["test"].num_rows == 40


def write_data(folder: Path) -> Path:
    folder.mkdir()
    for split, count, seed in (("train", 160, 1), ("test", 40, 2)):
        with (folder / f"{split}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("text", "label"), *make_rows(count, seed)])
    return folder


@pytest.fixture(scope="module")
def bench(
    teacher: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[str], Path]:
    """The arguments and the output folder of a finished benchmark."""
    from benchmarks.pruning.pruned_students import main

    root = tmp_path_factory.mktemp("bench")
    folder, data = saved(teacher, tokenizer, root / "teacher"), write_data(root / "data")
    arguments = f"--teacher {folder} --data {data} --speedup 1.4 --epochs 2 --rates 1e-3 --trials 0 --rounds 2"
    arguments += f" --batch-size 16 --max-length 32 --validation-fraction 0.2 --output {root / 'out'}"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("benchmarks.pruning.peers.HALVINGS", 3)
        main(arguments.split())
    return arguments.split(), root / "out"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_trained_students_are_measured_and_listed_in_the_table(
    teacher: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Covers the methods which need no peer library."""
    from benchmarks.pruning.pruned_students import main

    folder, data = saved(teacher, tokenizer, tmp_path / "teacher"), write_data(tmp_path / "data")
    arguments = f"--teacher {folder} --data {data} --speedup 1.1 --epochs 1 --rates 1e-3 --trials 0 --rounds 1"
    arguments += f" --batch-size 16 --max-length 32 --validation-fraction 0.2 --output {tmp_path / 'out'}"
    main([*arguments.split(), "--methods", "ours", "layers", "fresh"])
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [student["method"] for student in results["students"]] == ["ours", "layers", "fresh"]
    for student in results["students"]:
        assert student["speedup"] == results["teacher"]["latency"]["best_ms"] / student["latency"]["best_ms"]
        assert student["test"] == pytest.approx(accuracy(Path(student["folder"])))
    table = capsys.readouterr().out
    assert all(f"│ {method} " in table for method in ("teacher", "ours", "layers", "fresh"))


def test_each_speed_up_gets_its_own_size_limit(tmp_path: Path):
    """Sizes correspond to the speed-ups in the order in which the user passed them."""
    from benchmarks.pruning.settings import read_config

    budget = Budget(speedup="4,2", max_bytes="8MB,10MB")
    config = DistillConfig(str(tmp_path), TeacherConfig(model="t"), data=DataConfig(path="d"), budget=budget)
    (tmp_path / "config.json").write_text(json.dumps(asdict(config)))
    for speedup, max_bytes in ((4.0, 8_000_000), (2.0, 10_000_000)):
        limits = read_config(tmp_path, speedup).budget
        assert (limits.speedups, limits.find_max_bytes(speedup)) == ((speedup,), max_bytes)


@pytest.mark.parametrize(
    ("arguments", "ours", "peers"),
    [("", RATES, RATES), ("--rates 1 2", [1, 2], [1, 2]), ("--ours run", [7], [7]), ("--ours run --rates 1", [7], [1])],
)
def test_students_of_finished_runs_keep_their_rate_and_others_try_those_of_the_command(arguments, ours, peers):
    from benchmarks.pruning.pruned_students import Benchmark, build_parser

    benchmark: Any = object.__new__(Benchmark)
    benchmark.options = build_parser().parse_args(arguments.split())
    benchmark.first = SimpleNamespace(config=SimpleNamespace(train=TrainConfig(learning_rate=7)))
    assert benchmark.list_rates("ours") == ours
    assert benchmark.list_rates("layers") == peers


def read_results(bench: tuple[list[str], Path]) -> dict[str, Any]:
    return json.loads((bench[1] / "results.json").read_text())


@needs_peers
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_method_is_trained_deployed_and_measured(bench: tuple[list[str], Path]):
    results = read_results(bench)
    methods = [student["method"] for student in results["students"]]
    assert [method for method in METHODS if method in methods or not method.endswith("-slower")] == methods
    for student in results["students"]:
        assert student["speedup"] == results["teacher"]["latency"]["best_ms"] / student["latency"]["best_ms"]
        assert student["without_embeddings"] <= results["teacher"]["without_embeddings"]
        assert student["test"] == pytest.approx(accuracy(Path(student["folder"])))
    assert results["teacher"]["test"] > 0.9
    assert len({student["test"] for student in results["tried"]}) > 1, "none has learnt anything"
    assert len(results["tried"]) == len(methods) + 2, "two sizes of TextBrewer and Torch-Pruning, one of all others"
    for method in methods:
        students = [student for student in results["tried"] if student["method"] == method]
        selected = [student for student in students if student["selected"]]
        assert len(selected) == 1
        assert selected[0]["validation"] == max(student["validation"] for student in students)


def accuracy(folder: Path) -> float:
    """Computes the accuracy from the deployed file and its tokenizer, without the benchmark's code."""
    from tokenizers import Tokenizer

    export = folder / "onnxruntime"
    model, tokenizer = OnnxModel(export, 1), Tokenizer.from_file(str(export / "tokenizer.json"))
    correct = []
    for text, label in make_rows(40, 2):
        row = tokenizer.encode(text)
        fields: dict[str, Any] = {
            "input_ids": row.ids,
            "attention_mask": row.attention_mask,
            "token_type_ids": row.type_ids,
        }
        logits = model({name: np.asarray([value], np.int64) for name, value in fields.items()})
        correct.append(LABELS[int(logits.argmax())] == label)
    return sum(correct) / len(correct)


@needs_peers
@pytest.mark.slow
def test_a_second_call_retrains_nothing(
    bench: tuple[list[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    import textbrewer

    from benchmarks.pruning.pruned_students import main

    monkeypatch.setattr(textbrewer.GeneralDistiller, "train", None)
    monkeypatch.delattr("benchmarks.pruning.peers.fit_module")
    before = read_results(bench)
    main(bench[0])
    after = read_results(bench)
    assert after["tried"] == before["tried"]
    table = capsys.readouterr().out
    for student in after["students"]:
        line = next(line for line in table.splitlines() if line.startswith(f"│ {student['method']} "))
        assert f"{student['test']:.2%}" in line
        assert f"{student['speedup']:.2f}" in line


@needs_peers
@pytest.mark.slow
def test_a_finished_run_is_reused_with_its_own_settings(bench: tuple[list[str], Path], monkeypatch: pytest.MonkeyPatch):
    from benchmarks.pruning.pruned_students import main

    monkeypatch.delattr("benchmarks.pruning.peers.fit_module")
    before, run = read_results(bench), str(bench[1] / "ours" / "seed-0")
    arguments = ["--ours", run, "--speedup", "1.4", "--methods", "ours", "layers", "--epochs", "7"]
    main([*arguments, "--rounds", "1", "--output", str(bench[1])])
    after = read_results(bench)
    assert after["settings"] == before["settings"]
    assert after["tried"] == [student for student in before["tried"] if student["method"] in ("ours", "layers")]


@needs_peers
@pytest.mark.slow
def test_further_seeds_use_the_learning_rate_that_was_best_on_validation(
    bench: tuple[list[str], Path], monkeypatch: pytest.MonkeyPatch
):
    from benchmarks.pruning.pruned_students import main

    expected = iter((0.3, 0.6, 0.1, 0.9))  # both rates with seed 0, the better rate with seed 1, the teacher
    monkeypatch.setattr(
        "benchmarks.pruning.pruned_students.Benchmark.measure_scores",
        lambda *_: {"validation": next(expected), "test": 0.5},
    )
    main([*bench[0], "--methods", "layers", "--seeds", "0", "1", "--rates", "1e-4", "2e-3", "--rounds", "1"])
    results = read_results(bench)
    assert [(student["seed"], student["rate"]) for student in results["tried"]] == [(0, 1e-4), (0, 2e-3), (1, 2e-3)]
    assert [student["seed"] for student in results["students"]] == [0, 1]
    assert [student["validation"] for student in results["students"]] == [0.6, 0.1]
