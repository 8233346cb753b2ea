"""The signals that a cache can store of a teacher, by task."""

from collections.abc import Callable
from typing import Literal, cast

from transformers import PretrainedConfig

from distill.cache import Dense, Generated, Hidden, Relations, Sampled, TopK
from distill.cache.signals import Signal
from distill.checkpoint.sentence_form import vector_width
from distill.errors import InputError
from distill.models.attention import read_attention_widths
from distill.tasks.choose import TASKS, find_language_task, find_task_of_head
from distill.tasks.language import CausalLM
from distill.tasks.names import LANGUAGE_TASKS
from distill.tasks.question_answering import QuestionAnswering
from distill.tasks.task import Task
from distill.tasks.text_classification import TextClassification
from distill.tasks.token_classification import TokenClassification
from pipelines.settings.commands.cache import CachedTask, KeepConfig

EMBEDDING: CachedTask = "sentence-embedding"
LABEL_TASKS = (TextClassification.name, TokenClassification.name, QuestionAnswering.name)
CACHED_TASKS = (*LABEL_TASKS, *LANGUAGE_TASKS, EMBEDDING)


def find_cached_task(teacher: PretrainedConfig, name: str) -> CachedTask:
    """Returns the task under which a teacher's signals are cached: that of its head; sentence vectors for a body.

    Raises:
        InputError: The head belongs to no supported task.
    """
    task = find_task_of_head(teacher, name) or find_language_task(teacher)
    return name_cached_task(TASKS[task]) if task else EMBEDDING


def name_cached_task(task: type[Task]) -> CachedTask:
    """Returns the task under which a cache is written; for the cache, all tasks with an output per text are one."""
    name = TextClassification.name if issubclass(task, TextClassification) else task.name
    return cast(CachedTask, name)


def check_signal_name(name: str, task: str) -> None:
    """Checks that the task has a signal of this name.

    Raises:
        InputError: The task has no such signal.
    """
    tasks_by_signal = {
        "topk": LANGUAGE_TASKS,
        "sampled": LANGUAGE_TASKS,
        "generated": (CausalLM.name,),
        "logits": (*LANGUAGE_TASKS, *LABEL_TASKS),
    }
    tasks = tasks_by_signal.get(name, CACHED_TASKS)
    if task not in tasks:
        raise InputError(f"keep.signals: expected signals of {task}, found {name}, which only {', '.join(tasks)} have")


def make_signal(name: str, task: str, keep: KeepConfig, teacher: PretrainedConfig, seed: int) -> Signal:
    """Returns the signal of this name with the sizes of the teacher's config."""
    vocabulary = int((teacher.vocab_size if task in LANGUAGE_TASKS else teacher.num_labels) or 0)
    outputs = 2 if task == QuestionAnswering.name else vocabulary  # starts and ends of answers
    each: Literal["sample", "position"] = "sample" if task in (TextClassification.name, EMBEDDING) else "position"
    temperature = keep.temperature if keep.temperature is not None else 1.0
    constructors: dict[str, Callable[[], Signal]] = {
        "logits": lambda: Dense(outputs, each=each, dtype=keep.dtype),
        "embedding": lambda: Dense(vector_width(teacher), of="embedding", dtype=keep.dtype),
        "topk": lambda: TopK(vocabulary, k=keep.k, step=keep.step, temperature=temperature),
        "sampled": lambda: Sampled(vocabulary, draws=keep.draws, temperature=temperature, seed=seed),
        "hidden": lambda: Hidden(teacher.hidden_size, layers=parse_layers(keep.layers, teacher.num_hidden_layers)),
        "relations": lambda: Relations.from_widths(
            read_attention_widths(teacher),
            parse_layers(
                keep.vectors or keep.layers, teacher.num_hidden_layers - 1, "vectors" if keep.vectors else "layers"
            ),
        ),
        "generated": lambda: Generated(
            vocabulary, new_tokens=keep.new_tokens, temperature=keep.temperature or 0.0, seed=seed
        ),
    }
    return constructors[name]()


def parse_layers(layers: str, last: int, setting: str = "layers") -> tuple[int, ...]:
    """Returns the layer numbers of a setting of `keep`, at most `last`.

    Raises:
        InputError: The setting isn't a list of numbers, or the teacher has no layer of a number.
    """
    if layers == "last":
        return (last,)
    try:
        numbers = tuple(int(number) for number in layers.split(","))
    except ValueError:
        raise InputError(f"keep.{setting}: expected numbers joined by commas, or last, found {layers!r}") from None
    if max(numbers) > last or min(numbers) < 0:
        wrong = next(number for number in numbers if not 0 <= number <= last)
        raise InputError(
            f"keep.{setting}: expected numbers from 0 up to {last}, found {wrong}: the teacher has no others"
        )
    return numbers
