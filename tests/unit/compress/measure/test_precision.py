"""Tests training precisions: what each mode computes, that all of them train, and unsupported devices."""

import copy
import gc
import json
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification

from compress.errors import CompressError
from compress.measure import precision_speed
from compress.measure.precision_modes import (
    MODES,
    check_mode,
    convert_to_mode,
    find_unsupported_reason,
    list_candidate_modes,
    restore_stock_layers,
)
from compress.measure.precision_speed import measure_peak_flops
from compress.quantize.prepare import prepare_quantized
from compress.quantize.schemes import resolve_scheme
from distill.errors import InputError
from distill.train.config import TrainConfig
from distill.train.optimizer import build_optimizer
from distill.train.optimizer_kinds import OPTIMIZERS
from integration.tasks.test_language_command import decoder
from pipelines import distill
from pipelines.runs.manifest import seal_manifest
from pipelines.stages.train import precision
from support.commands import rejection_of, run_to_success, small_run
from support.reports import report_of
from support.run_inputs import make_inputs
from support.task_data import (
    WORD_PAIRS,
    books_data,
    multi_label_data,
    pair_data,
    question_data,
    regression_data,
    tagged_data,
)
from support.tiny_models import build_model, saved

CPU = torch.device("cpu")
SIZES = {"hidden_size": 64, "intermediate_size": 96}
STOCHASTIC = ("adamw", "adamw-8bit", "adamw-4bit", "adamw-fp8")
CUSTOM_MODES = ["bf16-stochastic", "fp8", "int8-mixed"]


def trained(name: str, batch: dict, steps: int = 25) -> tuple[nn.Module, list[float]]:
    torch.manual_seed(0)
    model = build_model("bert", num_hidden_layers=1, **SIZES)
    convert_to_mode(name, model, emulate=True)
    rounding = MODES[name].stochastic_rounding
    optimizer = build_optimizer(model, [], TrainConfig(learning_rate=3e-3), stochastic_rounding=rounding)
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(**batch).logits.float(), torch.arange(6) % 5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return model, losses


@pytest.mark.parametrize("name", ["32", "fp8", "int8-mixed", pytest.param("bf16-stochastic", marks=pytest.mark.slow)])
def test_every_mode_trains_and_converts_to_a_stock_float32_model(name: str, token_batch):
    model, losses = trained(name, token_batch)
    assert losses[-1] < 0.5 * losses[0]
    kinds = {type(layer).__name__ for layer in model.modules() if isinstance(layer, nn.Linear)}
    wanted = {"fp8": "Float8Linear", "int8-mixed": "Int8MixedPrecisionTrainingLinear"}.get(name, "Linear")
    assert wanted in kinds
    with torch.no_grad():
        before = model(**token_batch).logits.float()
    restore_stock_layers(model)
    assert {type(layer) for layer in model.modules() if isinstance(layer, nn.Linear)} == {nn.Linear}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    with torch.no_grad():
        after = model(**token_batch).logits
    assert (after - before).abs().max() < 0.1 * before.abs().max()
    assert set(model.state_dict()) == set(build_model("bert", num_hidden_layers=1, **SIZES).state_dict())


AUTO = ("--precision", "auto", "--until", "general")


def read_measurements(output: Path) -> dict:
    """Returns the measurements of a run's only precision stage."""
    (file,) = (output / "precision").glob("*/precision.json")
    return json.loads(file.read_text())


@pytest.mark.slow
def test_auto_measures_the_student_on_real_batches_with_the_training_threads(
    headed_folder, data_folder, tmp_path, capsys
):
    arguments = small_run(headed_folder, data_folder, tmp_path / "run", *AUTO, "--threads", "2")
    before = torch.get_num_threads()
    distill.main(arguments)
    expected, found = capsys.readouterr().out, read_measurements(tmp_path / "run")
    assert torch.get_num_threads() == before
    assert f"precision: {found['chosen']} is chosen here (a step of the student on 8x" in expected
    student = AutoModelForSequenceClassification.from_pretrained(headed_folder)
    student.bert.encoder.layer = student.bert.encoder.layer[:2]
    assert found["measured"]["student"] == f"BertForSequenceClassification, {student.num_parameters():,} parameters"
    assert found["measured"]["threads"] == 2
    rows, lengths = zip(*found["measured"]["batches"], strict=True)
    assert rows == (8, 8, 8)
    assert 7 <= min(lengths) <= max(lengths) <= 14, "five to twelve words and two marks"
    assert set(found["seconds_a_step"]) == set(list_candidate_modes(CPU))
    assert all(0 < share <= 1 for share in found["share_of_ceiling"].values())


def chats(folder: Path) -> Path:
    folder.mkdir()
    turns = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in WORD_PAIRS.items()]
    for split in ("train", "validation", "test"):
        (folder / f"{split}.jsonl").write_text("\n".join(json.dumps({"messages": each}) for each in turns[:30]))
    return folder


PLAIN = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
PLAIN += "{% if add_generation_prompt %}assistant {% endif %}"
TASKS = {
    "token-classification": ("Model", tagged_data),
    "multi-label": ("Model", multi_label_data),
    "regression": ("Model", regression_data),
    "question-answering": ("Model", question_data),
    "sentence-embedding": ("Model", pair_data),
    "masked-lm": ("ForMaskedLM", books_data),
    "causal-lm": ("decoder", books_data),
    "chat": ("decoder", chats),
}


QUICK_TASKS = ("causal-lm", "multi-label")


@pytest.mark.parametrize(
    "task", [pytest.param(name, marks=() if name in QUICK_TASKS else pytest.mark.slow) for name in TASKS]
)
def test_auto_measures_batches_of_every_task(task, tokenizer, tmp_path, capsys):
    head, make_data = TASKS[task]
    model = decoder() if head == "decoder" else build_model("bert", head)
    teacher = saved(model, tokenizer, tmp_path / "teacher")
    arguments = ["--task", task]
    if task == "chat":
        (tmp_path / "plain.jinja").write_text(PLAIN)
        arguments += ["--chat.template", str(tmp_path / "plain.jinja")]
    distill.main([*small_run(teacher, make_data(tmp_path / "data"), tmp_path / "run", *AUTO), *arguments])
    measurements = read_measurements(tmp_path / "run")
    assert "of the student on " in capsys.readouterr().out
    assert 1 <= len(measurements["measured"]["batches"]) <= 3
    assert all(1 <= rows <= 8 and 2 <= length <= 32 for rows, length in measurements["measured"]["batches"])


def test_auto_is_decided_once_per_output_folder_even_if_settings_change(headed_folder, data_folder, tmp_path, capsys):
    arguments = small_run(headed_folder, data_folder, tmp_path / "run", *AUTO)
    distill.main(arguments)
    first = read_measurements(tmp_path / "run")
    gc.collect()
    others = ("--batch-size", "4", "--seed", "3", "--student", "layers=1", "--threads", "2")
    distill.main(small_run(headed_folder, data_folder, tmp_path / "run", *AUTO, *others))
    expected = capsys.readouterr().out
    assert "precision: already complete, skipped" in expected
    assert f"precision: {first['chosen']}, as it was chosen for this folder" in expected
    assert read_measurements(tmp_path / "run") == first


def test_a_stored_precision_that_this_machine_does_not_support_is_rejected_by_name(
    headed_folder, data_folder, tmp_path, monkeypatch, capsys
):
    arguments = small_run(headed_folder, data_folder, tmp_path / "run", *AUTO, "--accelerator", "cpu")
    distill.main(arguments)
    (file,) = (tmp_path / "run" / "precision").glob("*/manifest.json")
    content = json.loads(file.read_text())
    del content["checksum"]
    content["metrics"]["chosen"] = "fp8"  # as on a machine that supports it
    file.write_text(json.dumps(seal_manifest(content)))
    gc.collect()
    message = rejection_of(distill, arguments, monkeypatch, capsys)
    assert f"this output folder already uses fp8 ('{file.parent}'), which cpu doesn't support" in message


def test_a_missing_share_of_the_ceiling_is_not_printed():
    measurements = {
        "seconds_a_step": {"32": 0.02, "bf16-mixed": 0.01},
        "share_of_ceiling": {"32": 0.5},
        "measured": {"batches": [[8, 12], [7, 9]]},
    }
    assert precision.describe_timings(measurements) == (
        "a step of the student on 8x12, 7x9 tokens: 32 20 ms, 50% of what products reach; bf16-mixed 10 ms"
    )


def update_ones(optimizer: str, *, stochastic: bool) -> float:
    """Returns the mean of bfloat16 weights that were 1 after sixty updates of -0.001 each."""
    torch.manual_seed(0)
    model = build_model("bert", num_hidden_layers=1, **SIZES).bfloat16()
    weight = model.bert.encoder.layer[0].intermediate.dense.weight
    nn.init.ones_(weight)
    config = TrainConfig(optimizer=optimizer, learning_rate=1e-3, weight_decay=0)
    updating = build_optimizer(model, [], config, stochastic_rounding=stochastic)
    for _ in range(60):
        weight.grad = torch.ones_like(weight)
        updating.step()
    return float(weight.detach().float().mean())


def test_bfloat16_loses_small_updates():
    """In bfloat16, 1 - 0.001 rounds to 1."""
    assert update_ones("adamw", stochastic=False) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", STOCHASTIC)
def test_stochastic_rounding_keeps_small_updates(optimizer):
    assert update_ones(optimizer, stochastic=True) == pytest.approx(0.94, abs=0.01)


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name not in STOCHASTIC])
def test_optimizers_that_round_to_nearest_are_rejected_with_stochastic_rounding(optimizer):
    model = build_model("bert", num_hidden_layers=1)
    with pytest.raises(InputError, match=f"train.optimizer {optimizer}: expected one that rounds bfloat16 weights"):
        build_optimizer(model, [], TrainConfig(optimizer=optimizer), stochastic_rounding=True)


@pytest.mark.parametrize("name", CUSTOM_MODES[1:])
def test_products_of_quantized_modes_differ_slightly_from_float(name: str, token_batch):
    plain = build_model("bert", num_hidden_layers=1, **SIZES)
    model = convert_to_mode(name, copy.deepcopy(plain), emulate=True)
    with torch.no_grad():
        expected = plain(**token_batch).logits
        difference = (model(**token_batch).logits - expected).abs().max()
    assert 1e-4 < difference < 0.3 * expected.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8-mixed", "bf16-stochastic"])
def test_a_student_trained_in_a_mode_is_a_stock_float32_checkpoint(name: str, tmp_path):
    teacher, data = make_inputs(tmp_path)
    arguments = small_run(teacher, data, tmp_path / "run", "--epochs", "20", "--teacher_train.epochs", "20")
    arguments[arguments.index("--precision") + 1] = name
    run_to_success("distill", arguments)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "student")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    report = report_of(tmp_path / "run")
    scores = {(e["name"], e["runtime"]): e["score"] for e in report["models"]}
    assert scores["student", "onnxruntime"] > 0.5


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="trainings in float16 are for GPUs")
def test_a_student_trained_in_float16_on_a_gpu_is_a_stock_float32_checkpoint(tmp_path):
    teacher, data = make_inputs(tmp_path)
    arguments = small_run(teacher, data, tmp_path / "run", "--epochs", "20", "--teacher_train.epochs", "20")
    arguments[arguments.index("--precision") + 1] = "16-mixed"
    run_to_success("distill", [*arguments, "--accelerator", "gpu"])
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "student")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    report = report_of(tmp_path / "run")
    scores = {(e["name"], e["runtime"]): e["score"] for e in report["models"]}
    assert scores["student", "onnxruntime"] > 0.5


def test_quantized_layers_keep_their_grid_in_int8_mixed_mode():
    model = build_model("bert", num_hidden_layers=1, **SIZES)
    names = prepare_quantized(model, resolve_scheme("int8-weights"))
    convert_to_mode("int8-mixed", model)
    kinds = {type(model.get_submodule(name)).__name__ for name in names}
    assert kinds == {"QuantizedLinear", "QuantizedEmbedding"}


def test_modes_that_the_device_does_not_support_are_rejected():
    for name in ("32", "bf16-mixed", "bf16-stochastic", "int8-mixed"):
        assert find_unsupported_reason(name, CPU) == ""
        check_mode(name, CPU)
    with pytest.raises(CompressError, match="expected a precision that cpu supports, found 16-mixed: on a CPU float16"):
        check_mode("16-mixed", CPU)
    with pytest.raises(CompressError, match="found fp8: float8 products need a GPU with compute capability 8.9"):
        check_mode("fp8", CPU)
    with pytest.raises(CompressError, match="expected auto or one of 32, bf16-mixed"):
        check_mode("64", CPU)
    assert all(mode.description for mode in MODES.values())


def test_the_measured_ceiling_is_that_of_the_fastest_product_after_the_first(monkeypatch):
    seconds = (1.0, 8.0, 4.0, 5.0)
    clock = accumulate(each for second in seconds for each in (0.0, second))  # read before and after each product
    monkeypatch.setattr(precision_speed, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert measure_peak_flops(CPU, torch.float32, size=16, rounds=3) == 2 * 16**3 / 4
    assert next(clock, None) is None, "fewer products than rounds and the first"
