"""Layouts of small models on made-up machines: which are listed, which fit, and with what settings."""

import copy
from dataclasses import replace

import pytest
from transformers import BertConfig, LlamaConfig, PretrainedConfig

from distill.data.config import DataConfig
from distill.losses.config import LossConfig
from distill.models.depth import set_depth
from distill.parallel.layout import Layout, parse_layout
from distill.tasks.choose import TASKS
from distill.teacher.config import TeacherConfig
from distill.train.config import TrainConfig
from pipelines.planner.fake_process_group import simulate_world
from pipelines.planner.hardware import Hardware
from pipelines.planner.layout_tracer import LayoutCandidate, LayoutTracer
from pipelines.planner.layouts import list_layouts
from pipelines.planner.pairs import count_turns, list_pairs
from pipelines.planner.trace import trace_step
from pipelines.planner.workload import Workload, set_labels
from pipelines.settings.commands.distill import DistillConfig, MachineConfig
from pipelines.settings.defaults import fill_defaults, fill_task_defaults

BERT = BertConfig(
    vocab_size=1000, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256, num_labels=5
)
LLAMA = LlamaConfig(
    vocab_size=512, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=256,
)  # fmt: skip
FOUR = Hardware(nodes=2, devices=2, memory=10**9, flops=1e12, links=100e9, bandwidth=10e9)


def describe(task: str, teacher: PretrainedConfig, **changed: object) -> Workload:
    settings = DistillConfig(
        output="o", teacher=TeacherConfig("t"), data=DataConfig("d", max_length=32),
        machine=MachineConfig(precision="32"), **changed,
    )  # fmt: skip
    settings = fill_task_defaults(fill_defaults(settings), task)
    models = copy.deepcopy(teacher), set_depth(teacher, 2)
    for model in models:
        set_labels(model, TASKS[task], 5)
    return Workload(settings, TASKS[task], *models, 1000)


def trace_students(workload: Workload, hardware: Hardware) -> dict[str, LayoutCandidate]:
    return {str(choice.layout): choice for choice in LayoutTracer(workload, hardware).trace_students()}


@pytest.mark.parametrize(
    ("model", "trained", "expected"),
    [
        (BERT, True, "replicated zero1 zero2 fsdp=4 hsdp=2x2 fsdp=2,tp=2 dp=2,tp=2 pp=2,dp=2 pp=4"),
        (BERT, False, "replicated fsdp=4 hsdp=2x2 fsdp=2,tp=2 dp=2,tp=2 pp=2,dp=2 pp=4"),
        (BertConfig(hidden_size=63, num_attention_heads=3, num_hidden_layers=3), True,
         "replicated zero1 zero2 fsdp=4 hsdp=2x2 pp=2,dp=2"),
    ],
)  # fmt: skip
def test_all_layouts_that_divide_a_model_are_listed(model, trained, expected):
    layouts = list_layouts(FOUR, model, trained=trained)
    assert sorted(map(str, layouts)) == sorted(str(parse_layout(each, 4)) for each in expected.split())


def test_products_are_split_within_a_node_only():
    single_device_nodes = replace(FOUR, nodes=4, devices=1)
    assert not any(layout.tp > 1 for layout in list_layouts(single_device_nodes, BERT, trained=True))


def test_rows_are_divided_into_segments_within_a_node_only():
    found = [layout for layout in list_layouts(FOUR, LLAMA, trained=True, segments=True) if layout.cp > 1]
    assert found == [Layout(fsdp=2, cp=2), Layout(dp=2, cp=2)]
    three = LlamaConfig(hidden_size=12, num_attention_heads=3, num_key_value_heads=3, num_hidden_layers=4)
    assert not any(layout.cp > 1 for layout in list_layouts(FOUR, three, trained=True, segments=True))


def test_a_segment_takes_a_share_of_the_activations_and_logits_and_waits_for_heads():
    workload, node = describe("causal-lm", LLAMA, train=TrainConfig(batch_size=16)), replace(FOUR, nodes=1)
    layouts = [Layout(dp=2), Layout(cp=2)]
    whole, segments = LayoutTracer(workload, node).trace_students(layouts)
    assert (whole.rows, segments.rows) == (8, 16)
    for name in ("activations", "logits", "weights"):
        assert segments.trace.memory[name] == pytest.approx(whole.trace.memory[name], rel=0.05)
    assert whole.time.waited == 0 < segments.time.waited
    alone = LayoutTracer(workload, replace(node, devices=1)).trace_students([Layout()])[0]
    assert segments.trace.memory["activations"] < 0.6 * alone.trace.memory["activations"]


def test_segments_of_a_teacher_that_computes_in_every_step_are_those_of_the_student():
    workload, node = describe("causal-lm", LLAMA, loss=LossConfig(kl=1, temperature=1.0)), replace(FOUR, nodes=1)
    online = replace(workload, settings=replace(workload.settings, teacher=TeacherConfig("t", online=True)))
    tracer, layouts = LayoutTracer(online, node), [Layout(dp=2), Layout(cp=2)]
    teachers, students = tracer.trace_teachers(layouts), tracer.trace_students(layouts, online=True)
    assert not any(choice.rejection for choice in (*teachers, *students))
    pairs = list_pairs(teachers, (), students, online, node)
    assert {(str(pair.teacher.layout), str(pair.student.layout)) for pair in pairs} == {
        ("replicated", "replicated"), ("cp=2", "cp=2")
    }  # fmt: skip


def test_a_lone_process_has_one_layout():
    assert list_layouts(replace(FOUR, nodes=1, devices=1), BERT, trained=True) == [Layout()]


OTHER_TASKS = ("masked-lm", "multi-label", "regression", "token-classification", "question-answering")


@pytest.mark.parametrize(
    "task", ["text-classification", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHER_TASKS)]
)
def test_students_of_every_task_are_planned(task):
    found = trace_students(describe(task, BERT), replace(FOUR, nodes=1))
    assert {"replicated", "fsdp=2", "tp=2"} <= found.keys()
    assert ("cp=2" in found) == (task == "masked-lm")
    assert not any(found[name].rejection for name in ("replicated", "fsdp=2", "tp=2"))


@pytest.mark.slow
@pytest.mark.parametrize("signals", ["sampled", "topk", "logits"])
def test_language_models_are_planned_with_every_signal(signals):
    workload = describe("causal-lm", LLAMA)
    settings = replace(workload.settings, keep=replace(workload.settings.keep, signals=signals))
    found = trace_students(replace(workload, settings=settings), replace(FOUR, nodes=1))
    assert found["fsdp=2"].peak > 0
    assert not found["cp=2"].rejection
    assert found["replicated"].trace.memory["logits"] > 0


@pytest.mark.slow
def test_terms_on_layers_are_planned():
    workload = describe("text-classification", BERT, loss=LossConfig(hidden=1, relations=1, relation_heads=4))
    found = trace_students(workload, replace(FOUR, nodes=1))
    plain = trace_students(describe("text-classification", BERT), replace(FOUR, nodes=1))
    assert found["fsdp=2"].peak > plain["fsdp=2"].peak


@pytest.mark.slow
def test_checkpointing_comes_where_the_plain_step_does_not_fit():
    workload = describe("text-classification", BERT, train=TrainConfig(batch_size=256))
    plain = trace_students(workload, FOUR)["replicated"]
    assert plain.train.checkpointing == "none"
    tight = trace_students(workload, replace(FOUR, memory=plain.peak - 1))["replicated"]
    assert tight.train.checkpointing == "selective"
    assert tight.peak < plain.peak
    assert tight.seconds >= plain.seconds
    tighter = trace_students(workload, replace(FOUR, memory=tight.peak - 1))["replicated"]
    assert (tighter.train.checkpointing, tighter.rejection) == ("full", "")
    rejected = trace_students(workload, replace(FOUR, memory=tighter.peak - 1))["replicated"]
    assert (rejected.train.checkpointing, rejected.rejection) == ("full", "doesn't fit")


def test_states_become_smaller_where_nothing_else_fits():
    workload = describe("text-classification", BERT, train=TrainConfig(batch_size=4))
    alone = replace(FOUR, nodes=1, devices=1)
    plain = LayoutTracer(workload, alone).trace_students()[0]
    full = replace(plain.train, checkpointing="full")
    with simulate_world(1):
        least = trace_step(workload.describe_training(4, 2, full, online=False), Layout())
    found = LayoutTracer(workload, replace(alone, memory=least.peak - 1)).trace_students()
    assert found[0].rejection
    assert found[-1].train.optimizer == "adamw-8bit"
    assert found[-1].peak < least.peak
    assert found[-1].trace.memory["optimizer"] == pytest.approx(least.memory["optimizer"] * 2.07 / 8, rel=0.01)


def test_shards_go_to_the_cpu_where_nothing_else_fits():
    workload = describe("text-classification", BERT, train=TrainConfig(batch_size=4))
    two = replace(FOUR, nodes=1)
    layout = parse_layout("fsdp=2", 2)
    (plain,) = LayoutTracer(workload, two).trace_students([layout])
    tight = replace(two, memory=plain.trace.held_bytes * 2 // 3)
    found = LayoutTracer(workload, tight).trace_students([layout])
    last = found[-1]
    assert all(choice.rejection for choice in found[:-1])
    assert last.offloaded == plain.trace.held_bytes
    assert last.trace.memory["optimizer"] == 0
    assert 0 < last.peak <= plain.peak - plain.trace.memory["optimizer"]
    assert last.seconds > plain.seconds


def test_weights_that_do_not_fit_are_rejected_without_a_trace():
    tracer = LayoutTracer(describe("text-classification", BERT), replace(FOUR, memory=10**5, can_overlap=False))
    assert all("alone take" in choice.rejection and choice.trace is None for choice in tracer.trace_students())


def test_a_batch_that_cannot_be_divided_is_rejected():
    found = trace_students(describe("text-classification", BERT, train=TrainConfig(batch_size=6)), FOUR)
    assert "a batch of 6 rows" in found["fsdp=4"].rejection


@pytest.mark.slow
def test_a_teacher_beside_the_student_takes_more_memory_and_time_than_a_cache():
    workload, hardware = describe("text-classification", BERT), replace(FOUR, nodes=1)
    tracer = LayoutTracer(workload, hardware)
    students = tracer.trace_students()
    teachers = tracer.trace_teachers()
    pairs = list_pairs(teachers, students, tracer.trace_online_students(students, teachers), workload, hardware)
    order = [(float(f"{pair.hours:.3g}"), pair.peak) for pair in pairs]
    assert order == sorted(order), "of pairs that take as long, the one with the least memory comes first"
    same = {pair.signals: pair for pair in pairs if str(pair.teacher.layout) == str(pair.student.layout) == "fsdp=2"}
    assert same["online"].peak > same["cached"].peak
    assert same["online"].training > same["cached"].training
    assert same["online"].writing == 0 < same["cached"].writing


@pytest.mark.parametrize(
    ("teacher", "student", "turns"),
    [(Layout(fsdp=4), Layout(dp=4), 1), (Layout(tp=4), Layout(dp=4), 4), (Layout(tp=4), Layout(tp=4), 1),
     (Layout(tp=4), Layout(fsdp=2, tp=2), 2), (Layout(pp=2, dp=2), Layout(fsdp=4), 2)],
)  # fmt: skip
def test_processes_that_share_a_product_take_turns(teacher, student, turns):
    assert count_turns(teacher, student) == turns


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp=4", "replicated", "fsdp=2,tp=2", "pp=2,dp=2"])
def test_a_teacher_in_every_step_is_planned_from_the_student_that_reads_a_cache(name):
    workload = replace(describe("causal-lm", LLAMA), student=set_depth(LLAMA, 12))
    settings = workload.settings
    workload = replace(workload, settings=replace(settings, keep=replace(settings.keep, signals="sampled")))
    tracer, layout = LayoutTracer(workload, replace(FOUR, nodes=1, devices=4)), parse_layout(name, 4)
    (cached,), (whole,) = tracer.trace_students([layout]), tracer.trace_students([layout], online=True)
    (found,) = tracer.trace_online_students([cached], ())
    assert found.trace is not None
    assert whole.trace is not None
    assert found.trace.work.flops == pytest.approx(whole.trace.work.flops, rel=1e-6)
    assert found.peak == pytest.approx(whole.peak, rel=0.01)
    assert found.peak > cached.peak
