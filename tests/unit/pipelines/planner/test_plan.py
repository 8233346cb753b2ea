"""`pipelines.plan` on configs without weights: what it prints and writes, and what it rejects."""

import json

import pytest
import yaml
from transformers import BertConfig, LlamaConfig

from distill.errors import InputError
from pipelines import plan
from pipelines.planner.machines import RESERVED
from pipelines.runs import cli
from pipelines.settings.commands.distill import SHORT_OPTIONS, DistillConfig
from pipelines.settings.commands.plan import ClusterConfig, parse_rate


@pytest.fixture
def classifier(tmp_path):
    config = BertConfig(
        vocab_size=1000, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256,
        architectures=["BertForSequenceClassification"], num_labels=5,
    )  # fmt: skip
    config.save_pretrained(tmp_path / "teacher")
    return tmp_path / "teacher"


@pytest.fixture
def decoder(tmp_path):
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=256, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path / "decoder")
    return tmp_path / "decoder"


def make_plan(tmp_path, teacher, *options: str) -> dict:
    output = tmp_path / "plan"
    plan.main([f"--teacher={teacher}", "--student=layers=2", f"--output={output}", "--rows=1000", *options])
    return yaml.safe_load((output / "distill.yaml").read_text())


def test_a_small_model_is_replicated_and_its_signals_are_cached(tmp_path, classifier, capsys):
    found = make_plan(tmp_path, classifier, "--gpus=2", "--epochs=10")
    assert found["student"] == {"spec": "layers=2", "layout": "replicated"}
    assert "signals" not in found["teacher"]  # cached, the default
    assert found["train"]["epochs"] == 10
    assert found["machine"]["precision"] == "bf16-mixed"
    printed = capsys.readouterr().out
    for part in ("weights", "activations", "fsdp=2", "tp=2", "GPU-hours", "chosen: teacher"):
        assert part in printed


@pytest.mark.slow
def test_the_settings_are_those_of_a_run(tmp_path, decoder):
    make_plan(tmp_path, decoder, "--task=causal-lm", "--gpus=2", "--data.max_length=64")
    run = cli.parse(
        DistillConfig, [f"--config={tmp_path / 'plan' / 'distill.yaml'}", "--output=o", "--data=d"],
        prog="", about="", examples="", short=SHORT_OPTIONS,
    )  # fmt: skip
    assert run.teacher.model == str(decoder)
    assert run.task == "causal-lm"
    assert run.student.layout == "replicated"
    assert run.data.max_length == 64


@pytest.mark.slow
def test_all_pairs_are_written_with_their_memory(tmp_path, classifier):
    make_plan(tmp_path, classifier, "--gpus=2")
    pairs = json.loads((tmp_path / "plan" / "pairs.json").read_text())
    assert {pair["signals"] for pair in pairs} == {"cached", "online"}
    hours = [float(f"{(pair['writing_seconds'] + pair['training_seconds']) / 3600:.3g}") for pair in pairs]
    assert hours == sorted(hours)
    assert all(sum(pair["student"]["memory"].values()) <= pair["peak_bytes"] for pair in pairs)


@pytest.mark.slow
def test_with_little_memory_the_layout_with_the_lowest_peak_is_planned(tmp_path, decoder):
    options = ["--task=causal-lm", "--gpus=4", "--data.max_length=64", "--train.batch_size=4"]
    make_plan(tmp_path, decoder, *options)
    pairs = json.loads((tmp_path / "plan" / "pairs.json").read_text())
    least = min(pairs, key=lambda pair: pair["peak_bytes"])
    found = make_plan(tmp_path / "little", decoder, *options, f"--gpu-memory={least['peak_bytes'] + RESERVED + 1}")
    assert found["student"]["layout"] == least["student"]["layout"].partition(", ")[0]


@pytest.mark.slow
def test_a_student_that_only_fits_alone_needs_a_cache(tmp_path, decoder, capsys):
    options = ["--task=causal-lm", "--gpus=1", "--data.max_length=64"]
    make_plan(tmp_path, decoder, *options)
    pairs = json.loads((tmp_path / "plan" / "pairs.json").read_text())
    least = min(pair["peak_bytes"] for pair in pairs if pair["signals"] == "cached")
    make_plan(tmp_path / "little", decoder, *options, f"--gpu-memory={least + RESERVED + 1}")
    assert "no layout of the student fits beside the teacher's weights: a cache is needed" in capsys.readouterr().out


def test_too_little_memory_is_rejected_with_the_memory_that_the_student_needs(tmp_path, classifier):
    with pytest.raises(InputError, match="the student needs .* GB at least"):
        make_plan(tmp_path, classifier, "--gpu-memory=1001MB")


def test_a_loss_without_a_teacher_has_no_pair(tmp_path, classifier):
    with pytest.raises(InputError, match="expected a term that reads the teacher"):
        make_plan(tmp_path, classifier, "--loss.kl=0", "--loss.ce=1")


def test_rows_or_data_are_needed(classifier):
    with pytest.raises(InputError, match="--rows"):
        plan.main([f"--teacher={classifier}"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": 0}, "cluster.gpus: expected at least 1, found 0"),
        ({"gpu": "z9"}, "cluster.gpu: expected one of t4"),
        ({"bandwidth": "fast"}, "cluster.bandwidth: expected a rate such as 100Gbit/s"),
        ({"bandwidth": "0GB/s"}, "cluster.bandwidth"),
        ({"links": "3"}, "cluster.links"),
    ],
)
def test_invalid_cluster_settings_are_rejected(options, message):
    with pytest.raises(InputError, match=message):
        ClusterConfig(**options)


def test_rates_have_units_of_bits_or_bytes():
    assert parse_rate("100Gbit/s", "x") == parse_rate("12.5 GB/s", "x") == 12.5e9


@pytest.mark.slow  # starts two processes
def test_the_rates_of_a_processor_are_measured_for_its_plan(tmp_path, classifier, capsys):
    found = make_plan(tmp_path, classifier, "--gpu=cpu", "--gpus=2")
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("M random numbers a second", "collectives", "sharded operators"))
    assert found["machine"]["precision"] == "32"
    assert found["student"]["layout"]


@pytest.mark.slow
def test_seventy_billion_parameters_are_planned_without_their_weights(tmp_path):
    """Meta's published sizes of Llama 3.1 70B, as a file without weights."""
    LlamaConfig(
        vocab_size=128256, hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
        intermediate_size=28672, max_position_embeddings=131072, architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path / "large")  # fmt: skip
    found = make_plan(
        tmp_path, tmp_path / "large", "--task=causal-lm", "--gpus=8", "--gpu=h100", "--data.max_length=2048",
        "--train.batch_size=8",
    )  # fmt: skip
    assert found["teacher"]["layout"] != "replicated"
