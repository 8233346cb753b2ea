"""The teacher stage: a checkpoint whose head matches the data's labels, fine-tuned first if necessary."""

from dataclasses import asdict
from pathlib import Path

import lightning
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.export.common.huggingface import export_huggingface
from distill.checkpoint.checkpoint import Checkpoint, open_checkpoint
from distill.checkpoint.sentence_folder import describe_vectors
from distill.data.batches.data_module import TextDataModule
from distill.data.splits.examples import Splits
from distill.errors import InputError
from distill.losses.config import LossConfig
from distill.parallel.layout import Layout
from distill.tasks.sentence_embedding import SentenceEmbedding
from distill.tasks.task import Task
from distill.tasks.token_classification import TokenClassification
from distill.train.batch_growth import NOISE, NOISE_VERSION
from distill.train.config import VERSION as TRAINING
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from pipelines.runs.manifest import SCRATCH, JsonObject
from pipelines.runs.placement import build_pipeline_trainer, build_placed_model, save_model
from pipelines.runs.stage import Artefact, Run
from pipelines.runs.strategies.by_layout import choose_device
from pipelines.runs.trainer import fit_module
from pipelines.runs.trainer_state import Metrics
from pipelines.runs.training_job import TrainingJob
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.plan import RunPlan
from pipelines.stages.prepare.data import read_data, read_task
from pipelines.stages.prepare.new_head import fit_new_head
from pipelines.stages.prepare.tokens import SplitEncoder
from pipelines.stages.prepare.training_dynamics import record_dynamics

VERSION = 4  # of this stage's algorithm; bump it when the same inputs give a different result (docs/stages.md)
MODEL = "model"


def teacher_stage(
    run: Run, plan: RunPlan, checkpoint: Checkpoint, data: Artefact, precision: str, *, name: str = "teacher"
) -> Artefact:
    """Writes `model/`: a teacher as a checkpoint with the data's labels in their order."""
    config, source, layout = plan.settings, checkpoint.folder, plan.layouts.finetuning
    settings: JsonObject = {"finetune": config.teacher.finetune} | finetuning_settings(config, precision)
    is_recorded = config.select.needs_dynamics and name == "teacher"
    settings |= {"dynamics": True} if is_recorded else {}

    def work(folder: Path) -> JsonObject:
        splits, tokenizer, task = read_data(data), checkpoint.load_tokenizer(), read_task(data)
        task.configure_tokenizer(tokenizer, source)
        rows = find_usable_head(run, config, checkpoint, task)
        if rows is not None:
            if is_recorded:
                raise InputError(
                    f"data.select {config.select.method}: expected a teacher that is trained in this run, found one "
                    f"with a head for these labels, {source}: there is no record of its training; add "
                    "--teacher.finetune always, or select by entropy, margin or loss"
                )
            if run.world.is_rank_zero:
                export_huggingface(task.load_with_head(str(source), rows), tokenizer, folder / MODEL)
            return {"trained": False}
        texts = build_teacher_texts(run, config, splits, tokenizer, task)
        model, mesh = build_placed_model(
            run,
            layout,
            folder,
            lambda: build_untrained_teacher(run, config, source, task, texts, folder),
            task.auto,
            precision=precision,
            offload=config.teacher.offload,
            prefetch=config.machine.prefetch,
        )
        metrics = finetune_teacher(
            run, config, model, task, texts, folder, precision, layout, mesh, is_recorded=is_recorded
        )
        save_model(model, tokenizer, folder / MODEL, run.world)
        return {"trained": True, "wait_share": texts.wait_share} | metrics

    return run.stage(
        name, settings, {"data": data, "teacher": run.digest(checkpoint)}, work, version=VERSION, together=True
    )


def open_stage_checkpoint(stage: Artefact, role: str) -> Checkpoint:
    """Opens the model that a stage wrote."""
    return open_checkpoint(str(stage.folder / MODEL), role)


def load_stage_teacher(run: Run, plan: RunPlan, stage: Artefact, task: Task) -> PreTrainedModel:
    """Returns the stage's model in eval mode, on the run's device."""
    model: PreTrainedModel = task.load(str(stage.folder / MODEL), run.seed)
    model.to(choose_device(plan.settings.machine.accelerator))  # type: ignore[arg-type]
    model.eval()
    return model


def build_teacher_texts(
    run: Run, config: DistillConfig, splits: Splits, tokenizer: PreTrainedTokenizerBase, task: Task
) -> TextDataModule:
    """Returns the labelled texts that a teacher is trained on."""
    encoder = SplitEncoder(run, task)
    return TextDataModule(
        splits,
        tokenizer,
        encode=encoder.encode,
        encode_train=encoder.encode_train,
        batch_size=config.teacher_train.rows,
        batch_tokens=config.teacher_train.batch_tokens,
        max_length=config.data.max_length,
        seed=run.seed,
        unlabelled=False,
    )


def build_untrained_teacher(
    run: Run, config: DistillConfig, source: Path, task: Task, data: TextDataModule, folder: Path
) -> PreTrainedModel:
    """Returns the checkpoint's body with a new head, fitted to the body's features if `teacher.probe` is set."""
    model = task.load(str(source), run.seed)
    if config.teacher.probe and task.labels and not list((folder / SCRATCH).glob("checkpoints/*.ckpt")):
        fit_new_head(run.console, "teacher", model, task, data)
    return model


def finetuning_settings(config: DistillConfig, precision: str) -> JsonObject:
    """Returns the settings that determine a teacher that is trained on the data."""
    return {
        "probe": config.teacher.probe,
        "train": training_settings(config, "teacher_train"),
        "precision": precision,
        "max_length": config.data.max_length,
    }


_WITHOUT_EFFECT = ("checkpoint_every", "checkpointing", "offload")  # on the trained weights


def training_settings(config: DistillConfig, name: str) -> JsonObject:
    """Returns the settings that determine the trained weights; the layout doesn't affect them."""
    train: TrainConfig = getattr(config, name)
    settings = select_key_settings(train) | {"compress": config.machine.gradient_compression}
    uses_scores = train.patience or train.schedule == "plateau"
    return settings | ({"validation": "spans"} if uses_scores and config.task == TokenClassification.name else {})


def select_key_settings(train: TrainConfig) -> JsonObject:
    """Returns the training settings that affect the trained weights, together with the algorithm's version."""
    # Keys of older runs lack these.
    off = [name for name in ("backward_window", "ema_decay") if not getattr(train, name)]
    settings = {name: value for name, value in asdict(train).items() if name not in (*_WITHOUT_EFFECT, *off)}
    settings |= {"noise": NOISE_VERSION} if train.batch_growth == NOISE else {}
    return settings | {"version": TRAINING}


def find_usable_head(run: Run, config: DistillConfig, checkpoint: Checkpoint, task: Task) -> list[int] | None:
    """Returns the head's row for each label, or None if the teacher has to be fine-tuned; prints the decision and why.

    Raises:
        InputError: The checkpoint's head lacks the data's labels or its weights, and `teacher.finetune` is `never`.
    """
    source = checkpoint.folder
    task.check(checkpoint.config, str(source))
    rows, missing = task.find_head(source, checkpoint.config)
    reason = missing or "it has no head for these labels"
    if config.teacher.finetune == "never" and rows is None:
        raise InputError(
            f"teacher {str(source)!r}: expected {task.describe_head()}, found none"
            f"{f': {missing}' if missing else ''}; and --teacher.finetune never rules out training one"
        )
    if rows is None or config.teacher.finetune == "always":
        reason = reason if rows is None else "teacher.finetune is always; it has a head for these labels"
        run.console.say(f"  teacher: will be fine-tuned first ({reason}): {source}")
        return None
    order = "in another order, matched by name" if rows != list(range(len(rows))) else "in the same order"
    description = f"its head has these {len(rows)} labels, {order}" if rows else f"its head is for {task.name}"
    if isinstance(task, SentenceEmbedding):
        description = describe_vectors(source)
    run.console.say(f"  teacher: {description}: it is used unchanged")
    return rows


def finetune_teacher(
    run: Run,
    config: DistillConfig,
    model: PreTrainedModel,
    task: Task,
    data: TextDataModule,
    folder: Path,
    precision: str,
    layout: Layout,
    mesh: DeviceMesh | None,
    *,
    is_recorded: bool = False,
) -> Metrics:
    """Fine-tunes the teacher on the data's labels and returns its validation metrics.

    If `is_recorded`, its answers after every epoch are written too, see `record_dynamics`.
    """
    train = config.teacher_train
    lightning.seed_everything(run.seed, verbose=False)
    module = DistillationModule(
        model,
        loss=LossConfig(kl=0, ce=1),
        train=train,
        metric=task.scorer(),
        output_rows=task.output_rows,
        shard_optimizer=layout.zero == 1,
        stages=build_pipeline_trainer(model, layout, mesh),
    )
    finish = record_dynamics(data, module, folder) if is_recorded else None
    job = TrainingJob.from_run(
        run,
        label="teacher: fine-tuning",
        train=train,
        machine=config.machine,
        precision=precision,
        layout=layout,
        mesh=mesh,
    )
    metrics = fit_module(module, data, folder, job)
    if finish is not None:
        finish()
    return metrics
