"""The distil stage: a student built or loaded, and trained on the teacher's signals."""

from pathlib import Path
from typing import Any

import lightning
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from distill.data.module import TextDataModule
from distill.module import DistillationModule
from distill.student.build import build_student
from distill.student.spec import is_relative
from distill.tasks.text_classification import TextClassification, check_task
from distill.teacher.cache import CacheReader
from distill.teacher.load import check_same_tokenizer, checkpoint_folder, load_tokenizer
from pipelines.cache_stage import CACHE
from pipelines.caching import load_teacher
from pipelines.config import DistillConfig
from pipelines.data import read_data
from pipelines.layouts import Layouts
from pipelines.placing import placed, save_model, stages_of
from pipelines.stage import Artefact, Run, content_hash
from pipelines.teacher import AUTO, MODEL, training_settings
from pipelines.teaching import asked_as, call_teacher
from pipelines.trainer import fit


def student_stage(
    run: Run,
    config: DistillConfig,
    data: Artefact,
    teacher: Artefact,
    cache: Artefact | None,
    precision: str,
    layouts: Layouts,
) -> Artefact:
    """Writes `model/`: the trained student. It reads the teacher's signals from the cache, ahead of each step, or asks
    the teacher in each step where there is no cache.
    """
    layout = layouts.student
    settings = {
        "student": config.student.spec,
        "loss": vars(config.loss),
        "train": training_settings(config, "train"),
        "precision": precision,
        "max_length": config.data.max_length,
        "signals": config.teacher.signals,
    }
    inputs: dict[str, Artefact | str] = {"data": data, "teacher": teacher}
    if cache is not None:
        inputs["cache"] = cache
    if not is_relative(config.student.spec):
        inputs["student"] = content_hash(checkpoint_folder(config.student.spec, "student"))

    def work(folder: Path) -> dict[str, Any]:
        source, splits = teacher.folder / MODEL, read_data(data)
        tokenizer, sizes_of_teacher = load_tokenizer(source), AutoConfig.from_pretrained(source)
        task = TextClassification(splits.labels)

        def build() -> PreTrainedModel:
            model = load_teacher(source)
            student = make_student(config.student.spec, model, tokenizer, task, run.seed)
            run.console.say(f"  student: {sizes(student)}, teacher: {sizes(model)}")
            return student

        student, mesh = placed(
            run, layout, folder, build, AUTO, offload=config.student.offload, prefetch=config.machine.prefetch
        )
        remote = call_teacher(run.world, source) if config.teacher.ranks and config.loss.needs_teacher else None
        in_step = config.loss.needs_teacher and cache is None and remote is None
        lightning.seed_everything(run.seed, verbose=False)
        module = DistillationModule(
            student,
            loss=config.loss,
            train=config.train,
            metric=task.metric(),
            teacher_sizes=(sizes_of_teacher.num_hidden_layers, sizes_of_teacher.hidden_size),
            shard_optimizer=layout.zero == 1,
            stages=stages_of(student, layout, mesh),
            signals=asked_as(config, source, layouts.teacher) if in_step else None,
        )
        training = TextDataModule(
            splits,
            tokenizer,
            batch_size=config.train.batch_size,
            max_length=config.data.max_length,
            seed=run.seed,
            unlabelled=config.loss.needs_teacher,
            signals=CacheReader(cache.folder / CACHE) if cache is not None else remote,
        )
        metrics = fit(
            module,
            training,
            folder,
            label="student: distilling",
            train=config.train,
            machine=config.machine,
            layout=layout,
            mesh=mesh,
            precision=precision,
            seed=run.seed,
            console=run.console,
            world=run.world,
            wandb_folder=run.output / "wandb",
        )
        if remote is not None:
            remote.finish()
        save_model(student, tokenizer, folder / MODEL)
        return metrics | {"params": student.num_parameters()}

    return run.stage("distill", settings, inputs, work, together=True)


def make_student(
    spec: str, teacher: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: TextClassification, seed: int
) -> PreTrainedModel:
    """The student a spec asks for: a part of the teacher, or a checkpoint that reads the same tokens."""
    if is_relative(spec):
        return build_student(teacher, spec)
    folder = checkpoint_folder(spec, "student")
    check_same_tokenizer(tokenizer, load_tokenizer(folder, "student"), spec)
    own = AutoConfig.from_pretrained(folder)
    check_task(own, spec)
    rows = task.head_rows(own)
    return task.load(str(folder), seed) if rows is None else task.load_headed(str(folder), rows)


def sizes(model: PreTrainedModel) -> str:
    own = model.config
    return (
        f"{own.num_hidden_layers} layers x {own.hidden_size}, {own.num_attention_heads} heads, "
        f"{model.num_parameters() / 1e6:.1f}M parameters"
    )
