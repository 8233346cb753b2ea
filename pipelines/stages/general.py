"""The general stage: task-agnostic distillation on plain text from the teacher as it was published."""

from pathlib import Path
from typing import Any

import lightning
import numpy as np
import transformers
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from distill.checkpoint.folder import checkpoint_folder
from distill.checkpoint.tokenizer import load_tokenizer
from distill.checkpoint.weights import load_model
from distill.data.batches.batches import EvalBatches, Rows
from distill.data.batches.data_module import RowsDataModule, TextDataModule
from distill.data.batches.token_blocks import LanguageBlocks, token_blocks
from distill.data.config import DataConfig
from distill.data.masking.masks import MaskedBlocks
from distill.data.sources.text_files import read_texts, split_names
from distill.errors import InputError
from distill.student.build import build_student
from distill.student.spec import is_relative
from distill.tasks.task import Task, output_layer
from distill.teacher.fingerprint import check_same_tokenizer, frozen
from distill.teacher.head import probe_head
from distill.teacher.online import OnlineTeacher
from distill.train.module import DistillationModule, sizes_of
from distill.train.steps.progressive import LayerByLayer
from pipelines.runs.placement import build_placed_model, save_model
from pipelines.runs.stage import Artefact, Run, content_hash
from pipelines.runs.strategies import device_of
from pipelines.runs.trainer import fit
from pipelines.settings.distill_config import DistillConfig, GeneralConfig
from pipelines.settings.layouts import Layouts
from pipelines.stages.cached_signals import task_of
from pipelines.stages.data import say_reading, source_hash
from pipelines.stages.teacher import MODEL, deciding
from pipelines.stages.vocabulary import tokenizer_of

VERSION = 1  # of this stage's algorithm; bump it when the same inputs give a different result (docs/stages.md)
HELD_OUT = 256  # maximum number of validation blocks; of a small data set one block in eleven
DRAW = 7  # random stream for the order of the texts
WORDS, FEATURES = "AutoModelForMaskedLM", "AutoModel"


def general_stage(
    run: Run, config: DistillConfig, source: Path, digest: str, precision: str, layouts: Layouts
) -> Artefact:
    """Writes `model/`: the student's body, with a masked-language-modelling head if kl or ce trained one."""
    general = config.general
    settings = {
        "student": config.student.spec,
        "loss": vars(general.loss),
        "train": deciding(general.train) | {"compress": config.machine.compress},
        "masking": vars(general.masking) if general.loss.reads_logits else {},
        "progressive": general.progressive,
        "text": general.text,
        "length": general.length,
        "blocks": general.blocks,
        "precision": precision,
    }
    place, data = Path(general.data).expanduser(), DataConfig(path=general.data)
    inputs = {"data": content_hash(place) if place.exists() else source_hash(data), "teacher": digest}
    say_reading(run.console, data)
    if not is_relative(config.student.spec):
        inputs["student"] = content_hash(checkpoint_folder(config.student.spec, "student"))

    def work(folder: Path) -> dict[str, Any]:
        tokenizer = load_tokenizer(source)
        teacher = frozen(load_body(source, general))
        layout = layouts.student
        auto = getattr(transformers, head_of(general))

        def build() -> PreTrainedModel:
            return start_of(config.student.spec, teacher, tokenizer, general, run.seed)

        student, mesh = build_placed_model(run, layout, folder, build, auto, prefetch=config.machine.prefetch)
        run.console.say(f"  general: {type(student).__name__}, {student.num_parameters() / 1e6:.1f}M parameters")
        train, held_out = blocks_of(general, tokenizer, run.seed)
        run.console.say(f"  general: {len(train):,} blocks of up to {general.length} tokens, {len(held_out)} held out")
        device = device_of("auto")
        asked = OnlineTeacher(teacher.to(device), general.loss.teacher_answers, device=device)  # type: ignore[arg-type]
        lightning.seed_everything(run.seed, verbose=False)
        module = DistillationModule(
            student,
            loss=general.loss,
            train=general.train,
            signals=asked,
            teacher_sizes=sizes_of(teacher.config),
            shard_optimizer=layout.zero == 1,
        )
        pad_id = int(tokenizer.pad_token_id or 0)
        rows = RowsDataModule(train, held_out, pad_id=pad_id, batch_size=general.train.batch_size, seed=run.seed)
        metrics = fit(
            module,
            rows,
            folder,
            label="general: distilling on plain text",
            train=general.train,
            machine=config.machine,
            layout=layout,
            mesh=mesh,
            world=run.world,
            precision=precision,
            seed=run.seed,
            console=run.console,
            wandb_folder=run.output / "wandb",
            callbacks=[LayerByLayer(general.progressive)] if general.progressive else [],
        )
        save_model(student, tokenizer, folder / MODEL)
        return metrics | {"blocks": len(train), "params": student.num_parameters()}

    return run.stage("general", settings, inputs, work, version=VERSION, together=True)


def check_general(config: DistillConfig, source: Path) -> None:
    """Checks the settings of general distillation.

    Raises:
        InputError: The text doesn't exist, or the teacher lacks the head that the loss terms require.
    """
    general = config.general
    place = Path(general.data).expanduser()
    if not place.exists():
        raise InputError(f"general.data {general.data!r}: expected a file or a folder with text, found nothing there")
    if general.loss.reads_logits:
        own = AutoConfig.from_pretrained(source)
        if task_of(own, config.teacher.model) != "masked-lm":
            raise InputError(
                f"general.loss: kl and ce read the words behind masks, so expected a teacher with a masked-language "
                f"head, found {', '.join(own.architectures or ['none'])}; use hidden, attention or relations"
            )


def head_of(general: GeneralConfig) -> str:
    return WORDS if general.loss.reads_logits else FEATURES


def load_body(folder: Path, general: GeneralConfig) -> PreTrainedModel:
    auto = head_of(general)
    return load_model(getattr(transformers, auto), folder, new_head=auto == FEATURES)


def start_of(
    spec: str, teacher: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, general: GeneralConfig, seed: int
) -> PreTrainedModel:
    """Returns the student before general distillation, built from the teacher or loaded from a checkpoint."""
    if is_relative(spec):
        return build_student(teacher, spec, seed)
    folder = checkpoint_folder(spec, "student")
    check_same_tokenizer(tokenizer, tokenizer_of(folder, "student"), spec)
    return load_body(folder, general)


def blocks_of(general: GeneralConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> tuple[Rows, Rows]:
    """Returns training and held-out blocks of tokens.

    Held-out blocks come from the validation split if there is one, otherwise from the end of the shuffled texts.

    Raises:
        InputError: The text doesn't fill more than one block.
    """
    texts = read_texts(general.data, general.text)
    drawn = [texts[i] for i in np.random.default_rng([seed, DRAW]).permutation(len(texts))]
    if "validation" in split_names(general.data):
        others = read_texts(general.data, general.text, split="validation")
        apart = token_blocks(tokenizer, others, general.length, limit=HELD_OUT)
        blocks = token_blocks(tokenizer, drawn, general.length, limit=general.blocks)
    else:
        count = min(HELD_OUT, max(1, general.blocks // 10))
        blocks = token_blocks(tokenizer, drawn, general.length, limit=general.blocks and general.blocks + count)
        count = min(HELD_OUT, max(1, len(blocks) // 11))
        blocks, apart = blocks[:-count], blocks[-count:]
    if not blocks:
        raise InputError(f"general.data {general.data!r}: expected more than one block of {general.length} tokens")
    rows = [LanguageBlocks(each) for each in (blocks, apart)]
    if general.loss.reads_logits:
        return tuple(MaskedBlocks.of(each, general.masking, tokenizer) for each in rows)  # type: ignore[return-value]
    return rows[0], rows[1]


def with_head(run: Run, folder: Path, task: Task, texts: TextDataModule) -> PreTrainedModel:
    """Returns a task model with the body of a generally distilled student.

    If the task has labels, the new head is fitted to them on the body's features.
    """
    student = task.load(str(folder), run.seed)
    if not task.labels:
        return student.requires_grad_(True)
    with run.console.track("student: fitting the new head", len(texts.train)) as advance:
        probe_head(student, output_layer(student), EvalBatches(texts.train, 32, texts.pad_id), task.answers, advance)
    return student.requires_grad_(True)
