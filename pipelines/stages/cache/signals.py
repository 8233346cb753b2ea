"""The signals that a cache can store of a teacher, by task."""

from collections.abc import Callable
from typing import Literal

from transformers import PretrainedConfig

from distill.cache import Dense, Generated, Hidden, Relations, Sampled, TopK
from distill.cache.signals import Signal
from distill.checkpoint.sentence_form import vector_width
from distill.errors import InputError
from distill.models.attention import read_attention_widths
from distill.tasks.language import CausalLM, ChatTask, MaskedLM
from distill.tasks.question_answering import QuestionAnswering
from distill.tasks.sentence_embedding import SentenceEmbedding
from distill.tasks.text_classification import TextClassification
from distill.tasks.token_classification import TokenClassification
from pipelines.settings.commands.cache import KeepConfig

EMBEDDING = SentenceEmbedding.name
LABEL_TASKS = (TextClassification.name, TokenClassification.name, QuestionAnswering.name)
_LANGUAGE_TASKS = (MaskedLM.name, CausalLM.name, ChatTask.name)
CACHED_TASKS = (*LABEL_TASKS, *_LANGUAGE_TASKS, EMBEDDING)


def check_signal_name(name: str, task: str) -> None:
    """Checks that the task has a signal of this name.

    Raises:
        InputError: The task has no such signal.
    """
    tasks_by_signal = {
        "topk": _LANGUAGE_TASKS,
        "sampled": _LANGUAGE_TASKS,
        "generated": (CausalLM.name,),
        "logits": (*_LANGUAGE_TASKS, *LABEL_TASKS),
    }
    tasks = tasks_by_signal.get(name, CACHED_TASKS)
    if task not in tasks:
        raise InputError(f"keep.signals: expected signals of {task}, found {name}, which only {', '.join(tasks)} have")


def make_signal(name: str, task: str, keep: KeepConfig, teacher: PretrainedConfig, seed: int) -> Signal:
    """Returns the signal of this name with the sizes of the teacher's config."""
    vocabulary = int((teacher.vocab_size if task in _LANGUAGE_TASKS else teacher.num_labels) or 0)
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
