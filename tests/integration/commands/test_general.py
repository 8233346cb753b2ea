"""General distillation on plain text before the task: progressive training, the stage's result, and rejections."""

import csv
import json
import random
from dataclasses import replace
from types import SimpleNamespace

import lightning
import pytest
import torch
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification

from distill.data.batches.data_module import RowsDataModule
from distill.data.batches.token_blocks import LanguageBlocks, token_blocks
from distill.data.config import DataConfig
from distill.data.sources.text_files import split_names
from distill.errors import InputError
from distill.losses.config import LayerSizes, LossConfig, match_layers
from distill.models.layer_sizes import read_layer_sizes
from distill.student.build import build_student
from distill.teacher.config import TeacherConfig
from distill.teacher.online import OnlineTeacher
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from distill.train.steps.progressive import LayerByLayer, check_layer_coverage, stop_after_layer
from pipelines import distill
from pipelines.runs.console import Console
from pipelines.runs.digests import DigestIndex
from pipelines.runs.processes import World
from pipelines.settings.commands.distill import DistillConfig, GeneralConfig, MachineConfig
from pipelines.stages.train.general import general_stage
from pipelines.stages.train.text_blocks import read_blocks
from support.commands import rejection_of, run_to_success, small_run
from support.plans import plan_of
from support.run_outputs import weights_that_differ
from support.tiny_models import WORDS, build_model, saved

DEEP = LossConfig(kl=0, hidden=1, relations=1, relation_heads=4)


def draw_documents(count: int, seed: int = 1) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(30, 60))) for _ in range(count)]


@pytest.fixture
def prose(tmp_path):
    """A folder of 24 txt documents."""
    folder = tmp_path / "prose"
    folder.mkdir()
    for i, text in enumerate(draw_documents(24)):
        (folder / f"{i:02}.txt").write_text(text)
    return folder


def module_of(student, teacher, loss=DEEP, **train) -> DistillationModule:
    settings = TrainConfig(**({"epochs": 2, "learning_rate": 1e-3, "warmup": 0, "schedule": "constant"} | train))
    signals = OnlineTeacher(teacher, loss.teacher_outputs)
    return DistillationModule(
        student, loss=loss, train=settings, signals=signals, teacher_sizes=read_layer_sizes(teacher.config)
    )


def build_blocks(tokenizer, length: int = 16) -> LanguageBlocks:
    return LanguageBlocks(token_blocks(tokenizer, draw_documents(12), length))


def train_module(module, blocks, *callbacks, epochs: int = 2) -> None:
    data = RowsDataModule(blocks, blocks, batch_size=8, seed=1)
    trainer = lightning.Trainer(
        max_epochs=epochs, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu",
        enable_model_summary=False, callbacks=list(callbacks), num_sanity_val_steps=0, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)


def count_hooks(model) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_gradient_compression_changes_the_key_of_the_general_stage(prose):
    keys = []
    run = SimpleNamespace(
        stage=lambda name, settings, *rest, **more: keys.append(settings),
        digest=lambda checkpoint: "digest",
        console=Console(),
        world=World(),
        digests=DigestIndex(prose / "digests.json", writes=False),
    )
    config = DistillConfig("o", TeacherConfig("t"), data=DataConfig("d"), general=GeneralConfig(str(prose)))
    for compress in ("none", "powersgd"):
        requested = replace(config, machine=MachineConfig(gradient_compression=compress))
        general_stage(run, plan_of(requested, folder=prose), "32")
    assert keys[0] != keys[1]


@pytest.mark.parametrize("family", ["bert", "distilbert", "electra-projected"])
def test_a_forward_pass_that_ends_early_returns_the_same_hidden_states(family, token_batch):
    model = build_model(family, "Model")
    with torch.no_grad():
        whole = model(**token_batch, output_hidden_states=True).hidden_states
        before = count_hooks(model)
        for layer in (1, 3, 4):
            with stop_after_layer(model, layer) as states:
                model(**token_batch)
            assert len(states) == layer + 1
            for state, expected in zip(states, whole, strict=False):
                assert torch.equal(state, expected)
    assert count_hooks(model) == before


def test_each_layer_is_trained_in_its_own_turn_and_then_all_together(tokenizer):
    """In each turn only the layer whose turn it is changes, together with the embeddings in the first turn."""
    teacher = build_model("bert", "Model")
    student = build_student(teacher, "mobilebert")
    module, blocks = module_of(student, teacher), build_blocks(tokenizer)
    moved: list[set[str]] = []

    class Watch(lightning.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.before = {name: value.clone() for name, value in pl_module.named_parameters()}
            self.turn = pl_module.layer_terms.active_layer

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            changed = {n for n, v in pl_module.named_parameters() if not torch.equal(v, self.before[n])}
            layers = {name.split("layer.")[1].split(".")[0] for name in changed if "layer." in name}
            others = {"embeddings" for name in changed if "layer." not in name}
            moved.append(layers | others)

    # The watcher runs after the callback that starts the turn.
    train_module(module, blocks, LayerByLayer(0.8), Watch())
    steps = len(moved)
    layerwise_steps = int(0.8 * steps)
    turns = [min(4, step * 4 // layerwise_steps + 1) for step in range(layerwise_steps)]
    assert set(turns) == {1, 2, 3, 4}
    for turn, changed in zip(turns, moved, strict=False):
        assert changed == ({"0", "embeddings"} if turn == 1 else {str(turn - 1)})
    for changed in moved[layerwise_steps:]:
        assert changed == {"0", "1", "2", "3", "embeddings"}
    assert all(each.requires_grad for each in student.parameters())
    assert module.layer_terms.active_layer == 0


@pytest.mark.slow
def test_progressive_training_moves_every_layer_closer_to_the_teachers(tokenizer):
    teacher = build_model("bert", "Model")
    student = build_student(teacher, "mobilebert,embeddings=32")
    blocks = build_blocks(tokenizer)
    batch = blocks.collate(range(16), 0)

    def measure_loss(layer: int) -> float:
        with torch.no_grad():
            module = module_of(student, teacher, LossConfig(kl=0, hidden=1, layer_map=f"{layer}:{layer}"))
            return module.compute_terms(batch)["hidden"].item()

    before = [measure_loss(layer) for layer in range(5)]
    train_module(module_of(student, teacher, epochs=12), blocks, LayerByLayer(1.0), epochs=12)
    after = [measure_loss(layer) for layer in range(5)]
    assert all(now < 0.9 * then for now, then in zip(after[1:], before[1:], strict=True)), (before, after)


def test_blocks_depend_on_the_seed_alone_and_exclude_held_out_blocks(tokenizer, prose, tmp_path):
    config = GeneralConfig(data=str(prose), length=16, blocks=20)
    train, held_out = read_blocks(config, tokenizer, 3)
    again, _ = read_blocks(config, tokenizer, 3)
    assert (len(train), len(held_out)) == (20, 2)
    seen = {row.tobytes() for row in train.input_ids}
    assert seen == {row.tobytes() for row in again.input_ids}
    assert not seen & {row.tobytes() for row in held_out.input_ids}
    assert seen != {row.tobytes() for row in read_blocks(config, tokenizer, 4)[0].input_ids}
    with (tmp_path / "train.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("text",), *((text,) for text in draw_documents(5))])
    with (tmp_path / "dev.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("text",), *((text,) for text in draw_documents(2, seed=9))])
    (tmp_path / "tables").mkdir()
    for name in ("train.csv", "dev.csv"):
        (tmp_path / name).rename(tmp_path / "tables" / name)
    assert set(split_names(str(tmp_path / "tables"))) == {"train", "validation"}
    config = GeneralConfig(data=str(tmp_path / "tables"), length=16)
    train, held_out = read_blocks(config, tokenizer, 3)
    assert [row.tolist() for row in held_out.input_ids] == [
        row.tolist() for row in token_blocks(tokenizer, draw_documents(2, seed=9), 16)
    ]


GENERAL = ("--general.length", "16", "--general.train.batch_size", "8", "--general.train.learning_rate", "1e-3")


@pytest.mark.slow
def test_the_task_starts_from_the_weights_of_the_general_stage(body_folder, data_folder, prose, tmp_path):
    """Runs progressive transfer into bottlenecks, then trains a new head on the task and saves a stock checkpoint."""
    output = tmp_path / "run"
    arguments = small_run(body_folder, data_folder, output, *GENERAL, "--general.data", str(prose))
    arguments[arguments.index("layers=2")] = "mobilebert"
    arguments += ["--general.progressive_share", "0.7", "--general.loss.relations", "1"]
    arguments += ["--general.loss.relation_heads", "4", "--general.train.checkpoint_every", "3"]
    message = run_to_success("distill", [*arguments, "--until", "general"])
    (folder,) = (output / "general").glob("*/model")
    body = AutoModel.from_pretrained(folder)
    assert type(body).__name__ == "MobileBertModel"
    metrics = json.loads((folder.parent / "manifest.json").read_text())["metrics"]
    assert metrics["val/loss"] > 0
    assert metrics["blocks"] > 20
    assert "general: already complete, skipped" in run_to_success(
        "distill", [*arguments, "--until", "distill", "--epochs", "1"]
    )
    (start,) = (output / "distill").glob("*/manifest.json")
    assert "general" in json.loads(start.read_text())["inputs"]
    (student,) = (output / "distill").glob("*/model")
    model = AutoModelForSequenceClassification.from_pretrained(student)
    assert type(model).__name__ == "MobileBertForSequenceClassification"
    teacher = dict(body.named_parameters())
    initial = dict(build_student(AutoModel.from_pretrained(body_folder), "mobilebert").named_parameters())
    layer = "encoder.layer.2.intermediate.dense.weight"
    trained = dict(model.mobilebert.named_parameters())[layer]
    assert (trained - teacher[layer]).norm() < (trained - initial[layer]).norm()
    assert "general: started" in message


@pytest.mark.slow
def test_a_masked_language_teacher_trains_the_student_on_masked_tokens(tokenizer, data_folder, prose, tmp_path):
    teacher = saved(build_model("bert", "ForMaskedLM"), tokenizer, tmp_path / "words")
    arguments = small_run(teacher, data_folder, tmp_path / "run", *GENERAL, "--general.data", str(prose))
    arguments += ["--general.loss.kl", "1", "--general.loss.ce", "0.5", "--general.loss.hidden_kind", "cosine"]
    arguments += ["--general.train.epochs", "4", "--until", "general"]
    run_to_success("distill", arguments)
    (folder,) = (tmp_path / "run" / "general").glob("*/model")
    model = AutoModelForMaskedLM.from_pretrained(folder)
    assert type(model).__name__ == "BertForMaskedLM"
    assert model.config.num_hidden_layers == 2
    (log,) = (folder.parent / "logs").rglob("metrics.csv")
    with log.open() as file:
        rows = [row for row in csv.DictReader(file) if row["train/kl"]]
    assert float(rows[-1]["train/kl"]) < float(rows[0]["train/kl"])
    assert all(float(row["train/hidden_weight"]) == 1 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "terms"),
    [
        ("replicated", ()),
        (
            "zero1",
            ("--general.loss.hidden", "0", "--general.loss.relations", "1", "--general.loss.relation_heads", "4"),
        ),
    ],
)
def test_two_processes_train_the_body_that_one_process_trains(layout, terms, body_folder, data_folder, prose, tmp_path):
    """No term on layers reaches the pooler, and relations don't reach the last layer's output either."""
    options = (*GENERAL, "--general.data", str(prose), *terms, "--until", "general", "--general.train.dropout", "0")
    students = []
    for number, more in enumerate(((), ("--devices", "2", "--student.layout", layout))):
        output = tmp_path / str(number)
        run_to_success("distill", small_run(body_folder, data_folder, output, *options, *more))
        (folder,) = (output / "general").glob("*/model")
        students.append(AutoModel.from_pretrained(folder).state_dict())
    expected, found = students
    assert weights_that_differ(found, expected, 1e-5, [name for name in found if not name.endswith("key.bias")]) == {}


def test_the_turn_of_a_layer_depends_on_the_step_alone(tokenizer, tmp_path):
    """The turn depends on the step alone, so that a resumed phase trains the same layers as an undisturbed one."""
    callback = LayerByLayer(0.5)
    assert [callback.find_active_layer(step, 16, 4) for step in range(16)] == [1, 1, 2, 2, 3, 3, 4, 4] + [0] * 8
    assert [callback.find_active_layer(step, 5, 4) for step in range(5)] == [1, 3, 0, 0, 0]
    assert [LayerByLayer(1.0).find_active_layer(step, 4, 4) for step in range(4)] == [1, 2, 3, 4]
    with pytest.raises(InputError, match="expected a share"):
        LayerByLayer(0)


@pytest.mark.parametrize(
    ("loss", "missing"),
    [
        (LossConfig(kl=0, hidden=1), None),
        (LossConfig(kl=0, relations=1, relation_heads=2, layer_map="skip"), None),
        (LossConfig(kl=0, hidden=1, layer_map="0:0,2:2,3:4"), None),
        (LossConfig(kl=0, hidden=1, layer_map="1:1,3:4"), "2"),
        (LossConfig(kl=0, hidden=1, layer_map="skip"), "3"),
        (LossConfig(kl=0, attention=1, layer_map="last"), "1, 2"),
        (LossConfig(kl=0, attention=1, layer_map="0:0,2:2,3:4"), "1"),
    ],
)
def test_a_layer_map_without_a_loss_for_a_layers_turn_is_rejected(loss, missing):
    pairs = match_layers(loss, LayerSizes(3, 32, 4), LayerSizes(4, 32, 4))
    if missing is None:
        check_layer_coverage(pairs, 3)
    else:
        with pytest.raises(InputError, match=f"each of the student's 3 layers, found none for {missing}: loss"):
            check_layer_coverage(pairs, 3)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--general.loss.kl", "1"], "expected a teacher with a masked-language-modelling head, found BertModel"),
        (["--general.loss.relations", "1"], "loss.relation_heads: expected a divisor of the widths"),
        (["--general.data", "nowhere"], "general.data 'nowhere': expected a file or a folder"),
        (["--general.train.patience", "2"], "general.train.patience: expected 0, found 2"),
        (["--general.progressive_share", "2"], "general.progressive_share: expected a share from 0 to 1"),
        *(
            (["--general.progressive_share", "0.5", "--general.loss.layer_map", name], "expected loss.layer_map")
            for name in ("learned", "skip", "last")
        ),
        (
            ["--general.progressive_share", "0.5", "--general.loss.layer_map", "2:4"],
            "a pair for each of the student's 2 layers, found none for 1",
        ),
        (["--general.loss.hidden", "0"], "nothing would be learnt"),
        (["--speedup", "2", "--student", "teacher"], "general.data: expected a student that is built and trained"),
    ],
)
def test_invalid_general_settings_are_rejected_before_the_run(
    more, named, body_folder, data_folder, prose, tmp_path, monkeypatch, capsys
):
    arguments = small_run(body_folder, data_folder, tmp_path / "run", "--general.data", str(prose), *more)
    message = rejection_of(distill, arguments, monkeypatch, capsys)
    assert named in message
    assert not (tmp_path / "run").exists()
