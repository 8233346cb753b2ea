"""What a run is about, and what its task leaves out."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from distill.data.config import SHORTEST, USUAL_LENGTH, DataConfig
from distill.data.masking.config import MaskConfig
from distill.data.rows.chat_config import ChatConfig
from distill.errors import InputError
from distill.losses.config import LossConfig
from distill.tasks.names import LANGUAGE, WRITING, kept_of_task
from pipelines.settings.cache_config import KeepConfig
from pipelines.settings.distill_config import DistillConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from distill.data.batches.batches import Rows
    from distill.tasks.task import Task

    Models = Mapping[str, tuple[PretrainedConfig, PreTrainedTokenizerBase]]

# Squared differences of cosines are a hundredth of those of vectors.
VECTORS = LossConfig(kl=0, embedding=1, similarity=10)
FORMS = ("dtype", "compression")  # settings of keep that every task has
ACROSS = ("causal-lm", "masked-lm")  # tasks whose student may read other tokens than its teacher


def settled(config: DistillConfig) -> tuple[DistillConfig, str]:
    """The configuration with its task, a loss of that task where none was asked for, and the length of its texts; and
    why it is this task.
    """
    from compress.prune.slicing.checkpoint import admit
    from distill.checkpoint.config import load_config
    from distill.checkpoint.folder import checkpoint_folder
    from distill.tasks.choose import TASKS, choose

    source = checkpoint_folder(config.teacher.model)
    admit(source)
    task, why = choose(config.task, load_config(source, "teacher"), config.teacher.model, config.data)
    config = with_task(config, task)
    length, shorter = fitted_length(config.data.max_length, TASKS[task](()), models_of(config, source))
    return replace(config, data=replace(config.data, max_length=length)), f"{why}{shorter}"


def with_task(config: DistillConfig, task: str) -> DistillConfig:
    """The configuration for a task, with what is usual there where nothing else is asked for."""
    loss = usual_loss(task) if config.loss == LossConfig() else config.loss
    if loss.temperature is None:
        loss = replace(loss, temperature=usual_loss(task).softness)
    general = replace(config.general, loss=replace(config.general.loss, temperature=config.general.loss.softness))
    # Pooled encoders have no modelling code of their own to ship.
    uniform = task == "sentence-embedding" and config.budget.asked
    budget = replace(config.budget, uniform=True) if uniform else config.budget
    return replace(config, task=cast(Any, task), loss=loss, general=general, budget=budget)


def models_of(config: DistillConfig, source: Path) -> "Models":
    """Of the teacher, in `source`, and of a student that is a checkpoint, as they read the run's texts."""
    from compress.prune.slicing.checkpoint import admit
    from distill.checkpoint.config import load_config
    from distill.checkpoint.folder import checkpoint_folder
    from distill.checkpoint.tokenizer import load_tokenizer
    from distill.student.spec import is_relative
    from distill.tasks.choose import TASKS

    tokenizer = load_tokenizer(source)
    TASKS[config.task](()).settle_tokenizer(tokenizer, source)
    models = {"teacher": (load_config(source, "teacher"), tokenizer)}
    if not is_relative(config.student.spec):
        folder = checkpoint_folder(config.student.spec, "student")
        admit(folder)
        own = load_tokenizer(folder, "student")
        if not is_across(config, tokenizer, own):
            own.model_max_length = tokenizer.model_max_length  # as student and teacher read the same texts
        models["student"] = (load_config(folder, "student"), own)
    return models


def fitted_length(length: int, task: "Task", models: "Models", *, room: int = 0) -> tuple[int, str]:
    """Longest text in tokens: `length` where it was set, else the usual one or that of the model with fewest positions;
    and a note where that is less than the usual one.

    Args:
        length: `data.max_length`; 0 where it is to be told here.
        task: What decides where texts are cut.
        models: Of each role its config and tokenizer.
        room: Positions that are kept for what is written after a text.

    Raises:
        InputError: `length` was set, and is more than a model has positions for.
    """
    from distill.tasks.positions import check_length, positions_of

    fitted, note = length or USUAL_LENGTH, ""
    for role, (config, tokenizer) in models.items():
        most = positions_of(config)
        if not length and most is not None and SHORTEST <= most - room < task.longest(tokenizer, fitted):
            fitted, note = most - room, f"; texts are cut at {most - room} tokens: the {role} has {most} positions"
        check_length(task, config, tokenizer, fitted, role)
        if length and task.longest(tokenizer, length) < length:
            limit = tokenizer.model_max_length
            note = f"; texts are cut at {limit} tokens, not {length}: the {role}'s tokenizer has that limit"
    return fitted, note


def read_models(folders: Mapping[str, Path], task: "Task") -> "Models":
    """Of checkpoints that read texts each in its own tokens, checked as by `check_tokenizer_of`."""
    from distill.checkpoint.config import load_config

    return {
        role: (load_config(folder, role), check_tokenizer_of(folder, role, task)) for role, folder in folders.items()
    }


def check_tokenizer_of(folder: Path, role: str, task: "Task") -> "PreTrainedTokenizerBase":
    """The tokenizer of the checkpoint in `folder`, settled for the task.

    Raises:
        InputError: There is none, it has tokens that the model has no embeddings of, or the task can't be done with it.
    """
    from distill.checkpoint.config import load_config
    from distill.checkpoint.tokenizer import check_vocabulary, load_tokenizer

    tokenizer = load_tokenizer(folder, role)
    check_vocabulary(tokenizer, load_config(folder, role), folder, role)
    task.check_tokenizer(tokenizer)
    task.settle_tokenizer(tokenizer, folder)
    return tokenizer


def usual_loss(task: str) -> LossConfig:
    """What is learnt where nothing else is asked for.

    A distribution over words is flat at temperature 2: of 30,522 words it has 9.6 nats of at most 10.3, and the few
    that a cache keeps tell next to nothing.
    """
    if task == "sentence-embedding":
        return VECTORS
    return LossConfig(temperature=1) if task in LANGUAGE else LossConfig()


def how_of(
    task: str, data: DataConfig, masking: MaskConfig, chat: ChatConfig, *, writes: bool = False
) -> dict[str, Any]:
    """Settings that the task with this name in TASKS is made of, see `Task.of`; in some the student `writes` itself.

    Raises:
        InputError: Rows that the task doesn't have, or that hold several prompts where the student writes.
    """
    if task not in LANGUAGE:
        return {}
    usual = "stream" if task != "chat" else "none" if writes else "documents"
    packing = usual if data.packing == "auto" else data.packing
    if packing == "stream" and task == "chat":
        raise InputError("data.packing: expected documents or none for conversations, found stream: they aren't cut")
    if packing == "documents" and writes:
        raise InputError(
            "data.packing: expected stream or none with on_policy, found documents: a packed row has several prompts"
        )
    if task == "causal-lm":
        return {"packing": packing}
    if task == "masked-lm":
        return {"masking": asdict(masking)} | ({"packing": packing} if packing != "stream" else {})
    from distill.data.rows.chat_template import read_file

    template = {"template": read_file(chat.template)} if chat.template else {}
    return {"packing": packing, "chat": asdict(chat)} | template


def how_of_run(config: DistillConfig, task: str) -> dict[str, Any]:
    """`how_of` of a run's settings."""
    return how_of(task, config.data, config.masking, config.chat, writes=config.on_policy.share > 0)


def is_across(config: DistillConfig, teacher: "PreTrainedTokenizerBase", student: "PreTrainedTokenizerBase") -> bool:
    """Whether the student reads other tokens than its teacher."""
    from distill.teacher.fingerprint import tokenizer_fingerprint

    return config.task in ACROSS and tokenizer_fingerprint(teacher) != tokenizer_fingerprint(student)


def rows_across(
    config: DistillConfig,
    student: "PreTrainedTokenizerBase",
    teacher: "PreTrainedTokenizerBase",
    texts: Sequence[str],
    length: int,
) -> "Rows":
    """The texts as a student reads them, `length` tokens a row, and beside them as its teacher does.

    Raises:
        InputError: A tokenizer that can't be laid on another, has no end token or, of masked-lm, no mask token; or
            lengths without room for text.
    """
    from distill.data.alignment.encoded import encode_twice
    from distill.data.masking.twice_masked import TwiceMasked

    rows = encode_twice(student, teacher, texts, length, config.data.max_length)
    return TwiceMasked.of(rows, config.masking, student, teacher) if config.task == "masked-lm" else rows


def check_tokenizers(
    config: DistillConfig, teacher: "PreTrainedTokenizerBase", student: "PreTrainedTokenizerBase"
) -> None:
    """
    Raises:
        InputError: Tokenizers that differ, and a task or setting that can't do with that.
    """
    from distill.teacher.fingerprint import check_same_tokenizer

    if not is_across(config, teacher, student):
        check_same_tokenizer(teacher, student, config.student.spec)
        return
    loss, plain = config.loss, LossConfig()
    layered = loss.hidden or loss.attention or loss.relations or loss.divergence != plain.divergence
    wrong = {
        "teacher.signals": ("online", config.teacher.signals, config.teacher.signals != "online"),
        "loss": ("kl and ce", "others", bool(layered)),
        "machine.devices": (1, config.machine.devices, config.machine.devices > 1),
        "teacher.ranks": (0, config.teacher.ranks, config.teacher.ranks > 0),
        "on_policy.share": (0, config.on_policy.share, config.on_policy.share > 0),
        "data.packing": ("auto", config.data.packing, config.data.packing not in ("auto", "stream")),
    }
    for name, (expected, found, bad) in wrong.items():
        if bad:
            raise InputError(
                f"{name}: expected {expected} for a student with a tokenizer of its own, found {found}: positions of "
                f"one are not those of the other (student {config.student.spec!r})"
            )
    if loss.softness != usual_loss(config.task).softness or "temperature" in loss.ramps:
        raise InputError(
            "loss.temperature: expected none for a student with a tokenizer of its own, found one: across.temperature "
            "softens both there, and this one nothing"
        )
    if config.across.kind == "sorted" and not loss.ce and "ce" not in loss.ramps:
        raise InputError(
            "across.kind sorted: expected labels beside it, found loss.ce 0: sorted distributions tell how sure the "
            "teacher is, and not of what"
        )
    rows_across(config, student, teacher, [], config.data.max_length)  # refuses what the student stage would


def check_lengths(config: DistillConfig, source: Path) -> None:
    """
    Raises:
        InputError: Rows that are longer than the teacher, in `source`, or the student.
    """
    from distill.tasks.choose import TASKS
    from distill.tasks.positions import positions_of, too_long

    models, general = models_of(config, source), config.general
    fitted_length(config.data.max_length, TASKS[config.task](()), models)
    for name, (own, _) in models.items():
        most = positions_of(own)
        asked = {"general.length": general.length} if general.data else {}
        asked |= {"budget.length": config.budget.length} if config.budget.asked else {}
        if config.on_policy.share:
            written = config.on_policy.prompt_tokens + config.on_policy.new_tokens
            asked["on_policy.prompt_tokens and on_policy.new_tokens together"] = written
        for setting, length in asked.items():
            if most is not None and length > most:
                raise too_long(setting, most, length, name)


def check_task_fits(config: DistillConfig, task: str) -> None:
    """
    Raises:
        InputError: Something is asked for that is there for one class a text alone.
    """
    if config.on_policy.share and task not in WRITING:
        raise InputError(
            f"on_policy.share {config.on_policy.share:g}: expected causal-lm or chat, found {task}: there is nothing "
            "that the student could write"
        )
    if config.on_policy.share and config.teacher.signals != "online":
        raise InputError(
            f"on_policy.share {config.on_policy.share:g}: expected teacher.signals online, found cached: a cache can't "
            "answer about sequences that the student has yet to write"
        )
    if config.sequences.share and task != "chat":
        raise InputError(
            f"sequences.share {config.sequences.share:g}: expected chat, found {task}: there are no answers that the "
            "teacher could write"
        )
    how_of_run(config, task)
    check_keep(config)
    if config.general.data and task in ("sentence-embedding", *LANGUAGE):
        raise InputError(f"general.data: expected a task with labels after the plain text, found {task}")
    if task == "sentence-embedding" and config.teacher.finetune == "always":
        raise InputError("teacher.finetune always: expected auto or never for sentence-embedding, which has no labels")
    if config.teacher.also and task != "text-classification":
        raise InputError(
            f"teacher.also: expected text-classification with one class a text, found {task}: how the answers of "
            "several teachers mix isn't known there"
        )
    vectors = task == "sentence-embedding"
    if config.loss.of_vectors != vectors:
        wanted = "loss.embedding or loss.similarity, and no kl or ce," if vectors else "kl or ce"
        raise InputError(f"loss: expected {wanted} for {task}, found {config.loss}: there is nothing to compare")


def check_keep(config: DistillConfig) -> None:
    """
    Raises:
        InputError: A setting of keep that the task, or the loss, decides: it would be passed over.
    """
    plain, words = KeepConfig(), config.task in LANGUAGE
    usual = plain.signals if words else kept_of_task(config.task)
    ours = (*FORMS, *(("signals", "draws", "k", "step") if words else ()))
    asked = {name: value for name, value in asdict(config.keep).items() if value != getattr(plain, name)}
    for name, value in asked.items():
        if name not in ours and (name, value) != ("signals", usual):
            raise InputError(
                f"keep.{name}: expected none for {config.task}, found {value!r}: the loss says what is kept; of keep "
                f"{', '.join(ours)} count here"
            )
