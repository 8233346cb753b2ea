"""A student trained on several processes equals the student trained on one process."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from distill.data.batches.sampling_config import SamplingConfig
from distill.losses.config import LossConfig
from distill.train.optimizer_kinds import OPTIMIZERS
from pipelines.settings.commands.distill import MachineConfig
from support.processes.ranks import free_port, run_ranks
from support.processes.training_ranks import Training, train
from support.run_outputs import weights_that_differ
from support.tiny_models import draw_weights, saved

NEAR = 1e-5
WIDE = 48  # of a teacher; the student's width is 32
SOFT = LossConfig(kl=1, ce=0.5, temperature=2.0)
WITH_TEACHER = LossConfig(kl=1, ce=0.5, hidden=0.1, temperature=2.0)


@pytest.fixture(scope="module")
def student(tmp_path_factory, tokenizer, tiny_model) -> Path:
    return saved(tiny_model("bert", num_hidden_layers=4), tokenizer, tmp_path_factory.mktemp("student") / "model")


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory, tokenizer, tiny_model) -> Path:
    model = tiny_model("bert", num_hidden_layers=4)
    draw_weights(model)
    return saved(model, tokenizer, tmp_path_factory.mktemp("teacher") / "model")


@pytest.fixture(scope="module")
def single_process(student, tmp_path_factory) -> dict:
    return train(0, 1, Training(student, tmp_path_factory.mktemp("alone")), "replicated")


@pytest.mark.parametrize(
    ("processes", "layout"),
    [
        (2, "replicated"),
        (2, "zero1"),
        (2, "zero2"),
        (2, "fsdp=2"),
        (2, "tp=2"),
        (2, "pp=2"),
        pytest.param(4, "hsdp=2x2", marks=pytest.mark.slow),
        pytest.param(4, "fsdp=2,tp=2", marks=pytest.mark.slow),
        pytest.param(4, "dp=2,tp=2", marks=pytest.mark.slow),
        pytest.param(4, "pp=4", marks=pytest.mark.slow),
        pytest.param(4, "dp=2,pp=2", marks=pytest.mark.slow),
    ],
)
def test_every_layout_trains_the_same_student(processes, layout, student, single_process, tmp_path):
    results = run_ranks(train, processes, processes, Training(student, tmp_path), layout, limit=120)
    for rank in range(processes):
        weights = results[rank]["weights"]
        assert "pp=" in layout or weights.keys() == single_process["weights"].keys()
        assert differing_weights(weights, single_process["weights"], layout) == {}
        assert results[rank]["metrics"] == pytest.approx(single_process["metrics"], abs=1e-4)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").state_dict()
    assert loaded.keys() == single_process["weights"].keys()
    for each in results:
        assert all(torch.equal(loaded[name], value) for name, value in each["weights"].items())


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["replicated", "fsdp=2", "tp=2", "pp=2"])
def test_batches_of_tokens_train_the_same_student_in_every_layout(layout, student, tmp_path_factory):
    rows, single, job = (Training(student, tmp_path_factory.mktemp(name)) for name in ("rows", "single", "laid-out"))
    settings = replace(single.train, batch_tokens=100)
    expected = train(0, 1, replace(single, train=settings), "replicated")["weights"]
    assert differing_weights(expected, train(0, 1, rows, "replicated")["weights"])
    for found in run_ranks(train, 2, 2, replace(job, train=settings), layout, limit=120):
        assert differing_weights(found["weights"], expected, layout) == {}


@pytest.mark.parametrize(
    "layout", ["pp=2", *(pytest.param(each, marks=pytest.mark.slow) for each in ("zero1", "tp=2"))]
)
def test_weights_of_drawn_rows_train_the_same_student_in_every_layout(layout, student, tmp_path_factory):
    plain, single, job = (Training(student, tmp_path_factory.mktemp(each)) for each in ("plain", "single", "laid-out"))
    balanced = SamplingConfig("balanced")
    unbiased = replace(balanced, unbiased=True)
    expected = train(0, 1, replace(single, sampling=unbiased), "replicated")["weights"]
    assert differing_weights(expected, train(0, 1, replace(plain, sampling=balanced), "replicated")["weights"])
    for found in run_ranks(train, 2, 2, replace(job, sampling=unbiased), layout, limit=120):
        assert differing_weights(found["weights"], expected, layout) == {}


def trainable_pairs() -> Iterator[tuple[str, str]]:
    """Yields each optimizer with each layout that the rules accept.

    Without those that turn rounding errors into full updates: Lion's are signs, and SOAP's eigenvectors of a gradient
    that lacks rank, such as an embedding's, are arbitrary.
    """
    for name, kind in OPTIMIZERS.items():
        if name not in ("adamw", "lion", "soap"):
            yield name, "pp=2"
            if kind.zero1:
                yield name, "zero1"
            if not kind.whole:
                yield name, "fsdp=2"
                yield name, "tp=2"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), trainable_pairs())
def test_every_optimizer_trains_the_same_student_in_every_layout_that_it_takes(name, layout, student, tmp_path_factory):
    single, job = (Training(student, tmp_path_factory.mktemp(name)) for name in ("single", "laid-out"))
    train_settings = replace(single.train, optimizer=name, learning_rate=2e-4 * OPTIMIZERS[name].rate)
    expected = train(0, 1, replace(single, train=train_settings), "replicated")["weights"]
    for found in run_ranks(train, 2, 2, replace(job, train=train_settings), layout, limit=300):
        assert differing_weights(found["weights"], expected, layout) == {}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["replicated", "zero2", "fsdp=2", "tp=2", "pp=2"])
def test_averaged_weights_are_the_same_in_every_layout(layout, student, tmp_path_factory):
    plain, single, job = (Training(student, tmp_path_factory.mktemp(each)) for each in ("plain", "single", "laid-out"))
    averaged = replace(single.train, ema_decay=0.9)
    expected = train(0, 1, replace(single, train=averaged), "replicated")["weights"]
    assert differing_weights(expected, train(0, 1, plain, "replicated")["weights"])
    for found in run_ranks(train, 2, 2, replace(job, train=averaged), layout, limit=120):
        assert differing_weights(found["weights"], expected, layout) == {}


@pytest.mark.slow
@pytest.mark.parametrize("batch", [6, 7])  # the first and the second of a step
@pytest.mark.parametrize("layout", ["replicated", "zero1", "zero2", "fsdp=2", "tp=2", "pp=2"])
def test_a_spike_costs_the_same_step_in_every_layout(layout, batch, student, tmp_path_factory):
    plain, single, job = (Training(student, tmp_path_factory.mktemp(each)) for each in ("plain", "single", "laid-out"))
    recovering = replace(single.train, recoveries=1, checkpoint_every=1, patience=0)
    expected = train(0, 1, replace(single, train=recovering, spike=batch), "replicated")["weights"]
    assert differing_weights(expected, train(0, 1, replace(plain, train=recovering), "replicated")["weights"])
    for found in run_ranks(train, 2, 2, replace(job, train=recovering, spike=batch), layout, limit=120):
        assert differing_weights(found["weights"], expected, layout) == {}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "selective", "every=2"])
@pytest.mark.parametrize(
    ("processes", "layout"),
    [
        (2, "replicated"), (2, "zero1"), (2, "zero2"), (2, "fsdp=2"), (2, "tp=2"), (2, "pp=2"),
        (4, "hsdp=2x2"), (4, "fsdp=2,tp=2"), (4, "dp=2,tp=2"), (4, "dp=2,pp=2"),
    ],
)  # fmt: skip
def test_checkpointed_layers_train_the_same_student_in_every_layout(processes, layout, mode, student, tmp_path_factory):
    plain, checkpointed = (Training(student, tmp_path_factory.mktemp(name)) for name in ("plain", "checkpointed"))
    job = replace(checkpointed, train=replace(checkpointed.train, checkpointing=mode))
    expected = run_ranks(train, processes, processes, plain, layout, limit=120)
    for found, plain_result in zip(
        run_ranks(train, processes, processes, job, layout, limit=120), expected, strict=True
    ):
        assert found["weights"].keys() == plain_result["weights"].keys()
        assert all(torch.equal(found["weights"][name], value) for name, value in plain_result["weights"].items())


@pytest.mark.parametrize(
    ("processes", "layout"),
    [
        (2, "pp=2"),
        pytest.param(2, "zero2", marks=pytest.mark.slow),
        pytest.param(2, "replicated", marks=pytest.mark.slow),
        pytest.param(2, "fsdp=2", marks=pytest.mark.slow),
        pytest.param(2, "tp=2", marks=pytest.mark.slow),
        pytest.param(4, "hsdp=2x2", marks=pytest.mark.slow),
        pytest.param(4, "pp=4", marks=pytest.mark.slow),
        pytest.param(4, "dp=2,pp=2", marks=pytest.mark.slow),
    ],
)
def test_a_student_with_frozen_embeddings_is_saved_as_one_process_trains_it(
    processes, layout, student, tmp_path_factory
):
    """Trains as the recipes do, with an evaluation as the last operation before saving."""
    folder, single = tmp_path_factory.mktemp("laid-out"), tmp_path_factory.mktemp("single")
    settings = replace(Training(student, folder).train, patience=0, freeze_embeddings=True)
    expected = train(0, 1, Training(student, single, settings), "replicated")["weights"]
    run_ranks(train, processes, processes, Training(student, folder, settings), layout, limit=120)
    loaded = AutoModelForSequenceClassification.from_pretrained(folder / "model").state_dict()
    assert differing_weights(loaded, expected) == {}
    before = AutoModelForSequenceClassification.from_pretrained(student).get_input_embeddings().weight
    assert loaded["bert.embeddings.word_embeddings.weight"].equal(before)


@pytest.fixture(scope="module")
def wide_teacher(tmp_path_factory, tokenizer, tiny_model) -> Path:
    model = tiny_model("bert", num_hidden_layers=4, hidden_size=WIDE)
    draw_weights(model)
    return saved(model, tokenizer, tmp_path_factory.mktemp("wide") / "model")


def train_on_wide_teacher(
    loss: LossConfig, processes: int, layout: str, models: tuple[Path, Path], folders: pytest.TempPathFactory
) -> None:
    """Trains a student on a wider teacher, and checks weights and projections against those of one process."""
    student, teacher = models
    here = [folders.mktemp(name) for name in ("single", "laid-out")]
    settings = replace(Training(student, here[0]).train, patience=0)
    jobs = [Training(student, each, settings, loss, teacher=teacher, teacher_width=WIDE) for each in here]
    expected = train(0, 1, jobs[0], "replicated")
    for found in run_ranks(train, processes, processes, jobs[1], layout, limit=120):
        assert differing_weights(found["weights"], expected["weights"]) == {}
        assert found["projections"].keys() == expected["projections"].keys()
        assert not expected["projections"] or not weights_that_differ(
            found["projections"], expected["projections"], NEAR
        )


@pytest.mark.parametrize(
    ("layer_map", "processes", "layout"),
    [
        ("uniform", 2, "zero2"),
        ("learned", 2, "fsdp=2"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("uniform", 2, "replicated"), ("uniform", 2, "fsdp=2"), ("uniform", 2, "tp=2"), ("learned", 2, "zero2"),
                ("uniform", 4, "hsdp=2x2"), ("uniform", 4, "fsdp=2,tp=2"), ("uniform", 4, "dp=2,tp=2"),
            )
        ),
    ],
)  # fmt: skip
def test_projections_and_layer_mixtures_are_trained_as_on_one_process(
    layer_map, processes, layout, student, wide_teacher, tmp_path_factory
):
    loss = LossConfig(kl=1, ce=0.5, hidden=0.5, layer_map=layer_map, temperature=2.0)
    train_on_wide_teacher(loss, processes, layout, (student, wide_teacher), tmp_path_factory)


LOSSES = {
    "kl-later": LossConfig(hidden=1, ramps={"kl": (0, 1)}),
    "hidden-later": LossConfig(ramps={"hidden": (0, 1)}),
    "hidden-alone": LossConfig(kl=0, hidden=1),
    "relations-alone": LossConfig(kl=0, relations=1, relation_heads=4),
    "kl-after-relations": LossConfig(relations=1, relation_heads=4, ramps={"kl": (0, 1)}),
    "kl-and-relations": LossConfig(relations=1, relation_heads=4),
}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("kl-later", "replicated"),
        ("relations-alone", "zero1"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("kl-later", "zero1"), ("kl-later", "fsdp=2"), ("kl-later", "tp=2"), ("hidden-later", "replicated"),
                ("hidden-later", "zero1"), ("hidden-later", "fsdp=2"), ("hidden-alone", "replicated"),
                ("relations-alone", "replicated"), ("relations-alone", "zero2"), ("relations-alone", "fsdp=2"),
                ("kl-after-relations", "zero2"), ("kl-after-relations", "fsdp=2"), ("kl-and-relations", "zero2"),
                ("kl-and-relations", "fsdp=2"),
            )
        ),
    ],
)  # fmt: skip
def test_terms_that_reach_a_part_of_the_parameters_train_them_as_on_one_process(
    name, layout, student, wide_teacher, tmp_path_factory
):
    """A term doesn't reach the head or a layer's output, or has a weight of 0 in some steps."""
    train_on_wide_teacher(LOSSES[name], 2, layout, (student, wide_teacher), tmp_path_factory)


@pytest.fixture(scope="module")
def train_alone(teacher_folder, student, tmp_path_factory) -> Callable[..., dict]:
    """Trains the student with the teacher on one process, in the given precision; results are memoized."""

    @cache
    def train_once(precision: str, loss: LossConfig = WITH_TEACHER) -> dict:
        job = Training(student, tmp_path_factory.mktemp("student"), teacher=teacher_folder, loss=loss)
        return train(0, 1, replace(job, precision=precision), "replicated")

    return train_once


TEACHERS = ("replicated", "fsdp=2", "tp=2", "pp=2")
STUDENTS = ("replicated", "zero1", "zero2", "fsdp=2", "tp=2")
QUICK = {("pp=2", "fsdp=2")}


def layout_pairs(processes: int, teachers: tuple[str, ...], students: tuple[str, ...]) -> Iterator[Any]:
    for teacher in teachers:
        for student in students:
            quick = (teacher, student) in QUICK
            yield pytest.param(processes, teacher, student, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(
    ("processes", "teacher", "layout"),
    [
        *layout_pairs(2, TEACHERS, STUDENTS),
        *layout_pairs(
            4, ("replicated", "hsdp=2x2", "fsdp=2,tp=2", "tp=4", "pp=4"), ("hsdp=2x2", "fsdp=2,tp=2", "dp=2,tp=2")
        ),
    ],
)
def test_teacher_and_student_layouts_do_not_change_the_student(
    processes, teacher, layout, student, teacher_folder, train_alone, tmp_path
):
    job = Training(student, tmp_path, teacher=teacher_folder, teacher_layout=teacher, loss=WITH_TEACHER)
    for found in run_ranks(train, processes, processes, job, layout, limit=120):
        assert differing_weights(found["weights"], train_alone("32")["weights"]) == {}
        assert found["metrics"] == pytest.approx(train_alone("32")["metrics"], abs=1e-4)


@pytest.mark.parametrize(
    ("processes", "teachers", "teacher", "layout"),
    [
        (2, 1, "replicated", "replicated"),
        pytest.param(4, 2, "tp=2", "fsdp=2", marks=pytest.mark.slow),
        pytest.param(3, 2, "fsdp=2", "replicated", marks=pytest.mark.slow),
        pytest.param(4, 1, "replicated", "replicated", marks=pytest.mark.slow),
        pytest.param(4, 3, "pp=3", "replicated", marks=pytest.mark.slow),
    ],
)
def test_a_teacher_on_separate_processes_trains_the_same_student(
    processes, teachers, teacher, layout, student, teacher_folder, train_alone, tmp_path
):
    job = Training(
        student, tmp_path, teacher=teacher_folder, teacher_layout=teacher, teachers=teachers, port=free_port(),
        loss=WITH_TEACHER,
    )  # fmt: skip
    results = run_ranks(train, processes, processes, job, layout, limit=120)
    assert results[-teachers:] == [{}] * teachers
    for each in results[:-teachers]:
        assert differing_weights(each["weights"], train_alone("32")["weights"]) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", [f"deepspeed_stage_{stage}" for stage in ("1", "2", "2_offload", "3", "3_offload")]
)
def test_deepspeed_trains_the_same_student(strategy, student, teacher_folder, train_alone, tmp_path):
    machine = MachineConfig(accelerator="cpu", strategy=strategy)
    job = Training(student, tmp_path, teacher=teacher_folder, loss=WITH_TEACHER, machine=machine)
    for found in run_ranks(train, 2, 2, job, "replicated", limit=300):
        assert differing_weights(found["weights"], train_alone("32")["weights"]) == {}
        assert found["metrics"] == pytest.approx(train_alone("32")["metrics"], abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["deepspeed_stage_2", "deepspeed_stage_3"])
def test_a_stopped_deepspeed_run_resumes_to_the_same_student(strategy, student, single_process, tmp_path):
    machine = MachineConfig(accelerator="cpu", strategy=strategy)
    train_settings = replace(Training(student, tmp_path).train, checkpoint_every=1)
    for stop in (5, 4, None):
        job = Training(student, tmp_path, train=train_settings, machine=machine, stop=stop)
        results = run_ranks(train, 2, 2, job, "replicated", limit=300)
        (tmp_path.parent / f"{tmp_path.name}.world").unlink()
    assert differing_weights(results[0]["weights"], single_process["weights"]) == {}


HALF_GATHERED = ("zero2", "fsdp=2", "hsdp=2x2", "fsdp=2,tp=2", "dp=2,tp=2")  # FSDP gathers weights in these layouts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "layout"),
    [
        *((2, each) for each in ("replicated", "zero1", "zero2", "fsdp=2", "tp=2", "pp=2")),
        *((4, each) for each in ("hsdp=2x2", "fsdp=2,tp=2", "dp=2,tp=2", "dp=2,pp=2")),
    ],
)
def test_bfloat16_layouts_differ_by_rounding_noise_only(
    processes, layout, student, teacher_folder, train_alone, tmp_path
):
    job = Training(student, tmp_path, teacher=teacher_folder, loss=SOFT, precision="bf16-mixed")
    single, whole = train_alone("bf16-mixed", SOFT)["weights"], train_alone("32", SOFT)["weights"]
    ranks = run_ranks(train, processes, processes, job, layout, limit=240)
    used = torch.bfloat16 if layout in HALF_GATHERED else torch.float32
    for found in ranks:
        assert found["dtypes"] == {"weights": {torch.float32}, "states": {torch.float32}, "used": {used}}
    # Each run is one draw of bfloat16 rounding noise.
    assert 0 < distance(ranks[0]["weights"], single) <= 2 * distance(single, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "layout"),
    [
        *((2, each) for each in ("replicated", "zero1", "zero2", "fsdp=2", "tp=2")),
        *((4, each) for each in ("hsdp=2x2", "fsdp=2,tp=2", "dp=2,tp=2")),
    ],
)
def test_float16_layouts_differ_by_rounding_noise_only(
    processes, layout, student, teacher_folder, train_alone, tmp_path
):
    """Mixes plain and sharded gradients on several meshes, which are unscaled before they are clipped."""
    job = Training(student, tmp_path, teacher=teacher_folder, loss=SOFT, precision="16-mixed")
    single, whole = train_alone("16-mixed", SOFT)["weights"], train_alone("32", SOFT)["weights"]
    ranks = run_ranks(train, processes, processes, job, layout, limit=240)
    for found in ranks:
        assert found["dtypes"] == {name: {torch.float32} for name in ("weights", "states", "used")}
    assert 0 < distance(ranks[0]["weights"], single) <= 2 * distance(single, whole)


@pytest.mark.slow
@pytest.mark.parametrize("teacher", ["fsdp=2", "tp=2"])
def test_a_sharded_teacher_of_a_bfloat16_training_changes_the_student_by_rounding_noise_only(
    teacher, student, teacher_folder, train_alone, tmp_path
):
    job = Training(
        student, tmp_path, teacher=teacher_folder, teacher_layout=teacher, loss=WITH_TEACHER, precision="bf16-mixed"
    )
    single, whole = train_alone("bf16-mixed")["weights"], train_alone("32")["weights"]
    sharded = run_ranks(train, 2, 2, job, "fsdp=2", limit=240)[0]["weights"]
    assert 0 < distance(sharded, single) <= 2 * distance(single, whole)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_deepspeed_in_bfloat16_differs_by_rounding_noise_only(stage, student, teacher_folder, train_alone, tmp_path):
    machine = MachineConfig(accelerator="cpu", strategy=f"deepspeed_stage_{stage}")
    job = Training(student, tmp_path, teacher=teacher_folder, loss=SOFT, precision="bf16-mixed", machine=machine)
    single, whole = train_alone("bf16-mixed", SOFT)["weights"], train_alone("32", SOFT)["weights"]
    found = run_ranks(train, 2, 2, job, "replicated", limit=300)[0]
    assert found["dtypes"] == {"weights": {torch.bfloat16}, "states": {torch.float32}, "used": {torch.bfloat16}}
    assert {each.dtype for each in found["weights"].values()} == {torch.float32}
    assert 0 < distance(found["weights"], single) <= 2 * distance(single, whole)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["2", "3"])
def test_deepspeed_in_bfloat16_leaves_frozen_weights_as_they_were(stage, student, tmp_path):
    machine = MachineConfig(accelerator="cpu", strategy=f"deepspeed_stage_{stage}")
    settings = replace(Training(student, tmp_path).train, freeze_embeddings=True, epochs=1)
    job = Training(student, tmp_path, train=settings, precision="bf16-mixed", machine=machine)
    name = "bert.embeddings.word_embeddings.weight"
    before = AutoModelForSequenceClassification.from_pretrained(student).state_dict()
    for found in run_ranks(train, 2, 2, job, "replicated", limit=300):
        assert torch.equal(found["weights"][name], before[name])
        assert not torch.equal(found["weights"]["classifier.weight"], before["classifier.weight"])


@pytest.mark.parametrize(
    "compress", ["powersgd", *(pytest.param(each, marks=pytest.mark.slow) for each in ("fp16", "bf16"))]
)
def test_compressed_gradients_keep_the_copies_equal_and_close_to_exact_training(
    compress, student, single_process, tmp_path
):
    job = Training(student, tmp_path, machine=MachineConfig(accelerator="cpu", gradient_compression=compress))
    one, other = (each["weights"] for each in run_ranks(train, 2, 2, job, "replicated", limit=120))
    assert all(torch.equal(one[name], other[name]) for name in one), "copies drift apart"
    moved = distance(
        single_process["weights"], AutoModelForSequenceClassification.from_pretrained(student).state_dict()
    )
    assert 0 < distance(one, single_process["weights"]) < 0.5 * moved


def test_offloaded_weights_train_the_same_student(student, teacher_folder, train_alone, tmp_path):
    job = Training(student, tmp_path, teacher=teacher_folder, teacher_layout="fsdp=2", loss=WITH_TEACHER, offload=True)
    for found in run_ranks(train, 2, 2, job, "fsdp=2", limit=120):
        assert differing_weights(found["weights"], train_alone("32")["weights"]) == {}


def distance(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    return sum((one[name] - other[name]).square().sum().item() for name in one) ** 0.5


@pytest.mark.slow
def test_a_run_resumed_in_other_layouts_ends_with_the_same_student(student, single_process, tmp_path):
    attempts = [(2, "fsdp=2", 3), (4, "hsdp=2x2", 4), (2, "tp=2", 2), (2, "zero1", 2), (1, "replicated", None)]
    train_settings = replace(Training(student, tmp_path).train, checkpoint_every=1)
    for number, (processes, layout, stop) in enumerate(attempts):
        job = Training(student, tmp_path, train=train_settings, stop=stop)
        if processes > 1:
            assert run_ranks(train, processes, processes, job, layout, limit=120) == [{}] * processes, number
            (tmp_path.parent / f"{tmp_path.name}.world").unlink()
        else:
            result = train(0, 1, job, layout)
    assert differing_weights(result["weights"], single_process["weights"]) == {}


def differing_weights(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], layout: str = "replicated"
) -> dict[str, float]:
    """Returns the weights that differ by more than NEAR, with their largest absolute difference.

    A process has all weights, or those of its stage in a pipeline. Key biases are ignored: they don't affect the
    output, so that their gradients are pure rounding errors, which Adam scales to full steps.
    """
    names = found.keys() if "pp=" in layout else expected.keys()
    return weights_that_differ(found, expected, NEAR, [name for name in names if not name.endswith("key.bias")])
