"""Every rule that refuses a run before torch is imported, in the order in which they are read.

Rules on one setting stand beside it, in `__post_init__`. Those here need several settings, the machine, or what
config.json says of the models. Where that isn't enough, the checks that follow once the models' configs are loaded
decide.
"""

from collections.abc import Callable
from dataclasses import dataclass

from distill.errors import InputError
from distill.losses.config import LayerSizes, check_part, lessons
from distill.parallel.layout import Layout, fitting
from distill.student.family import ENCODERS
from distill.student.spec import BLOCKS, Sizes, check_spec, is_relative, read, resolve
from distill.tasks.names import LANGUAGE, PROBLEMS, WORDS, kept_of_task
from pipelines.settings.combinations import check_together
from pipelines.settings.distill_config import DistillConfig
from pipelines.settings.layouts import Layouts, check_layouts, texts_of
from pipelines.settings.machine_facts import check_machine
from pipelines.settings.model_facts import ModelFacts, read_facts
from pipelines.settings.places import check_data, check_models, is_there
from pipelines.settings.schemes import check_processor
from pipelines.settings.task_settings import check_task_fits, with_task


@dataclass(frozen=True)
class Known:
    """What is known of a run before torch is imported.

    Args:
        config: Its settings; with those of its task, where that is known.
        processes: That it is for.
        teacher, student: Checkpoints on this machine; no student where it is built from the teacher.
        task: Empty where only the data tell it.
    """

    config: DistillConfig
    processes: int
    teacher: ModelFacts | None
    student: ModelFacts | None
    task: str

    @property
    def teacher_sizes(self) -> Sizes | None:
        return self.teacher.sizes if self.teacher is not None else None

    @property
    def student_sizes(self) -> Sizes | None:
        """
        Raises:
            InputError: Sizes that no student of the teacher can have.
        """
        spec, teacher = self.config.student.spec, self.teacher_sizes
        if not is_relative(spec):
            return self.student.sizes if self.student is not None else None
        if spec == "teacher":
            return teacher
        if self.teacher is not None:
            self.teacher.check_family()
        return None if teacher is None or read(spec).preset in BLOCKS else resolve(spec, teacher)


def refuse(config: DistillConfig, processes: int) -> None:
    """
    Raises:
        InputError: A run that can't be, for the first of `RULES` that says so.
    """
    check_spec(config.student.spec)
    teacher = read_facts(config.teacher.model)
    student = None if is_relative(config.student.spec) else read_facts(config.student.spec)
    task: str = config.task
    if task == "auto" and teacher is not None:
        task = teacher.task or task
    named = "" if task == "auto" else task
    known = Known(with_task(config, named) if named else config, processes, teacher, student, named)
    for rule in RULES:
        rule(known)


def check_integers(known: Known) -> None:
    """Files with weights of 8 bits can be proven on this processor."""
    check_processor(known.config)


def check_machine_settings(known: Known) -> None:
    check_machine(known.config.machine.accelerator, known.config.machine.precision)


def check_places(known: Known) -> None:
    """Checkpoints and data that are paths are there."""
    config = known.config
    named = [("teacher", config.teacher.model), *(("teacher", name) for name in config.teacher.also)]
    check_models([*named, *([] if is_relative(config.student.spec) else [("student", config.student.spec)])])
    check_data(config.data.path, config.data.subset)
    if config.general.data and not is_there(config.general.data, "general.data"):
        raise InputError(
            f"general.data {config.general.data!r}: expected a file or a folder with text, found nothing there"
        )


def check_layout_settings(known: Known) -> None:
    """Layouts fit the processes and the models, as far as sizes don't decide them; and what goes with layouts."""
    texts = texts_of(known.config, known.processes)
    found = {each.whose: each.parsed() for each in texts}
    for each, sizes in zip(texts, (known.teacher_sizes, known.student_sizes, known.teacher_sizes), strict=True):
        layout = found[each.whose]
        if layout is not None and sizes is not None:
            fitting(layout, sizes.heads, sizes.groups, len(sizes.layers), each.name)
    check_layouts(known.config, found["teacher"], found["student"])
    layouts = [layout for layout in found.values() if isinstance(layout, Layout)]
    if len(layouts) == len(found):
        precision = known.config.machine.precision
        check_together(known.config, "32" if precision == "auto" else precision, Layouts(*layouts))


def check_head(known: Known) -> None:
    """The teacher was trained for no other task, and a language model has its head for words already."""
    own = known.teacher.task if known.teacher is not None else ""
    if own and known.task and alike(own) != alike(known.task):
        raise InputError(
            f"--task {known.task}: the teacher {known.config.teacher.model!r} was trained for {own}: its outputs have "
            "another meaning"
        )
    ends = WORDS.get(known.task)
    for facts in (known.teacher, known.student):
        if ends and facts is not None and not any(name.endswith(ends) for name in facts.architectures):
            raise InputError(
                f"model {facts.name!r}: expected a head for {known.task} ({', '.join(ends)}), found "
                f"{', '.join(facts.architectures) or 'no architecture'}: a new head would have to learn every word anew"
            )


def alike(task: str) -> str:
    """A task with the same head."""
    return "text-classification" if task in PROBLEMS.values() else task


def check_task(known: Known) -> None:
    """The task has what is asked for."""
    config, task = known.config, known.task
    if not task:
        return
    check_task_fits(config, task)
    kept = kept_of_task(task) if config.keep.signals == "auto" else config.keep.signals
    if task in LANGUAGE and config.teacher.signals == "cached" and kept != "logits":
        check_part(config.loss, kept)


def check_terms(known: Known) -> None:
    """The layers that the loss reads are there, of an encoder: its vectors are all as wide as its states."""
    sizes = known.teacher_sizes, known.student_sizes
    kinds = [facts.config.get("model_type") for facts in (known.teacher, known.student) if facts is not None]
    if None in sizes or not known.task or known.task == "sentence-embedding" or not {*kinds} <= {*WIDE}:
        return
    teacher, student = (LayerSizes(len(each.layers), each.hidden, each.heads) for each in sizes if each is not None)
    lessons(known.config.loss, student, teacher)


WIDE = tuple(kind for kind in ENCODERS if kind != "mobilebert")
RULES: tuple[Callable[[Known], None], ...] = (
    check_integers,
    check_machine_settings,
    check_places,
    check_layout_settings,
    check_head,
    check_task,
    check_terms,
)
