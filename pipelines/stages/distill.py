"""The distil stage: a student built or loaded, and trained on the teacher's signals."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import lightning
import numpy as np
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from distill.cache import CacheReader
from distill.checkpoint.pruned import load_pruned
from distill.data.batches.batches import Rows, Signals
from distill.data.batches.data_module import TextDataModule
from distill.data.batches.encode import Batch
from distill.data.batches.encode import encode as encode_texts
from distill.data.splits.labelled import Splits
from distill.losses.teacher_signals import SignalSource
from distill.models.generation import find_end_tokens
from distill.models.layer_sizes import read_layer_sizes
from distill.slicing import Shape, find_axes, prune
from distill.student.build import build_student
from distill.student.spec import is_relative
from distill.tasks.task import Task
from distill.teacher.fingerprint import check_same_tokenizer
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from distill.train.steps.across_tokenizers import CrossTokenizerKL
from distill.train.steps.on_policy import OnPolicy
from pipelines.runs.placement import build_pipeline_trainer, build_placed_model, save_model
from pipelines.runs.stage import Artefact, Run
from pipelines.runs.trainer import fit_module, validate_module
from pipelines.settings.distill_config import DistillConfig
from pipelines.settings.plan import Plan
from pipelines.settings.tokenizers import ACROSS, is_across, rows_across
from pipelines.stages.cache import CACHE
from pipelines.stages.cache_writing import load_teacher
from pipelines.stages.data import read_data, read_task
from pipelines.stages.general import with_head
from pipelines.stages.online_teacher import call_teacher, load_configured_teacher
from pipelines.stages.recovery_rate import RULE, recovering
from pipelines.stages.sparsity import SparsityCallback, share_of_zeros
from pipelines.stages.teacher import MODEL, training_settings
from pipelines.stages.vocabulary import WORDS, Translated, tokenizer_of

VERSION = 1  # of this stage's algorithm; bump it when the same inputs give a different result (docs/stages.md)
SHAPE = "shape.json"


def student_stage(
    run: Run,
    plan: Plan,
    data: Artefact,
    teacher: Artefact,
    cache: Artefact | None,
    precision: str,
    pruned: "PrunedStart | None" = None,
    general: Artefact | None = None,
) -> Artefact:
    """Writes `model/`: the trained student.

    It reads the teacher's signals from the cache ahead of each step; without a cache the teacher is queried in each
    step. A `pruned` student starts from the pruned model. After general distillation it starts from the `general`
    stage's model, with a new head.
    """
    config, layout = plan.settings, plan.layouts.student
    settings = {
        "student": config.student.spec,
        "loss": vars(config.loss),
        "train": training_settings(config, "train"),
        "precision": precision,
        "max_length": config.data.max_length,
        "signals": config.teacher.signals,
    }
    settings |= {"across": vars(config.across)} if config.task in ACROSS else {}
    settings |= {"on_policy": vars(config.on_policy)} if config.on_policy.share else {}
    settings |= {"sparsity": vars(config.sparsity)} if config.sparsity.requested else {}
    inputs: dict[str, Artefact | str] = {"data": data, "teacher": teacher}
    if cache is not None:
        inputs["cache"] = cache
    if pruned is not None:
        inputs |= pruned.inputs()
        settings |= {"rate": RULE}
    elif general is not None:
        inputs["general"] = general
    elif plan.student is not None:
        inputs["student"] = run.digest(plan.student)

    def work(folder: Path) -> dict[str, Any]:
        source, splits, task = teacher.folder / MODEL, read_data(data), read_task(data)
        own = AutoConfig.from_pretrained(source)
        taught = tokenizer = tokenizer_of(pruned.start if pruned is not None else source)
        if pruned is None and plan.student is not None:
            tokenizer = plan.student.load_tokenizer()
        task.settle_tokenizer(tokenizer, source)
        other = is_across(config, taught, tokenizer)
        if not other:  # the signals are of texts truncated at this length
            tokenizer.model_max_length = tokenizer_of(source).model_max_length

        def build() -> PreTrainedModel:
            model = load_teacher(source)
            if pruned is not None:
                student = pruned.model()
            elif general is not None:
                student = with_head(
                    run, general.folder / MODEL, task, labelled_texts(run, config, splits, tokenizer, task)
                )
            else:
                student = make_student(plan, model, taught, task, run.seed, other=other)
            if config.on_policy.share:
                student.generation_config.eos_token_id = find_end_tokens(student, tokenizer) or None
            run.console.say(f"  student: {sizes(student)}, teacher: {sizes(model)}")
            return student

        student, mesh = build_placed_model(
            run, layout, folder, build, task.auto, offload=config.student.offload, prefetch=config.machine.prefetch
        )
        remote = call_teacher(run.world, source) if config.teacher.ranks and config.loss.needs_teacher else None
        in_step = config.loss.needs_teacher and cache is None and remote is None
        asked = load_configured_teacher(plan, source) if in_step else None
        train = config.train if pruned is None else pruned.training(config.train, student)
        lightning.seed_everything(run.seed, verbose=False)
        module = DistillationModule(
            student,
            loss=config.loss,
            train=train,
            metric=task.scorer(),
            output_rows=task.answers,
            teacher_sizes=read_layer_sizes(own),
            shard_optimizer=layout.zero == 1,
            stages=build_pipeline_trainer(student, layout, mesh),
            signals=asked if in_step and not other else None,
            across=CrossTokenizerKL.from_tokenizers(asked, config.across, tokenizer, taught)
            if asked is not None and other
            else None,
            on_policy=OnPolicy(config.on_policy, run.seed, own) if config.on_policy.share else None,
        )
        signals = cached_signals(cache, pruned) if cache is not None else remote
        training = texts_module(run, config, splits, tokenizer, signals, task, taught if other else None)
        for part, notes in training.notes.items():
            run.console.say(f"  {part}: " + ", ".join(f"{count:,} {what}" for what, count in notes.items()))
        if pruned is not None and pruned.is_whole(student):
            run.console.say("  student: nothing had to be cut, so it keeps the teacher's weights as they are")
            save_model(student, tokenizer, folder / MODEL)
            found = validate_module(module, training, machine=config.machine, precision=precision)
            return found | {"params": student.num_parameters(), "epochs": 0}
        metrics = fit_module(
            module,
            training,
            folder,
            label="student: distilling",
            train=train,
            machine=config.machine,
            layout=layout,
            mesh=mesh,
            precision=precision,
            seed=run.seed,
            console=run.console,
            world=run.world,
            wandb_folder=run.output / "wandb",
            callbacks=[SparsityCallback(config.sparsity)] if config.sparsity.requested else [],
        )
        if remote is not None:
            remote.finish()
        save_model(student, tokenizer, folder / MODEL)
        noted: dict[str, Any] = {"notes": training.notes} if training.notes else {}
        noted |= {"zeros": share_of_zeros(student)} if config.sparsity.requested else {}
        return metrics | {"params": student.num_parameters()} | noted

    name = "distill" if pruned is None else f"distill-{pruned.name}"
    return run.stage(name, settings, inputs, work, version=VERSION, together=True)


@dataclass(frozen=True)
class PrunedStart:
    """The starting point of a pruned student.

    Args:
        name: Name of the target.
        begun: The stage with the model before it is pruned.
        shape: The stage that chose the units to keep; None if `begun` is pruned already.
        words: The stage that stores the tokens that are kept; None if all are.
    """

    name: str
    begun: Artefact
    shape: Artefact | None
    words: Artefact | None

    @property
    def start(self) -> Path:
        return self.begun.folder / MODEL

    def inputs(self) -> dict[str, Artefact]:
        given = {"begun": self.begun, "words": self.words, "shape": self.shape}
        return {name: stage for name, stage in given.items() if stage is not None}

    @property
    def untrained(self) -> bool:
        """Whether the model to prune is untrained: built from layers of the teacher, or with factorised embeddings."""
        about = (self.words or self.begun).manifest["config"]
        return bool(about["embedding_rank"]) or (about["student"] != "teacher" and is_relative(about["student"]))

    def is_whole(self, student: PreTrainedModel) -> bool:
        """Returns whether nothing but tokens was removed from a trained model.

        This is the case if quantization alone makes it fast enough.
        """
        return not self.untrained and student.num_parameters() == self.whole.num_parameters()

    @cached_property
    def whole(self) -> PreTrainedModel:
        """The model to prune, after removal of tokens."""
        return load_pruned((self.words or self.begun).folder / MODEL)

    def training(self, train: TrainConfig, student: PreTrainedModel) -> TrainConfig:
        """Returns the training settings, with a learning rate that depends on the share of weights pruned."""
        return train if self.untrained else recovering(train, student, self.whole)

    def model(self) -> PreTrainedModel:
        """Returns the student before it is trained."""
        model = load_pruned(self.start)
        return model if self.shape is None else prune(model, find_axes(model), read_shape(self.shape))


def texts_module(
    run: Run,
    config: DistillConfig,
    splits: Splits,
    tokenizer: PreTrainedTokenizerBase,
    signals: Signals | None = None,
    task: Task | None = None,
    taught: PreTrainedTokenizerBase | None = None,
) -> TextDataModule:
    """Returns the texts that the student trains on, including unlabelled ones if the loss needs the teacher.

    The teacher may have a tokenizer of its own (`taught`).
    """

    def twice(tokenizer: PreTrainedTokenizerBase, part: Any, length: int) -> Rows:
        assert taught is not None
        return rows_across(config, tokenizer, taught, part.texts, length)

    encode_train = twice if taught is not None else task.encode_train if task else None
    return TextDataModule(
        splits,
        tokenizer,
        encode=task.encode if task else encode_texts,
        encode_train=encode_train,
        batch_size=config.train.batch_size,
        max_length=config.data.max_length,
        seed=run.seed,
        unlabelled=config.loss.needs_teacher,
        signals=signals,
    )


def labelled_texts(
    run: Run, config: DistillConfig, splits: Splits, tokenizer: PreTrainedTokenizerBase, task: Task
) -> TextDataModule:
    length = config.data.max_length
    return TextDataModule(splits, tokenizer, encode=task.encode, max_length=length, seed=run.seed, unlabelled=False)


def drawn_batches(texts: TextDataModule, count: int, seed: int, size: int) -> Iterator[Batch]:
    """Yields batches of `size` texts from at most `count` training texts, drawn by the seed."""
    rows = np.random.default_rng(seed).permutation(len(texts.train))[:count]
    for start in range(0, len(rows), size):
        yield texts.train.collate(rows[start : start + size], texts.pad_id)


@lru_cache(maxsize=1)
def open_reader(folder: Path) -> CacheReader:
    """Opens a finished cache; the stages of a run share the reader, so that the index is read once."""
    return CacheReader(folder)


def cached_signals(cache: Artefact, pruned: PrunedStart | None = None) -> SignalSource:
    """Returns the cached signals; a student with fewer tokens queries them with its own tokenizer's ids."""
    reader = open_reader(cache.folder / CACHE)
    if pruned is None or pruned.words is None:
        return reader
    return Translated(reader, np.load(pruned.words.folder / WORDS))


def read_shape(shape: Artefact) -> Shape:
    """Reads the shape that a shape stage chose."""
    return Shape.from_dict(json.loads((shape.folder / SHAPE).read_text())["shape"])


def make_student(
    plan: Plan,
    teacher: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    seed: int,
    *,
    other: bool = False,
) -> PreTrainedModel:
    """Returns the student before training: built from the teacher, or a checkpoint.

    A checkpoint must have the teacher's tokenizer, unless `other` is set.
    """
    if plan.student is None:
        return build_student(teacher, plan.settings.student.spec, seed)
    if not other:
        check_same_tokenizer(tokenizer, plan.student.load_tokenizer(), plan.student.name)
    task.check(plan.student.config, plan.student.name)
    rows, folder = task.head_rows(plan.student.config), str(plan.student.folder)
    return task.load(folder, seed) if rows is None else task.load_headed(folder, rows)


def sizes(model: PreTrainedModel) -> str:
    own = model.config
    return (
        f"{own.num_hidden_layers} layers x {own.hidden_size}, {own.num_attention_heads} heads, "
        f"{model.num_parameters() / 1e6:.1f}M parameters"
    )
