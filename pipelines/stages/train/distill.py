"""The distill stage: a student built or loaded, and trained on the teacher's signals."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning
from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from distill.data.batches.batches import Signals
from distill.data.batches.data_module import TextDataModule
from distill.data.splits.examples import Splits
from distill.losses.teacher_signals import SignalSource
from distill.models.generation import find_end_tokens
from distill.models.layer_sizes import read_layer_sizes
from distill.parallel.pipeline import MICRO_BATCHES
from distill.student.bottleneck import VERSION as BOTTLENECK_VERSION
from distill.student.build import build_student
from distill.student.spec import is_attention_free, is_bottleneck
from distill.student.token_vectors import VERSION as ATTENTION_FREE_VERSION
from distill.tasks.task import Task
from distill.teacher.fingerprint import check_same_tokenizer
from distill.teacher.remote import RemoteTeacher
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from distill.train.steps.cross_tokenizer import CrossTokenizerKL
from distill.train.steps.on_policy import OnPolicy
from pipelines.runs.manifest import JsonObject
from pipelines.runs.placement import build_pipeline_trainer, build_placed_model, save_model
from pipelines.runs.stage import Artefact, Run
from pipelines.runs.trainer import fit_module, validate_module
from pipelines.runs.trainer_state import Metrics
from pipelines.runs.training_job import TrainingJob
from pipelines.settings.plan import RunPlan
from pipelines.settings.tokenizers import CROSS_TOKENIZER_TASKS, is_cross_tokenizer
from pipelines.stages.cache.online_teacher import call_teacher, load_configured_teacher
from pipelines.stages.cache.writing import load_teacher
from pipelines.stages.prepare.data import read_data, read_task
from pipelines.stages.prepare.teacher import MODEL, open_stage_checkpoint, training_settings
from pipelines.stages.prepare.tokens import SplitEncoder
from pipelines.stages.prepare.vocabulary import load_student_tokenizer
from pipelines.stages.train.general import attach_head
from pipelines.stages.train.prepared_training import STUDENT_TRAINING, PreparedTraining, Tokenizers
from pipelines.stages.train.recovery_rate import RULE
from pipelines.stages.train.replicas import replica_settings, train_replicas
from pipelines.stages.train.sampling import build_sampler
from pipelines.stages.train.sparsity import SparsityCallback, mean_zero_share, sparsity_settings
from pipelines.stages.train.student_start import StudentStart
from pipelines.stages.train.training_inputs import build_labelled_texts, build_training_texts, open_cached_signals

VERSION = 4  # of this stage's algorithm; bump it when the same inputs give a different result (docs/stages.md)


def student_stage(
    run: Run,
    plan: RunPlan,
    data: Artefact,
    teacher: Artefact,
    cache: Artefact | None,
    precision: str,
    pruned: StudentStart | None = None,
    general: Artefact | None = None,
    name: str = "",
) -> Artefact:
    """Writes `model/`: the trained student.

    It reads the teacher's signals from the cache ahead of each step; without a cache the teacher is queried in each
    step. A `pruned` student starts from the pruned model. After general distillation it starts from the `general`
    stage's model, with a new head. One of several students has a `name`.
    """
    training = StudentTraining(run, plan, data, teacher, cache, precision, pruned, general)
    student_name = name if pruned is None else pruned.name
    stage = f"distill-{student_name}" if student_name else "distill"
    return run.stage(stage, training.settings(), training.inputs(), training.work, version=VERSION, together=True)


@dataclass(frozen=True)
class StudentTraining:
    """The inputs, the key and the work of the stage; see `student_stage`."""

    run: Run
    plan: RunPlan
    data: Artefact
    teacher: Artefact
    cache: Artefact | None
    precision: str
    pruned: StudentStart | None
    general: Artefact | None

    def inputs(self) -> dict[str, Artefact | str]:
        """Returns the stages and checkpoints that the student depends on."""
        inputs: dict[str, Artefact | str] = {"data": self.data, "teacher": self.teacher}
        if self.cache is not None:
            inputs["cache"] = self.cache
        if self.pruned is not None:
            inputs |= self.pruned.inputs()
        elif self.general is not None:
            inputs["general"] = self.general
        elif self.plan.student is not None:
            inputs["student"] = self.run.digest(self.plan.student)
        return inputs

    def settings(self) -> JsonObject:
        """Returns the settings that the student depends on."""
        config = self.plan.settings
        settings = {
            "student": self.plan.student_key,
            "loss": vars(config.loss),
            "train": training_settings(config, "train"),
            "precision": self.precision,
            "max_length": config.data.max_length,
            "signals": config.teacher.source,
        }
        # The name in stage keys is an earlier one of the setting.
        settings |= {"across": vars(config.cross_tokenizer)} if config.task in CROSS_TOKENIZER_TASKS else {}
        settings |= {"on_policy": vars(config.on_policy)} if config.on_policy.share else {}
        settings |= {"sampling": vars(config.sampling)} if config.sampling.by != "uniform" else {}
        settings |= sparsity_settings(config, self.precision)
        settings |= {"vectors": ATTENTION_FREE_VERSION} if is_attention_free(config.student.spec) else {}
        settings |= {"bottleneck": BOTTLENECK_VERSION} if is_bottleneck(config.student.spec) else {}
        settings |= replica_settings(config)
        return settings | ({"rate": RULE} if self.pruned is not None else {})

    def work(self, folder: Path) -> JsonObject:
        """Trains the student, writes it to `folder`, and returns the metrics."""
        run, config = self.run, self.plan.settings
        prepared = self.prepare(folder)
        student, texts, tokenizer = prepared.module.student, prepared.texts, prepared.tokenizers.student
        if self.is_trained_already(student):
            run.console.say("  student: nothing had to be pruned, so its weights are those of the teacher")
            save_model(student, tokenizer, folder / MODEL, run.world)
            metrics = validate_module(prepared.module, texts, machine=config.machine, precision=self.precision)
            return metrics | {"params": student.num_parameters(), "epochs": 0}
        metrics = train_replicas(self, prepared, folder) if config.machine.asynchronous else self.fit(prepared, folder)
        if prepared.remote is not None:
            prepared.remote.finish()
        save_model(student, tokenizer, folder / MODEL, run.world)
        notes: JsonObject = {"notes": texts.notes} if texts.notes else {}
        notes |= {"zeros": mean_zero_share(student)} if config.sparsity.requested else {}
        return metrics | {"wait_share": texts.wait_share, "params": student.num_parameters()} | notes

    def is_trained_already(self, student: PreTrainedModel) -> bool:
        """Returns whether pruning removed nothing but tokens, so that the weights are those of a trained model."""
        return self.pruned is not None and self.pruned.is_unpruned(student)

    def prepare(self, folder: Path) -> PreparedTraining:
        """Returns the student and what it is trained on; `folder` is that of the stage."""
        run, config, plan = self.run, self.plan.settings, self.plan
        splits, task = read_data(self.data), read_task(self.data)
        tokenizers = self.load_tokenizers(task)
        student, mesh = build_placed_model(
            run,
            plan.layouts.student,
            folder,
            lambda: self.build_student(splits, task, tokenizers),
            task.auto,
            precision=self.precision,
            offload=config.student.offload,
            prefetch=config.machine.prefetch,
            timed=self.choose_timed_batch(),
        )
        remote, online = self.connect_teacher()
        train = config.train if self.pruned is None else self.pruned.adapt_training(config.train, student)
        lightning.seed_everything(run.seed, verbose=False)
        module = self.build_module(student, task, tokenizers, train, online, mesh)
        texts = self.build_texts(splits, task, tokenizers, remote)
        if config.sampling.by != "uniform":
            texts.sampler = build_sampler(
                config, texts, splits.train.labels, module, task.output_rows, run.seed, train.epochs
            )
        return PreparedTraining(module, texts, tokenizers, train, mesh, remote)

    def choose_timed_batch(self) -> tuple[int, int] | None:
        """Returns the rows and tokens of a micro-batch, if pipeline stages are cut by measured time."""
        config, layout = self.plan.settings, self.plan.layouts.student
        rows = max(1, config.train.rows // (layout.dp * MICRO_BATCHES))
        return (rows, config.data.max_length) if config.student.pipeline_split == "time" else None

    @cached_property
    def teacher_config(self) -> PretrainedConfig:
        """The config of the teacher."""
        return open_stage_checkpoint(self.teacher, "teacher").config

    def load_tokenizers(self, task: Task) -> Tokenizers:
        """Returns the tokenizers of student and teacher, configured for the task."""
        source = self.teacher.folder / MODEL
        teacher = student = load_student_tokenizer(self.pruned.folder if self.pruned is not None else source)
        if self.pruned is None and self.plan.student is not None:
            student = self.plan.student.load_tokenizer()
        task.configure_tokenizer(student, source)
        differ = is_cross_tokenizer(self.plan.settings, teacher, student)
        if not differ:  # the signals are of texts truncated at this length
            student.model_max_length = load_student_tokenizer(source).model_max_length
        return Tokenizers(student, teacher, differ)

    def build_student(self, splits: Splits, task: Task, tokenizers: Tokenizers) -> PreTrainedModel:
        """Returns the student before training, and prints its size."""
        run, plan = self.run, self.plan
        teacher = load_teacher(self.teacher.folder / MODEL)
        if self.pruned is not None:
            student = self.pruned.build_student()
        elif self.general is not None:
            texts = build_labelled_texts(run, plan.settings, splits, tokenizers.student, SplitEncoder(run, task))
            student = attach_head(run, self.general.folder / MODEL, task, texts)
        else:
            pair = getattr(splits.train, "pairs", None) is not None
            student = make_student(
                plan, teacher, tokenizers.teacher, task, run.seed, own_tokenizer=tokenizers.differ, pair=pair
            )
        if plan.settings.on_policy.share:
            student.generation_config.eos_token_id = find_end_tokens(student, tokenizers.student) or None
        run.console.say(f"  student: {describe_size(student)}, teacher: {describe_size(teacher)}")
        return student

    def connect_teacher(self) -> tuple[RemoteTeacher | None, SignalSource | None]:
        """Returns the teacher on its own processes and the one on these, which is queried in each step; None if unused.

        Both are None if the signals are cached, or if no loss term needs the teacher.
        """
        plan, source = self.plan, self.teacher.folder / MODEL
        config = plan.settings
        if not config.loss.needs_teacher:
            return None, None
        if config.teacher.processes:
            return call_teacher(self.run.world, source), None
        return None, load_configured_teacher(plan, source, self.precision) if self.cache is None else None

    def build_module(
        self,
        student: PreTrainedModel,
        task: Task,
        tokenizers: Tokenizers,
        train: TrainConfig,
        online: SignalSource | None,
        mesh: DeviceMesh | None,
    ) -> DistillationModule:
        """Returns the Lightning module; a teacher with another tokenizer is queried by the cross-tokenizer term."""
        config, layout = self.plan.settings, self.plan.layouts.student
        cross_tokenizer = None
        if online is not None and tokenizers.differ:
            cross_tokenizer = CrossTokenizerKL.from_tokenizers(
                online, config.cross_tokenizer, tokenizers.student, tokenizers.teacher
            )
        on_policy = None
        if config.on_policy.share:
            on_policy = OnPolicy(config.on_policy, self.run.seed, self.teacher_config)
        return self.create_module(
            student,
            loss=config.loss,
            train=train,
            metric=task.scorer(),
            output_rows=task.output_rows,
            teacher_sizes=read_layer_sizes(self.teacher_config),
            shard_optimizer=layout.zero == 1,
            stages=build_pipeline_trainer(student, layout, mesh),
            signals=online if cross_tokenizer is None else None,
            cross_tokenizer=cross_tokenizer,
            on_policy=on_policy,
        )

    def create_module(self, student: PreTrainedModel, **settings: Any) -> DistillationModule:
        """Returns the module that trains the student."""
        return DistillationModule(student, **settings)

    def build_texts(
        self, splits: Splits, task: Task, tokenizers: Tokenizers, remote: RemoteTeacher | None
    ) -> TextDataModule:
        """Returns the texts with the teacher's signals, and prints what was counted while they were encoded."""
        signals: Signals | None = remote
        if self.cache is not None:
            signals = open_cached_signals(self.cache, self.pruned)
        teacher_tokenizer = tokenizers.teacher if tokenizers.differ else None
        texts = build_training_texts(
            self.run,
            self.plan.settings,
            splits,
            tokenizers.student,
            signals,
            SplitEncoder(self.run, task),
            teacher_tokenizer,
        )
        for part, notes in texts.notes.items():
            self.run.console.say(f"  {part}: " + ", ".join(f"{count:,} {what}" for what, count in notes.items()))
        return texts

    def fit(self, prepared: PreparedTraining, folder: Path) -> Metrics:
        """Trains the student and returns its validation metrics."""
        config = self.plan.settings
        job = TrainingJob.from_run(
            self.run,
            label=STUDENT_TRAINING,
            train=prepared.train,
            machine=config.machine,
            precision=self.precision,
            layout=self.plan.layouts.student,
            mesh=prepared.mesh,
        )
        callbacks = [SparsityCallback(config.sparsity)] if config.sparsity.requested else []
        return fit_module(prepared.module, prepared.texts, folder, job, callbacks)


def make_student(
    plan: RunPlan,
    teacher: PreTrainedModel,
    teacher_tokenizer: PreTrainedTokenizerBase,
    task: Task,
    seed: int,
    *,
    own_tokenizer: bool = False,
    pair: bool = False,
) -> PreTrainedModel:
    """Returns the student before training: built from the teacher, or a checkpoint; `pair`: rows have two texts.

    Raises:
        InputError: The checkpoint was trained for another task, or its tokenizer differs from the teacher's and
            `own_tokenizer` isn't set.
    """
    if plan.student is None:
        return build_student(teacher, plan.settings.student.spec, seed, tokenizer=teacher_tokenizer, pair=pair)
    if not own_tokenizer:
        check_same_tokenizer(teacher_tokenizer, plan.student.load_tokenizer(), plan.student.name)
    task.check(plan.student.config, plan.student.name)
    return task.load_to_train(plan.student.folder, plan.student.config, seed)


def describe_size(model: PreTrainedModel) -> str:
    """Returns a model's layers, width, heads and number of parameters as text."""
    config = model.config
    heads = f"{config.num_attention_heads} heads" if config.num_attention_heads else "no attention"
    layers = f"{config.num_hidden_layers} layers x {config.hidden_size}, {heads}"
    return f"{layers}, {model.num_parameters() / 1e6:.1f}M parameters"
