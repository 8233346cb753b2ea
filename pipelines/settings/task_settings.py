"""The task of a run, its default loss and text length, and checks of settings against the task."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from distill.data.config import SHORTEST, USUAL_LENGTH, DataConfig
from distill.data.masking.config import MaskConfig
from distill.data.rows.chat_config import ChatConfig
from distill.errors import InputError
from distill.losses.config import LossConfig
from distill.tasks.names import LANGUAGE, WRITING, default_signal
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
ACROSS = ("causal-lm", "masked-lm")  # tasks in which the student's tokenizer may differ from the teacher's


def resolve_task(config: DistillConfig) -> tuple[DistillConfig, str]:
    """Returns the configuration with task, loss and text length resolved, and the reason for the choice of the task.

    The default loss of the task applies unless the configuration sets a loss.
    """
    from compress.prune.slicing.checkpoint import register_pruned
    from distill.checkpoint.config import load_config
    from distill.checkpoint.folder import checkpoint_folder
    from distill.tasks.choose import TASKS, choose

    source = checkpoint_folder(config.teacher.model)
    register_pruned(source)
    task, why = choose(config.task, load_config(source, "teacher"), config.teacher.model, config.data)
    config = with_task(config, task)
    length, shorter = fitted_length(config.data.max_length, TASKS[task](()), models_of(config, source))
    return replace(config, data=replace(config.data, max_length=length)), f"{why}{shorter}"


def with_task(config: DistillConfig, task: str) -> DistillConfig:
    """Returns the configuration for a task, with the task's defaults where nothing else is requested."""
    loss = usual_loss(task) if config.loss == LossConfig() else config.loss
    if loss.temperature is None:
        loss = replace(loss, temperature=usual_loss(task).softness)
    general = replace(config.general, loss=replace(config.general.loss, temperature=config.general.loss.softness))
    # Layers of different shapes need modelling code in the checkpoint, which pooled encoders don't have.
    uniform = task == "sentence-embedding" and config.budget.asked
    budget = replace(config.budget, uniform=True) if uniform else config.budget
    return replace(config, task=cast(Any, task), loss=loss, general=general, budget=budget)


def models_of(config: DistillConfig, source: Path) -> "Models":
    """Returns role -> (config, tokenizer) of the teacher, stored in `source`, and of a student that is a checkpoint.

    The tokenizers are configured as they are used on the run's texts.
    """
    from compress.prune.slicing.checkpoint import register_pruned
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
        register_pruned(folder)
        own = load_tokenizer(folder, "student")
        if not is_across(config, tokenizer, own):
            own.model_max_length = tokenizer.model_max_length  # student and teacher use the same tokens
        models["student"] = (load_config(folder, "student"), own)
    return models


def fitted_length(length: int, task: "Task", models: "Models", *, room: int = 0) -> tuple[int, str]:
    """Returns the maximum text length in tokens, and a note for the user.

    The length is `length` if set, else the default or, if smaller, the number of positions of the model that has
    fewest. The note is empty unless texts are truncated at less than the length that was set or the default.

    Args:
        length: `data.max_length`; 0 to determine it here.
        task: Task; determines where texts are truncated.
        models: Role -> (config, tokenizer).
        room: Number of positions reserved for text generated after the input.

    Raises:
        InputError: The length exceeds the number of positions of a model.
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
    """Returns role -> (config, tokenizer) of checkpoints, each with its own tokenizer.

    The tokenizers are checked by `check_tokenizer_of`.
    """
    from distill.checkpoint.config import load_config

    return {
        role: (load_config(folder, role), check_tokenizer_of(folder, role, task)) for role, folder in folders.items()
    }


def check_tokenizer_of(folder: Path, role: str, task: "Task") -> "PreTrainedTokenizerBase":
    """Returns the tokenizer of the checkpoint in `folder`, configured for the task.

    Raises:
        InputError: There is no tokenizer, it has tokens without embeddings in the model, or it doesn't support the
            task.
    """
    from distill.checkpoint.config import load_config
    from distill.checkpoint.tokenizer import check_vocabulary, load_tokenizer

    tokenizer = load_tokenizer(folder, role)
    check_vocabulary(tokenizer, load_config(folder, role), folder, role)
    task.check_tokenizer(tokenizer)
    task.settle_tokenizer(tokenizer, folder)
    return tokenizer


def usual_loss(task: str) -> LossConfig:
    """Returns the default loss of a task.

    A distribution over a vocabulary is nearly uniform at temperature 2: over 30,522 tokens it has 9.6 nats of at most
    10.3, and the few tokens that a cache stores carry almost no information.
    """
    if task == "sentence-embedding":
        return VECTORS
    return LossConfig(temperature=1) if task in LANGUAGE else LossConfig()


def task_arguments(
    task: str, data: DataConfig, masking: MaskConfig, chat: ChatConfig, *, writes: bool = False
) -> dict[str, Any]:
    """Returns the settings that the class of this task in TASKS is built with, see `Task.of`.

    `writes` is set if the student generates text during training.

    Raises:
        InputError: The task doesn't support the packing, or packed rows would contain several prompts for a student
            that generates text.
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
    """Returns `task_arguments` for the settings of a run."""
    return task_arguments(task, config.data, config.masking, config.chat, writes=config.on_policy.share > 0)


def is_across(config: DistillConfig, teacher: "PreTrainedTokenizerBase", student: "PreTrainedTokenizerBase") -> bool:
    """Returns whether the student's tokenizer differs from its teacher's."""
    from distill.teacher.fingerprint import tokenizer_fingerprint

    return config.task in ACROSS and tokenizer_fingerprint(teacher) != tokenizer_fingerprint(student)


def rows_across(
    config: DistillConfig,
    student: "PreTrainedTokenizerBase",
    teacher: "PreTrainedTokenizerBase",
    texts: Sequence[str],
    length: int,
) -> "Rows":
    """Returns the texts in the student's tokens, `length` per row, each with the same text in the teacher's tokens.

    Raises:
        InputError: The tokenizers can't be aligned; a tokenizer has no end token or, for masked-lm, no mask token; or
            the lengths leave no room for text.
    """
    from distill.data.alignment.encoded import encode_twice
    from distill.data.masking.twice_masked import MaskedAlignedRows

    rows = encode_twice(student, teacher, texts, length, config.data.max_length)
    return MaskedAlignedRows.of(rows, config.masking, student, teacher) if config.task == "masked-lm" else rows


def check_tokenizers(
    config: DistillConfig, teacher: "PreTrainedTokenizerBase", student: "PreTrainedTokenizerBase"
) -> None:
    """Checks that teacher and student share a tokenizer, or that the settings support different ones.

    Raises:
        InputError: The tokenizers differ, and the task or a setting doesn't support it.
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
    rows_across(config, student, teacher, [], config.data.max_length)  # raises what the student stage would


def check_lengths(config: DistillConfig, source: Path) -> None:
    """Checks that all lengths in the settings fit the models; the teacher is stored in `source`.

    Raises:
        InputError: A length exceeds the number of positions of the teacher or the student.
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
    """Checks that the settings apply to the task.

    Raises:
        InputError: A setting is requested that the task doesn't support.
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
    """Checks that no setting of keep is set that would be ignored.

    Raises:
        InputError: A setting of keep is determined by the task or the loss.
    """
    plain, words = KeepConfig(), config.task in LANGUAGE
    usual = plain.signals if words else default_signal(config.task)
    ours = (*FORMS, *(("signals", "draws", "k", "step") if words else ()))
    asked = {name: value for name, value in asdict(config.keep).items() if value != getattr(plain, name)}
    for name, value in asked.items():
        if name not in ours and (name, value) != ("signals", usual):
            raise InputError(
                f"keep.{name}: expected none for {config.task}, found {value!r}: the loss says what is kept; of keep "
                f"{', '.join(ours)} count here"
            )
