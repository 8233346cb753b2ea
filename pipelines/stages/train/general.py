"""The general stage: task-agnostic distillation on plain text from the teacher as it was published."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

import lightning
import numpy as np
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from distill.checkpoint.auto_class import AutoClass
from distill.checkpoint.custom_models import register_custom_classes
from distill.checkpoint.weights import load_model
from distill.data.batches.batches import EncodedRows, EvalBatches
from distill.data.batches.data_module import RowsDataModule, TextDataModule
from distill.data.batches.packing import find_padding_id
from distill.data.batches.token_blocks import LanguageBlocks, token_blocks
from distill.data.config import DataConfig
from distill.data.masking.masks import MaskedBlocks
from distill.data.sources.text_batches import find_large_text, stream_texts
from distill.data.sources.text_files import read_texts, split_names
from distill.data.stored.rows import StreamBlocks
from distill.data.stored.tokens import StoredTokens
from distill.errors import InputError
from distill.student.bottleneck import VERSION as BOTTLENECK_VERSION
from distill.student.build import build_student
from distill.student.spec import is_bottleneck
from distill.tasks.task import Task, output_layer
from distill.teacher.fingerprint import check_same_tokenizer, freeze
from distill.teacher.head import probe_head
from distill.teacher.online import OnlineTeacher
from distill.train.module import DistillationModule
from distill.train.steps.progressive import LayerByLayer
from pipelines.runs.console import TEXTS
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
from pipelines.stages.prepare.teacher import MODEL, select_key_settings
from pipelines.stages.prepare.tokens import tokens_stage

VERSION = 4  # of this stage's algorithm; bump it when the same inputs give a different result (docs/stages.md)
HELD_OUT = 256  # maximum number of validation blocks; of a small data set one block in eleven
ORDER_STREAM = 7  # random stream for the order of the texts
_Blocks = TypeVar("_Blocks", list[np.ndarray], StreamBlocks)
MASKED_LM_CLASS, BODY_CLASS = "AutoModelForMaskedLM", "AutoModel"


def general_stage(run: Run, plan: RunPlan, precision: str) -> Artefact:
    """Writes `model/`: the student's body, with a masked-language-modelling head if kl or ce trained one."""
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
    settings |= {"bottleneck": BOTTLENECK_VERSION} if is_bottleneck(config.student.spec) else {}
    path, data = Path(general.data).expanduser(), DataConfig(path=general.data)
    digest = run.world.compute_once(
        lambda: hash_content(path, run.digests.hash_file) if path.exists() else hash_source(data)
    )
    inputs = {"data": digest, "teacher": run.digest(plan.teacher)}
    print_reading_remarks(run.console, data)
    if plan.student is not None:
        inputs["student"] = run.digest(plan.student)

    def work(folder: Path) -> JsonObject:
        tokenizer = plan.teacher.load_tokenizer()
        teacher = freeze(load_body(plan.teacher.folder, general))
        layout = plan.layouts.student
        auto = find_auto_class(general)

        def build() -> PreTrainedModel:
            return make_general_student(plan, teacher, tokenizer, run.seed)

        student, mesh = build_placed_model(
            run, layout, folder, build, auto, precision=precision, prefetch=config.machine.prefetch
        )
        run.console.say(f"  general: {type(student).__name__}, {student.num_parameters() / 1e6:.1f}M parameters")
        if tokenizer.is_fast and find_large_text(general.data) is not None:
            train, held_out = store_blocks(run, general, tokenizer, digest)
        else:
            train, held_out = read_blocks(general, tokenizer, run.seed)
        run.console.say(f"  general: {len(train):,} blocks of up to {general.length} tokens, {len(held_out)} held out")
        device = choose_device(config.machine.accelerator)
        online = OnlineTeacher(teacher.to(device), general.loss.teacher_outputs, device=device)  # type: ignore[arg-type]
        lightning.seed_everything(run.seed, verbose=False)
        module = DistillationModule(
            student,
            loss=general.loss,
            train=general.train,
            signals=online,
            teacher_sizes=plan.teacher_sizes,
            shard_optimizer=layout.zero == 1,
        )
        pad_id = find_padding_id(tokenizer)
        rows = RowsDataModule(
            train,
            held_out,
            pad_id=pad_id,
            batch_size=general.train.rows,
            batch_tokens=general.train.batch_tokens,
            seed=run.seed,
        )
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
        metrics = fit_module(module, rows, folder, job, callbacks)
        save_model(student, tokenizer, folder / MODEL, run.world)
        return metrics | {"wait_share": rows.wait_share, "blocks": len(train), "params": student.num_parameters()}

    return run.stage("general", settings, inputs, work, version=VERSION, together=True)


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


def read_blocks(
    general: GeneralConfig, tokenizer: PreTrainedTokenizerBase, seed: int
) -> tuple[EncodedRows, EncodedRows]:
    """Returns training and held-out blocks of tokens.

    Held-out blocks come from the validation split if there is one, otherwise from the end of the shuffled texts.

    Raises:
        InputError: The text doesn't fill more than one block.
    """
    texts = read_texts(general.data, general.text)
    shuffled = [texts[i] for i in np.random.default_rng([seed, ORDER_STREAM]).permutation(len(texts))]
    if "validation" in split_names(general.data):
        validation = read_texts(general.data, general.text, split="validation")
        held_out = token_blocks(tokenizer, validation, general.length, limit=HELD_OUT)
        blocks = token_blocks(tokenizer, shuffled, general.length, limit=general.blocks)
    else:
        limit = limit_with_held_out(general)
        blocks, held_out = hold_out_end(token_blocks(tokenizer, shuffled, general.length, limit=limit))
    return build_rows(general, tokenizer, blocks, held_out)


def store_blocks(
    run: Run, general: GeneralConfig, tokenizer: PreTrainedTokenizerBase, digest: str
) -> tuple[EncodedRows, EncodedRows]:
    """Returns the blocks of `read_blocks` for text that is larger than memory: read from the `tokens` stage.

    All of the training text is tokenized, also for a few blocks of it.

    Raises:
        InputError: As in `read_blocks`.
    """

    def tokenize(split: str) -> StoredTokens:
        large = find_large_text(general.data, split)
        texts = partial(stream_texts, general.data, general.text, split=split)
        count = 0 if large is None else large.count_rows()
        return tokens_stage(run, tokenizer, f"{digest}, {split}, column {general.text}", texts, count)

    tokens = tokenize("train")
    order = np.random.default_rng([run.seed, ORDER_STREAM]).permutation(len(tokens))
    held_out: Sequence[np.ndarray]
    if "validation" in split_names(general.data):
        held_out = StreamBlocks.build(tokenize("validation"), tokenizer, general.length, limit=HELD_OUT)
        blocks = StreamBlocks.build(tokens, tokenizer, general.length, order=order, limit=general.blocks)
    else:
        limit = limit_with_held_out(general)
        blocks, held_out = hold_out_end(StreamBlocks.build(tokens, tokenizer, general.length, order=order, limit=limit))
    return build_rows(general, tokenizer, blocks, held_out)


def limit_with_held_out(general: GeneralConfig) -> int:
    """Returns the maximum number of blocks including those held out; 0 for all."""
    return general.blocks and general.blocks + min(HELD_OUT, max(1, general.blocks // 10))


def hold_out_end(blocks: _Blocks) -> tuple[_Blocks, _Blocks]:
    """Returns (the first blocks, the last ones): one block in eleven, at most HELD_OUT."""
    count = min(HELD_OUT, max(1, len(blocks) // 11))
    return blocks[:-count], blocks[-count:]


def build_rows(
    general: GeneralConfig,
    tokenizer: PreTrainedTokenizerBase,
    blocks: Sequence[np.ndarray],
    held_out: Sequence[np.ndarray],
) -> tuple[EncodedRows, EncodedRows]:
    """Returns the training and the held-out blocks in the form that the loss terms need.

    Raises:
        InputError: There are no blocks to train on.
    """
    if not len(blocks):
        raise InputError(
            f"general.data {general.data!r}: expected more than one block of {general.length} tokens, found fewer"
        )
    rows = [LanguageBlocks(each) for each in (blocks, held_out)]
    if general.loss.uses_outputs:
        return tuple(MaskedBlocks.build(each, general.masking, tokenizer) for each in rows)  # type: ignore[return-value]
    return rows[0], rows[1]


def attach_head(run: Run, folder: Path, task: Task, texts: TextDataModule) -> PreTrainedModel:
    """Returns a task model with the body of a generally distilled student.

    If the task has labels, the new head is fitted to them on the body's features.
    """
    register_custom_classes(folder)
    student = task.load(str(folder), run.seed)
    if not task.labels:
        return student.requires_grad_(True)
    with run.console.track("student: fitting the new head", len(texts.train), TEXTS) as advance:
        probe_head(
            student, output_layer(student), EvalBatches(texts.train, 32, texts.pad_id), task.output_rows, advance
        )
    return student.requires_grad_(True)
