"""The teacher stage: a model whose logits are this data's labels, trained first where it has to be."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from compress.export.huggingface import export_huggingface
from distill.data.batches import EvalBatches
from distill.data.module import TextDataModule
from distill.data.splits import Splits
from distill.errors import InputError
from distill.losses.config import LossConfig
from distill.module import DistillationModule
from distill.tasks.text_classification import TextClassification, check_task, output_layer
from distill.teacher.head import probe_head
from distill.teacher.load import load_tokenizer
from pipelines.config import DistillConfig
from pipelines.data import read_data
from pipelines.stage import SCRATCH, Artefact, Run
from pipelines.trainer import fit

MODEL = "model"


def teacher_stage(
    run: Run, config: DistillConfig, source: Path, digest: str, data: Artefact, precision: str
) -> Artefact:
    """Writes `model/`: the teacher as a checkpoint with the data's labels, in their order."""
    settings = {
        "finetune": config.teacher.finetune,
        "probe": config.teacher.probe,
        "train": training_settings(config, "teacher_train"),
        "precision": precision,
        "max_length": config.data.max_length,
    }

    def work(folder: Path) -> dict[str, Any]:
        splits, tokenizer = read_data(data), load_tokenizer(source)
        task = TextClassification(splits.labels)
        rows = usable_head(run, config, source, task)
        if rows is not None:
            model, metrics = task.load_headed(str(source), rows), {"trained": False}
        else:
            model = task.load(str(source), run.seed)
            metrics = {"trained": True} | finetune(run, config, model, task, tokenizer, splits, folder, precision)
        export_huggingface(model, tokenizer, folder / MODEL)
        return metrics

    return run.stage("teacher", settings, {"data": data, "teacher": digest}, work)


def training_settings(config: DistillConfig, name: str) -> dict[str, Any]:
    """What decides the weights of a training; how often it is checkpointed doesn't."""
    settings = {k: v for k, v in asdict(getattr(config, name)).items() if k != "checkpoint_every"}
    return settings | {"devices": config.machine.devices, "strategy": config.machine.strategy}


def usable_head(run: Run, config: DistillConfig, source: Path, task: TextClassification) -> list[int] | None:
    """Rows of the checkpoint's head for our labels, or None when the teacher has to be trained; says which and why."""
    own = AutoConfig.from_pretrained(source)
    check_task(own, str(source))
    rows = task.head_rows(own)
    if config.teacher.finetune == "never" and rows is None:
        raise InputError(
            f"teacher {config.teacher.model!r}: has no head for this data's {len(task.labels)} labels "
            f"({', '.join(task.labels[:4])}, …), and --teacher.finetune is never"
        )
    if rows is None or config.teacher.finetune == "always":
        why = "no head for these labels in it" if rows is None else "asked for, though it has a head for these labels"
        run.console.say(f"  teacher: fine-tuned first ({why}): {source}")
        return None
    moved = "in another order, matched by name" if rows != list(range(len(rows))) else "in the same order"
    run.console.say(f"  teacher: its head has these {len(rows)} labels, {moved}: it is used as it is")
    return rows


def finetune(
    run: Run,
    config: DistillConfig,
    model: Any,
    task: TextClassification,
    tokenizer: PreTrainedTokenizerBase,
    splits: Splits,
    folder: Path,
    precision: str,
) -> dict[str, Any]:
    train = config.teacher_train
    lightning.seed_everything(run.seed, verbose=False)
    data = TextDataModule(
        splits,
        tokenizer,
        batch_size=train.batch_size,
        max_length=config.data.max_length,
        seed=run.seed,
        unlabelled=False,
    )
    if config.teacher.probe and not list((folder / SCRATCH).glob("checkpoints/*.ckpt")):
        with run.console.track("teacher: fitting the new head", len(data.train)) as advance:
            probe_head(model, output_layer(model), EvalBatches(data.train, 32, data.pad_id), advance)
    module = DistillationModule(model, loss=LossConfig(kl=0, ce=1), train=train, metric=task.metric())
    return fit(
        module,
        data,
        folder,
        label="teacher: fine-tuning",
        train=train,
        machine=config.machine,
        precision=precision,
        seed=run.seed,
        console=run.console,
        wandb_folder=run.output / "wandb",
    )


def load_source(source: Path) -> PreTrainedModel:
    """The checkpoint as it came, with any head, to be timed."""
    return AutoModelForSequenceClassification.from_pretrained(source, use_safetensors=True)
