"""The job of writing a cache: its teacher, samples and signals, prepared from the settings."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from distill.cache import Hidden, Identity, Samples
from distill.cache.samples import build_samples
from distill.checkpoint.checkpoint import Checkpoint, open_checkpoint
from distill.checkpoint.sentence_folder import read_form
from distill.checkpoint.sentence_form import SentenceForm, set_form
from distill.checkpoint.tokenizer import check_fast
from distill.data.batches.encode import encode_samples
from distill.data.batches.packing import find_padding_id
from distill.errors import InputError
from distill.parallel.layout import Layout
from distill.parallel.pipeline import PipelineForward
from distill.tasks.choose import TASKS
from distill.tasks.names import default_signal
from distill.tasks.positions import find_max_tokens, length_error
from distill.teacher.ensemble import register_ensemble
from distill.teacher.fingerprint import freeze, stored_fingerprint, tokenizer_fingerprint, weights_fingerprint
from distill.teacher.online import OnlineTeacher
from pipelines.runs.placement import load_in_layout
from pipelines.runs.processes import World, is_first_process
from pipelines.settings.commands.cache import CachedTask, WriteConfig
from pipelines.settings.lengths import fitted_length
from pipelines.settings.task_settings import task_arguments
from pipelines.settings.tokenizers import load_checked_tokenizer
from pipelines.stages.cache.signals import EMBEDDING, check_signal_name, find_cached_task, make_signal
from pipelines.stages.cache.writing import list_needed_outputs

if TYPE_CHECKING:
    from distill.checkpoint.auto_class import AutoClass


@dataclass(frozen=True)
class Job:
    """Everything that a cache is written with."""

    task: str
    model: PreTrainedModel
    teacher: OnlineTeacher | PipelineForward
    tokenizer: PreTrainedTokenizerBase
    samples: Samples
    identity: Identity
    note: str = ""


@dataclass(frozen=True)
class OpenedTeacher:
    """A teacher whose weights aren't loaded yet.

    Args:
        checkpoint: The checkpoint.
        tokenizer: The checkpoint's tokenizer.
        settings: The settings, with the task and the text length filled in.
        note: Note about that length for the user.
    """

    checkpoint: Checkpoint
    tokenizer: PreTrainedTokenizerBase
    settings: WriteConfig
    note: str


def open_teacher(config: WriteConfig) -> OpenedTeacher:
    """Checks the teacher's checkpoint and completes the settings.

    Raises:
        InputError: The checkpoint is incomplete or of another task, or texts are longer than the model's positions.
    """
    register_ensemble()
    checkpoint = open_checkpoint(config.teacher, "teacher")
    model_config, folder = checkpoint.config, checkpoint.folder
    name = find_cached_task(model_config, config.teacher) if config.task == "auto" else config.task
    task = TASKS[name](())
    task.check_weights(folder, "teacher", finite=is_first_process())
    tokenizer = load_checked_tokenizer(checkpoint, task)
    check_fast(tokenizer, "teacher", "a cache is keyed by its rules")
    if name == EMBEDDING:
        set_form(model_config, read_form(folder) or SentenceForm())
    room = config.keep.new_tokens if config.keep.signals == "generated" else 0
    length, note = config.data.max_length, ""
    if not (room and length):  # if both are set, the error message of `check_room` names both
        length, note = fitted_length(length, task, {"teacher": (model_config, tokenizer)}, room=room)
    settings = replace(config, task=cast(CachedTask, name), data=replace(config.data, max_length=length))
    return OpenedTeacher(checkpoint, tokenizer, settings, note)


def prepare_job(
    opened: OpenedTeacher, layout: Layout | None = None, mesh: DeviceMesh | None = None, world: World | None = None
) -> Job:
    """Loads the data and the teacher, sharded on the mesh if there is one; every process of the world calls it.

    Raises:
        InputError: The teacher is of another task, the data can't be read, or the task doesn't have a requested signal.
    """
    folder, model_config = opened.checkpoint.folder, opened.checkpoint.config
    tokenizer, config, task = opened.tokenizer, opened.settings, opened.settings.task
    names = (default_signal(task) if config.keep.signals == "auto" else config.keep.signals).split(",")
    for name in names:
        check_signal_name(name, task)
    check_sharded_signals(names, layout)
    if "generated" in names:
        check_room(model_config, tokenizer, config)
    samples = limit_samples(build_task_samples(task, config, tokenizer, names), config.limit)
    signals = tuple(make_signal(name, task, config.keep, model_config, config.seed) for name in names)
    auto_class = TASKS[task](()).auto
    if layout is None or mesh is None:
        model = load_task_model(folder, task, config.teacher)
    else:
        model = load_in_layout(folder, auto_class, layout, mesh, frozen=True)
        TASKS[task](()).complete_config(model.config, folder)
    is_pipelined = layout is not None and layout.pp > 1
    weights = fingerprint_once(world or World(), model, folder if is_pipelined else None, auto_class)
    # The task alone identifies the preprocessing; the keys are hashes of the token ids, which cover the rest.
    identity = Identity(weights, tokenizer_fingerprint(tokenizer), signals, task, config.keep.compression)
    if is_pipelined and mesh is not None:
        hidden = sorted({layer for signal in signals if isinstance(signal, Hidden) for layer in signal.layers})
        # One micro-batch: a different batch composition may change last bits, and so a rebuilt cache's bytes.
        stages = PipelineForward(model, mesh.get_group("pp"), micro_batches=1, hidden=hidden)
        return Job(task, model, stages, tokenizer, samples, identity, opened.note)
    device = parse_device(config.accelerator)
    if not (layout and layout.sharded):
        model.to(device)  # type: ignore[arg-type]
    teacher = OnlineTeacher(
        model,
        list_needed_outputs(signals),
        new_tokens=config.keep.new_tokens,
        temperature=config.keep.temperature or 0.0,
        seed=config.seed,
        device=device,
    )
    return Job(task, model, teacher, tokenizer, samples, identity, opened.note)


def fingerprint_once(world: World, model: PreTrainedModel, stored: Path | None, auto_class: "AutoClass") -> str:
    """Returns the fingerprint of the teacher's weights, hashed by one process of each machine.

    `stored` is the checkpoint's folder if no process has the whole model.
    """
    if stored is not None:
        return world.compute_once(lambda: stored_fingerprint(stored, auto_class))
    fingerprint = weights_fingerprint(
        model, keep=world.is_first_on_machine
    )  # gathers sharded weights, on every process
    return world.compute_once(lambda: fingerprint)


def check_room(model_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, config: WriteConfig) -> None:
    """Checks that prompts and their continuations fit into the teacher's positions.

    Prompts are truncated at the tokenizer's limit as well.

    Raises:
        InputError: They don't fit.
    """
    max_tokens = find_max_tokens(model_config)
    length = min(config.data.max_length, tokenizer.model_max_length) + config.keep.new_tokens
    if max_tokens is not None and length > max_tokens:
        raise length_error("data.max_length and keep.new_tokens together", max_tokens, length, "teacher")


def check_sharded_signals(names: list[str], layout: Layout | None) -> None:
    """Checks that the layout leaves the requested signals complete on a process.

    Raises:
        InputError: A signal isn't available on any process of the sharded teacher.
    """
    parts = 1 if layout is None else layout.tp * layout.pp
    unseen = [name for name in names if name in ("relations", "generated", "embedding")]
    if unseen and (parts > 1 or (layout is not None and layout.sharded and "generated" in unseen)):
        raise InputError(
            f"keep.signals: expected signals that a process of a teacher with layout {layout} computes whole, found "
            f"{unseen[0]}; use layout replicated" + ("" if unseen[0] == "generated" else " or fsdp=N")
        )


def load_task_model(folder: Path, task: str, name: str) -> PreTrainedModel:
    """Loads a teacher with its head for the task, frozen.

    Raises:
        InputError: The checkpoint's class doesn't fit the task.
    """
    try:
        return freeze(TASKS[task](()).load_checkpoint(folder))
    except ValueError as error:
        raise InputError(
            f"teacher {name!r}: can't be loaded for {task} ({str(error).splitlines()[0]}); choose another --task"
        ) from error


def parse_device(name: str) -> torch.device:
    """Returns the device of the setting `accelerator`; `auto` is this process's GPU, or the CPU if there is none.

    Raises:
        InputError: There is no such device.
    """
    if name == "auto":
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"--accelerator {name!r}: {str(error).splitlines()[0]}") from error


def build_task_samples(
    task: str, config: WriteConfig, tokenizer: PreTrainedTokenizerBase, signals: list[str]
) -> Samples:
    """Returns the samples of the data, encoded as the task requires; prompts if `signals` are generated sequences.

    Raises:
        InputError: Generated sequences are requested together with other signals.
    """
    pad_id, data = find_padding_id(tokenizer), config.data
    task_class = TASKS[task]
    rows = task_class.read_unlabelled(data)
    if "generated" in signals:
        if len(signals) > 1:
            raise InputError(
                f"keep.signals: expected generated without other signals, found {', '.join(signals)}: its samples are "
                "prompts, those of the others are blocks"
            )
        return build_samples(encode_samples(tokenizer, rows, data.max_length), pad_id)
    arguments = task_arguments(task, data, config.masking, config.chat)
    return build_samples(task_class.build((), arguments).encode_train(tokenizer, rows, data.max_length), pad_id)


def limit_samples(samples: Samples, limit: int) -> Samples:
    """Returns the first `limit` samples; 0 returns all."""
    if not limit:
        return samples
    return replace(samples, keys=samples.keys[:limit], lengths=samples.lengths[:limit])
