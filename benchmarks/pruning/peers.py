"""The methods of `benchmarks.pruning.pruned_students`; other tools are called through their packages.

Torch-Pruning 1.6.1 is used as in its `examples/transformers/prune_hf_bert.py`: `MetaPruner`, L2 magnitude averaged over
each group, removal of entire heads (`prune_num_heads`, not `prune_head_dims`), one step, and the same ratio for
channels and heads; sizes are multiples of 8, as its README recommends. The classifier isn't pruned. Units are ranked
over all layers, as in the example, or within each layer (`per_layer`). The numbers of heads of the modules are
corrected afterwards, as in the example; transformers 5.23 needs nothing else. For TextBrewer see `textbrewer.py`.
"""

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeAlias, cast

import lightning
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.bert.modeling_bert import BertSelfAttention

from benchmarks.pruning.textbrewer import (
    TextBrewerSettings,
    TextBrewerSize,
    build_textbrewer_student,
    train_with_textbrewer,
)
from compress.prune.search.candidates import get_sizes
from distill.checkpoint.custom_models import load_model_folder
from distill.checkpoint.tokenizer import load_tokenizer
from distill.data.batches.data_module import TextDataModule
from distill.data.batches.encode import encode_samples
from distill.losses.config import LossConfig
from distill.slicing import find_axes
from distill.student.build import build_student
from distill.tasks.text_classification import TextClassification
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from pipelines.runs.console import Console
from pipelines.runs.files import write_json
from pipelines.runs.manifest import SCRATCH, JsonObject
from pipelines.runs.stage import Run
from pipelines.runs.trainer import fit_module
from pipelines.runs.training_job import TrainingJob
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.resolve import resolve
from pipelines.stages.prepare.data import read_data
from pipelines.stages.prepare.teacher import MODEL
from pipelines.stages.prepare.vocabulary import load_student_tokenizer
from pipelines.stages.run_stages import run_stages
from pipelines.stages.train.training_inputs import open_cached_signals

MULTIPLE = 8  # of the sizes that Torch-Pruning leaves
LARGEST_RATIO = 0.95
HALVINGS = 8
CONFIG = "config.json"  # as `pipelines.distill` writes it
CLOSE = 1.025  # measured over requested speedup at which a search ends, as in our own search
LABELS = LossConfig(kl=0.0, ce=1.0)
Size: TypeAlias = JsonObject  # keyword arguments that define a student's size in one of the methods


def prune_with_torch_pruning(teacher: PreTrainedModel, ratio: float, *, per_layer: bool) -> PreTrainedModel:
    """Returns a copy of the teacher without `ratio` of its channels and heads, those with the smallest weights."""
    import torch_pruning

    model = copy.deepcopy(teacher)
    model.eval()
    modules = [module for module in model.modules() if hasattr(module, "num_attention_heads")]
    attentions = cast("list[BertSelfAttention]", modules)
    heads = {
        layer: module.num_attention_heads for module in attentions for layer in (module.query, module.key, module.value)
    }
    inputs = {name: torch.ones(1, 9, dtype=torch.int64) for name in ("input_ids", "attention_mask")}
    with torch.enable_grad():  # it traces the graph of gradients
        pruner = torch_pruning.pruner.MetaPruner(
            model,
            inputs,
            importance=torch_pruning.importance.MagnitudeImportance(p=2, group_reduction="mean"),
            global_pruning=not per_layer,
            pruning_ratio=ratio,
            head_pruning_ratio=ratio,
            num_heads=heads,
            prune_num_heads=True,
            prune_head_dims=False,
            round_to=MULTIPLE,
            ignored_layers=[model.classifier],
            in_channel_groups={},  # the defaults are shared between pruners
            out_channel_groups={},
            output_transform=lambda output: output.logits.sum(),
        )
        pruner.step()
    for module in attentions:
        module.num_attention_heads = pruner.num_heads[module.query]
        module.all_head_size = module.query.out_features
        module.attention_head_size = module.all_head_size // module.num_attention_heads
    model.zero_grad(set_to_none=True)
    return model


def find_ratio(measure_speedup: Callable[[float], float], requested: float) -> float:
    """Returns the smallest ratio, by bisection, whose measured speedup isn't below `requested`.

    Returns LARGEST_RATIO if none reaches it.
    """
    low, high = 0.0, LARGEST_RATIO
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        speedup = measure_speedup(middle)
        low, high = (low, middle) if speedup >= requested else (middle, high)
        if requested <= speedup <= requested * CLOSE:
            break
    return high


class TrainingSetup:
    """What all students of one seed are trained with: the splits, the teacher, and its cached logits."""

    def __init__(self, config: DistillConfig, console: Console):
        plan = resolve(config, 1)
        self.config = config = plan.settings
        self.plan, self.console = plan, console
        self.run = Run(Path(config.output), config.seed, console)
        if not (self.run.output / CONFIG).exists():
            write_json(self.run.output / CONFIG, asdict(config))
        self.stages, _ = run_stages(self.run, replace(plan, settings=replace(config, until="cache")))
        self.folder = self.stages["teacher"].folder / MODEL
        self.splits, self.tokenizer = read_data(self.stages["data"]), load_tokenizer(self.folder)
        self.task = TextClassification(self.splits.labels)

    def load_teacher(self) -> PreTrainedModel:
        """Returns the teacher."""
        teacher: PreTrainedModel = load_model_folder(self.folder)
        return teacher

    def train_config(self, rate: float) -> TrainConfig:
        """Returns the settings of the training with a learning rate."""
        return replace(self.config.train, learning_rate=rate)

    def distill(
        self,
        student: PreTrainedModel,
        train: TrainConfig,
        folder: Path,
        label: str,
        loss: LossConfig | None = None,
    ) -> None:
        """Trains a student in place as the distill stage does; a killed training resumes from `folder`.

        `loss` replaces the loss of the settings.
        """
        config, seed = self.config, self.run.seed
        lightning.seed_everything(seed, verbose=False)
        (folder / SCRATCH).mkdir(parents=True, exist_ok=True)
        data = TextDataModule(
            self.splits,
            self.tokenizer,
            batch_size=config.train.batch_size,
            max_length=config.data.max_length,
            seed=seed,
            signals=open_cached_signals(self.stages["cache"]),
        )
        module = DistillationModule(student, loss=loss or config.loss, train=train, metric=self.task.scorer())
        job = TrainingJob(
            label=label,
            train=train,
            machine=config.machine,
            precision=config.machine.precision,
            seed=seed,
            console=self.console,
            wandb_folder=folder / "wandb",
        )
        fit_module(module, data, folder, job)


@dataclass(frozen=True)
class TrainedStudent:
    """A student, the seconds of its training, and those that were spent on its own shape."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    label: str
    seconds: float
    search_seconds: float = 0.0


def train_ours(setup: TrainingSetup, size: Size, rate: float, folder: Path) -> TrainedStudent:
    """Trains a student whose shape the budget determines."""
    config = replace(setup.config, train=setup.train_config(rate), until="distill")
    stages, students = run_stages(setup.run, replace(setup.plan, settings=config))
    stage = students[0].stage
    model = load_model_folder(stage.folder / MODEL)
    sizes = get_sizes(find_axes(model))
    layers = " ".join(f"{heads}x{ffn}" for heads, ffn in zip(sizes.heads, sizes.ffn, strict=True))
    other_folders = {each.folder for each in setup.stages.values()} | {stage.folder}
    search = sum(each.manifest["wall_seconds"] for each in stages.values() if each.folder not in other_folders)
    label, seconds = f"{sizes.hidden} wide, {layers}", stage.manifest["wall_seconds"]
    return TrainedStudent(model, load_student_tokenizer(stage.folder / MODEL), label, seconds, search)


def train_fewer_layers(setup: TrainingSetup, size: Size, rate: float, folder: Path) -> TrainedStudent:
    """Trains a student with some of the teacher's layers."""
    label = f"layers={size['layers']}"
    student = build_student(setup.load_teacher(), label)
    train = setup.train_config(rate)
    return time_training(setup, student, label, lambda: setup.distill(student, train, folder, "layers"))


def train_fresh(setup: TrainingSetup, size: Size, rate: float, folder: Path) -> TrainedStudent:
    """Trains a small model with random weights, its embeddings too, on the labels, without a teacher."""
    train = replace(setup.train_config(rate), freeze_embeddings=False)
    student_size = TextBrewerSize(**size)
    student = build_textbrewer_student(setup.load_teacher(), student_size, setup.run.seed)
    label = student_size.label.partition(": ")[2]
    return time_training(setup, student, label, lambda: setup.distill(student, train, folder, "fresh", LABELS))


def train_textbrewer(setup: TrainingSetup, size: Size, rate: float, folder: Path) -> TrainedStudent:
    """Trains one of TextBrewer's students with TextBrewer."""
    teacher, student_size, config = setup.load_teacher(), TextBrewerSize(**size), setup.config
    student = build_textbrewer_student(teacher, student_size, setup.run.seed)
    settings = TextBrewerSettings(
        config.train.epochs, config.train.batch_size, rate, config.loss.resolved_temperature, setup.run.seed
    )
    data = encode_samples(setup.tokenizer, setup.splits.train, config.data.max_length)
    pad_id = int(setup.tokenizer.pad_token_id or 0)

    def train() -> None:
        train_with_textbrewer(teacher, student, data, pad_id, settings, folder)

    return time_training(setup, student, student_size.label, train)


def train_torch_pruning(setup: TrainingSetup, size: Size, rate: float, folder: Path) -> TrainedStudent:
    """Trains a student that Torch-Pruning pruned."""
    student = prune_with_torch_pruning(setup.load_teacher(), **size)
    label = f"ratio {size['ratio']:.3f}, {'per layer' if size['per_layer'] else 'global'}"
    train = setup.train_config(rate)
    return time_training(setup, student, label, lambda: setup.distill(student, train, folder, "torch-pruning"))


def time_training(
    setup: TrainingSetup, student: PreTrainedModel, label: str, train: Callable[[], None]
) -> TrainedStudent:
    """Trains a student and measures the time."""
    start = time.perf_counter()
    train()
    return TrainedStudent(student, setup.tokenizer, label, time.perf_counter() - start)


TRAIN: Mapping[str, Callable[[TrainingSetup, Size, float, Path], TrainedStudent]] = {
    "ours": train_ours,
    "layers": train_fewer_layers,
    "layers-slower": train_fewer_layers,
    "fresh": train_fresh,
    "fresh-slower": train_fresh,
    "textbrewer": train_textbrewer,
    "torch-pruning": train_torch_pruning,
}
