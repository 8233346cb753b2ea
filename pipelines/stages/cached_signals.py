"""A cache's contents by task: the teacher's model class, the samples, and the signals."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from distill.cache import Dense, Generated, Hidden, Identity, Relations, Sampled, Samples, TopK
from distill.cache.samples import samples_of
from distill.cache.signals import Signal
from distill.checkpoint.checkpoint import Checkpoint, open_checkpoint
from distill.checkpoint.sentence_folder import SentenceForm, read_form, set_form, vector_width
from distill.checkpoint.tokenizer import check_fast
from distill.data.batches.encode import encode
from distill.data.batches.packing import padding_id
from distill.data.config import DataConfig
from distill.data.masking.config import MaskConfig
from distill.data.rows.chat_config import ChatConfig
from distill.errors import InputError
from distill.models.attention import read_attention_widths
from distill.parallel.layout import Layout
from distill.parallel.pipeline import PipelineForward
from distill.tasks.choose import TASKS
from distill.tasks.language import CausalLM, Chatting, MaskedLM
from distill.tasks.positions import positions_of, too_long
from distill.tasks.question_answering import QuestionAnswering
from distill.tasks.sentence_embedding import SentenceEmbedding
from distill.tasks.text_classification import TextClassification
from distill.tasks.token_classification import TokenClassification
from distill.teacher.ensemble import register_ensemble
from distill.teacher.fingerprint import freeze, stored_fingerprint, tokenizer_fingerprint, weights_fingerprint
from distill.teacher.online import OnlineTeacher
from pipelines.runs.placement import load_in_layout
from pipelines.runs.processes import World, is_first_process
from pipelines.settings.cache_config import KeepConfig, WriteConfig
from pipelines.settings.lengths import fitted_length
from pipelines.settings.task_settings import task_arguments
from pipelines.settings.tokenizers import load_checked_tokenizer
from pipelines.stages.cache_writing import answers_of

EMBEDDING = SentenceEmbedding.name
CLASSES = (TextClassification.name, TokenClassification.name, QuestionAnswering.name)
WORDS = (MaskedLM.name, CausalLM.name, Chatting.name)
NAMES = (*CLASSES, *WORDS, EMBEDDING)


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
    own, folder = checkpoint.config, checkpoint.folder
    task: Any = task_of(own, config.teacher) if config.task == "auto" else config.task
    kind = TASKS[task](())
    kind.check_weights(folder, "teacher", finite=is_first_process())
    tokenizer = load_checked_tokenizer(checkpoint, kind)
    check_fast(tokenizer, "teacher", "a cache is keyed by its rules")
    if task == EMBEDDING:
        set_form(own, read_form(folder) or SentenceForm())
    room = config.keep.new_tokens if config.keep.signals == "generated" else 0
    length, note = config.data.max_length, ""
    if not (room and length):  # if both are set, the error message of `check_room` names both
        length, note = fitted_length(length, kind, {"teacher": (own, tokenizer)}, room=room)
    settings = replace(config, task=task, data=replace(config.data, max_length=length))
    return OpenedTeacher(checkpoint, tokenizer, settings, note)


def prepare_job(
    opened: OpenedTeacher, layout: Layout | None = None, mesh: DeviceMesh | None = None, world: World | None = None
) -> Job:
    """Loads the data and the teacher, sharded on the mesh if there is one; every process of the world calls it.

    Raises:
        InputError: The teacher is of another task, the data can't be read, or the task doesn't have a requested signal.
    """
    folder, own = opened.checkpoint.folder, opened.checkpoint.config
    tokenizer, config = opened.tokenizer, opened.settings
    task = config.task
    names = (TASKS[task].kept if config.keep.signals == "auto" else config.keep.signals).split(",")
    for name in names:
        check_name(name, task)
    check_sharded_signals(names, layout)
    if "generated" in names:
        check_room(own, tokenizer, config)
    samples = limited(samples_for(task, config, tokenizer, names), config.limit)
    signals = tuple(make_signal(name, task, config.keep, own, config.seed) for name in names)
    auto_class = TASKS[task](()).auto
    if layout is None or mesh is None:
        model = load_model(folder, task, config.teacher)
    else:
        model = load_in_layout(folder, auto_class, layout, mesh, frozen=True)
        TASKS[task](()).settle(model.config, folder)
    staged = layout is not None and layout.pp > 1
    weights = fingerprint_once(world or World(), model, folder if staged else None, auto_class)
    # The task alone identifies the preprocessing; the keys are hashes of the token ids, which cover the rest.
    identity = Identity(weights, tokenizer_fingerprint(tokenizer), signals, task, config.keep.compression)
    if staged and mesh is not None:
        hidden = sorted({layer for signal in signals if isinstance(signal, Hidden) for layer in signal.layers})
        # One micro-batch: a different batch composition may change last bits, and so a rebuilt cache's bytes.
        stages = PipelineForward(model, mesh.get_group("pp"), micro_batches=1, hidden=hidden)
        return Job(task, model, stages, tokenizer, samples, identity, opened.note)
    device = device_of(config.device)
    if not (layout and layout.sharded):
        model.to(device)  # type: ignore[arg-type]
    teacher = OnlineTeacher(
        model,
        answers_of(signals),
        new_tokens=config.keep.new_tokens,
        temperature=config.keep.temperature or 0.0,
        seed=config.seed,
        device=device,
    )
    return Job(task, model, teacher, tokenizer, samples, identity, opened.note)


def fingerprint_once(world: World, model: PreTrainedModel, stored: Path | None, auto_class: Any) -> str:
    """Returns the fingerprint of the teacher's weights, hashed by one process of each machine.

    `stored` is the checkpoint's folder if no process has the whole model.
    """
    if stored is not None:
        return world.compute_once(lambda: stored_fingerprint(stored, auto_class))
    found = weights_fingerprint(model, keep=world.is_first_here)  # gathers sharded weights, on every process
    return world.compute_once(lambda: found)


def check_room(own: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, config: WriteConfig) -> None:
    """Checks that prompts and their continuations fit into the teacher's positions.

    Prompts are truncated at the tokenizer's limit as well.

    Raises:
        InputError: They don't fit.
    """
    most = positions_of(own)
    found = min(config.data.max_length, tokenizer.model_max_length) + config.keep.new_tokens
    if most is not None and found > most:
        raise too_long("data.max_length and keep.new_tokens together", most, found, "teacher")


def check_sharded_signals(names: list[str], layout: Layout | None) -> None:
    """Checks that the layout leaves the requested signals complete on a process.

    Raises:
        InputError: A signal isn't available on any process of the sharded teacher.
    """
    parts = 1 if layout is None else layout.tp * layout.pp
    unseen = [name for name in names if name in ("relations", "generated", "embedding")]
    if unseen and (parts > 1 or (layout is not None and layout.sharded and "generated" in unseen)):
        raise InputError(
            f"keep.signals: {unseen[0]} of a teacher laid out as {layout} isn't there whole on any process; lay it out "
            "as replicated" + ("" if unseen[0] == "generated" else " or fsdp=N")
        )


def load_model(folder: Path, task: str, name: str) -> PreTrainedModel:
    try:
        return freeze(TASKS[task](()).load_checkpoint(folder))
    except ValueError as error:
        raise InputError(
            f"teacher {name!r}: can't be loaded for {task} ({str(error).splitlines()[0]}); name another --task"
        ) from error


def task_of(own: PretrainedConfig, name: str) -> str:
    plain = (*CLASSES, MaskedLM.name, CausalLM.name)
    heads = {head: task for task in plain for head in TASKS[task].heads} | {"Model": EMBEDDING}
    for architecture in own.architectures or []:
        for head, task in heads.items():
            if architecture.endswith(head):
                return task
    found = ", ".join(own.architectures or ["no architecture"])
    raise InputError(f"teacher {name!r}: expected a head among {', '.join(heads)}, found {found}; name it with --task")


def device_of(name: str) -> torch.device:
    if name == "auto":
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"--device {name!r}: {str(error).splitlines()[0]}") from error


def samples_for(task: str, config: WriteConfig, tokenizer: PreTrainedTokenizerBase, names: list[str]) -> Samples:
    pad_id, data = padding_id(tokenizer), config.data
    kind = TASKS[task]
    rows = kind.read_unlabelled(data)
    if "generated" in names:
        if len(names) > 1:
            raise InputError("keep.signals: generated goes alone: its samples are prompts, the others' are blocks")
        return samples_of(encode(tokenizer, rows, data.max_length), pad_id)
    how = task_arguments(task, data, config.masking, config.chat)
    return samples_of(kind.build((), how).encode_train(tokenizer, rows, data.max_length), pad_id)


def limited(samples: Samples, limit: int) -> Samples:
    if not limit:
        return samples
    return replace(samples, keys=samples.keys[:limit], lengths=samples.lengths[:limit])


def check_name(name: str, task: str) -> None:
    """Checks that the task has a signal of this name.

    Raises:
        InputError: The task has no such signal.
    """
    having = {
        "topk": WORDS,
        "sampled": WORDS,
        "generated": (CausalLM.name,),
        "logits": (*WORDS, *CLASSES),
    }
    tasks = having.get(name, NAMES)
    if task not in tasks:
        raise InputError(f"keep.signals: {name} isn't a signal of {task}, but of {', '.join(tasks)}")


def make_signal(name: str, task: str, keep: KeepConfig, own: PretrainedConfig, seed: int) -> Signal:
    """Returns a signal with the teacher's sizes."""
    vocabulary = int((own.vocab_size if task in WORDS else own.num_labels) or 0)
    outputs = 2 if task == QuestionAnswering.name else vocabulary  # starts and ends of answers
    each: Any = "sample" if task in (TextClassification.name, EMBEDDING) else "position"
    temperature = keep.temperature if keep.temperature is not None else 1.0
    made: dict[str, Any] = {
        "logits": lambda: Dense(outputs, each=each, dtype=keep.dtype),
        "embedding": lambda: Dense(vector_width(own), of="embedding", dtype=keep.dtype),
        "topk": lambda: TopK(vocabulary, k=keep.k, step=keep.step, temperature=temperature),
        "sampled": lambda: Sampled(vocabulary, draws=keep.draws, temperature=temperature, seed=seed),
        "hidden": lambda: Hidden(own.hidden_size, layers=layers_of(keep.layers, own.num_hidden_layers)),
        "relations": lambda: Relations.from_widths(
            read_attention_widths(own), layers_of(keep.vectors or keep.layers, own.num_hidden_layers - 1)
        ),
        "generated": lambda: Generated(
            vocabulary, new_tokens=keep.new_tokens, temperature=keep.temperature or 0.0, seed=seed
        ),
    }
    return made[name]()


def layers_of(layers: str, last: int) -> tuple[int, ...]:
    if layers == "last":
        return (last,)
    try:
        numbers = tuple(int(number) for number in layers.split(","))
    except ValueError:
        raise InputError(f"keep.layers: expected numbers joined by commas, or last, found {layers!r}") from None
    if max(numbers) > last or min(numbers) < 0:
        wrong = next(number for number in numbers if not 0 <= number <= last)
        raise InputError(f"keep.layers: expected numbers from 0 up to {last}, found {wrong}: the teacher has no others")
    return numbers


def record(config: WriteConfig) -> dict[str, Any]:
    """Returns the configuration as stored in cache.json, from which `rebuild` and `inspect` locate teacher and data."""
    kept = asdict(config)
    for name in ("cache", "force", "dry_run", "rank", "ranks", "devices", "layout", "timeout", "device", "threads"):
        kept.pop(name)
    kept["teacher"] = absolute(kept["teacher"])
    for name in ("path", "unlabelled"):
        kept["data"][name] = absolute(kept["data"][name])
    kept["chat"]["template"] = absolute(kept["chat"]["template"])
    return kept


def absolute(path: str | None) -> str | None:
    return str(Path(path).expanduser().resolve()) if path and Path(path).expanduser().exists() else path


def recorded(cache: Path, about: Mapping[str, Any], **changes: Any) -> WriteConfig:
    """Returns the configuration that a cache was written with; empty `changes` are ignored.

    Raises:
        InputError: The cache was written by other code, which stored no configuration.
    """
    kept = dict(about.get("made_from") or {})
    if "data" not in kept:
        raise InputError(f"cache {str(cache)!r}: says nothing of its data and teacher; write it again by what wrote it")
    data = dict(kept.pop("data"))
    data["path"] = changes.pop("data", "") or near(cache, data["path"])
    data["unlabelled"] = near(cache, data["unlabelled"])
    kept["teacher"] = near(cache, kept["teacher"])
    kept |= {name: value for name, value in changes.items() if value}
    parts: dict[str, Any] = {"keep": KeepConfig(**kept.pop("keep")), "masking": MaskConfig(**kept.pop("masking"))}
    parts["chat"] = ChatConfig(**kept.pop("chat", {}))
    return WriteConfig(cache=str(cache), data=DataConfig(**data), **parts, **kept)


def near(cache: Path, path: str | None) -> str | None:
    """Resolves a path that is relative to the cache's folder, as stages store theirs."""
    if path and path.startswith("..") and (cache / path).exists():
        return str((cache / path).resolve())
    return path
