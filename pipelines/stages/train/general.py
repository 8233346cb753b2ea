"""The general stage: task-agnostic distillation on plain text from the teacher as it was published."""

from pathlib import Path
from typing import cast

import lightning
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from distill.checkpoint.auto_class import AutoClass
from distill.checkpoint.custom_models import register_custom_classes
from distill.checkpoint.weights import load_model
from distill.data.batches.data_module import RowsDataModule, TextDataModule
from distill.data.batches.packing import find_padding_id
from distill.data.config import DataConfig
from distill.student.bottleneck import VERSION as BOTTLENECK_VERSION
from distill.student.build import build_student
from distill.student.spec import is_bottleneck
from distill.tasks.task import Task
from distill.teacher.fingerprint import check_same_tokenizer, freeze
from distill.teacher.online import OnlineTeacher
from distill.train.module import DistillationModule
from distill.train.steps.progressive import LayerByLayer
from pipelines.runs.files import hash_content
from pipelines.runs.manifest import JsonObject
from pipelines.runs.placement import build_placed_model, save_model
from pipelines.runs.stage import Artefact, Run
from pipelines.runs.strategies.by_layout import choose_device
from pipelines.runs.trainer import fit_module
from pipelines.runs.training_job import TrainingJob
from pipelines.settings.commands.distill import GeneralConfig
from pipelines.settings.plan import RunPlan
from pipelines.stages.prepare.data import hash_source, print_reading_remarks
from pipelines.stages.prepare.new_head import fit_new_head
from pipelines.stages.prepare.teacher import MODEL, select_key_settings
from pipelines.stages.train.text_blocks import load_blocks

VERSION = 4  # of this stage's algorithm; bump it when the same inputs give a different result (docs/stages.md)
MASKED_LM_CLASS, BODY_CLASS = "AutoModelForMaskedLM", "AutoModel"


def general_stage(run: Run, plan: RunPlan, precision: str) -> Artefact:
    """Writes `model/`: the student's body, with a masked-language-modelling head if kl or ce trained one."""
    general = plan.settings.general
    path, data = Path(general.data).expanduser(), DataConfig(path=general.data)
    digest = run.world.compute_once(
        lambda: hash_content(path, run.digests.hash_file) if path.exists() else hash_source(data)
    )
    inputs = {"data": digest, "teacher": run.digest(plan.teacher)}
    print_reading_remarks(run.console, data)
    if plan.student is not None:
        inputs["student"] = run.digest(plan.student)

    def work(folder: Path) -> JsonObject:
        return distill_generally(run, plan, precision, digest, folder)

    settings = describe_general_distillation(plan, precision)
    return run.stage("general", settings, inputs, work, version=VERSION, together=True)


def describe_general_distillation(plan: RunPlan, precision: str) -> JsonObject:
    """Returns the settings that determine the trained weights."""
    config, general = plan.settings, plan.settings.general
    settings = {
        "student": plan.student_key,
        "loss": vars(general.loss),
        "train": select_key_settings(general.train) | {"compress": config.machine.gradient_compression},
        "masking": vars(general.masking) if general.loss.uses_outputs else {},
        "progressive": general.progressive_share,
        "text": general.text,
        "length": general.length,
        "blocks": general.blocks,
        "precision": precision,
    }
    return settings | ({"bottleneck": BOTTLENECK_VERSION} if is_bottleneck(config.student.spec) else {})


def distill_generally(run: Run, plan: RunPlan, precision: str, digest: str, folder: Path) -> JsonObject:
    """Trains the student on blocks of the text with the hash `digest`, saves it, and returns its metrics."""
    config, general, layout = plan.settings, plan.settings.general, plan.layouts.student
    tokenizer = plan.teacher.load_tokenizer()
    teacher = freeze(load_body(plan.teacher.folder, general))
    student, mesh = build_placed_model(
        run,
        layout,
        folder,
        lambda: make_general_student(plan, teacher, tokenizer, run.seed),
        find_auto_class(general),
        precision=precision,
        prefetch=config.machine.prefetch,
    )
    run.console.say(f"  general: {type(student).__name__}, {student.num_parameters() / 1e6:.1f}M parameters")
    train, held_out = load_blocks(run, general, tokenizer, digest)
    run.console.say(f"  general: {len(train):,} blocks of up to {general.length} tokens, {len(held_out)} held out")
    rows = RowsDataModule(
        train,
        held_out,
        pad_id=find_padding_id(tokenizer),
        batch_size=general.train.rows,
        batch_tokens=general.train.batch_tokens,
        seed=run.seed,
    )
    lightning.seed_everything(run.seed, verbose=False)
    job = TrainingJob.from_run(
        run,
        label="general: distilling on plain text",
        train=general.train,
        machine=config.machine,
        precision=precision,
        layout=layout,
        mesh=mesh,
    )
    callbacks = [LayerByLayer(general.progressive_share)] if general.progressive_share else []
    metrics = fit_module(build_module(plan, teacher, student), rows, folder, job, callbacks)
    save_model(student, tokenizer, folder / MODEL, run.world)
    return metrics | {"wait_share": rows.wait_share, "blocks": len(train), "params": student.num_parameters()}


def build_module(plan: RunPlan, teacher: PreTrainedModel, student: PreTrainedModel) -> DistillationModule:
    """Returns the module that trains the student on the outputs of the teacher, which is queried in every step."""
    general, device = plan.settings.general, choose_device(plan.settings.machine.accelerator)
    teacher.to(device)  # type: ignore[arg-type]
    return DistillationModule(
        student,
        loss=general.loss,
        train=general.train,
        signals=OnlineTeacher(teacher, general.loss.teacher_outputs, device=device),
        teacher_sizes=plan.teacher_sizes,
        shard_optimizer=plan.layouts.student.zero == 1,
    )


def find_auto_class(general: GeneralConfig) -> AutoClass:
    """Returns the auto class of both models: with a masked-language-modelling head if a term uses its outputs."""
    name = MASKED_LM_CLASS if general.loss.uses_outputs else BODY_CLASS
    return cast(AutoClass, getattr(transformers, name))


def load_body(folder: Path, general: GeneralConfig) -> PreTrainedModel:
    """Loads a checkpoint with the head that the loss terms need, or without one."""
    model: PreTrainedModel = load_model(find_auto_class(general), folder, new_head=not general.loss.uses_outputs)
    return model


def make_general_student(
    plan: RunPlan, teacher: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seed: int
) -> PreTrainedModel:
    """Returns the student before general distillation, built from the teacher or loaded from a checkpoint."""
    if plan.student is None:
        return build_student(teacher, plan.settings.student.spec, seed)
    check_same_tokenizer(tokenizer, plan.student.load_tokenizer(), plan.student.name)
    return load_body(plan.student.folder, plan.settings.general)


def attach_head(run: Run, folder: Path, task: Task, texts: TextDataModule) -> PreTrainedModel:
    """Returns a task model with the body of a generally distilled student.

    If the task has labels, the new head is fitted to them on the body's features.
    """
    register_custom_classes(folder)
    student = task.load(str(folder), run.seed)
    if not task.labels:
        return student.requires_grad_(True)
    fit_new_head(run.console, "student", student, task, texts)
    return student.requires_grad_(True)
