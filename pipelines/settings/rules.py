"""The checks of a run before torch is imported, in the order in which they run.

Checks of a single setting are in `__post_init__` of its dataclass. The checks here need several settings, facts about
the machine, or the models' config.json. Anything that these can't decide is checked once the models' configs are
loaded.
"""

from collections.abc import Callable
from dataclasses import dataclass

from distill.errors import InputError
from distill.losses.config import LayerSizes, check_part, match_layers
from distill.parallel.layout import Layout, fitting
from distill.student.family import ENCODERS
from distill.student.spec import BLOCKS, Sizes, check_spec, is_relative, parse_spec, resolve
from distill.tasks.names import LANGUAGE, LANGUAGE_HEADS, PROBLEMS, default_signal
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
    """Facts about a run that are known before torch is imported.

    Args:
        config: Settings of the run; includes the defaults of its task if the task is known.
        processes: Number of processes of the run.
        teacher: Facts of the teacher; None if it isn't on this machine.
        student: Facts of the student; None if it isn't on this machine, or is built from the teacher.
        task: Task of the run; empty if only the data determine it.
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
        """Sizes of the student; None if unknown.

        Raises:
            InputError: No student of the teacher can have the requested sizes.
        """
        spec, teacher = self.config.student.spec, self.teacher_sizes
        if not is_relative(spec):
            return self.student.sizes if self.student is not None else None
        if spec == "teacher":
            return teacher
        if self.teacher is not None:
            self.teacher.check_family()
        return None if teacher is None or parse_spec(spec).preset in BLOCKS else resolve(spec, teacher)


def check_run(config: DistillConfig, processes: int) -> None:
    """Checks that a run is possible, as far as this is known without torch.

    Raises:
        InputError: One of `RULES` is violated; the first one is reported.
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
    """Checks that files with 8-bit weights can be verified on this processor."""
    check_processor(known.config)


def check_machine_settings(known: Known) -> None:
    check_machine(known.config.machine.accelerator, known.config.machine.precision)


def check_places(known: Known) -> None:
    """Checks that checkpoints and data given as local paths exist."""
    config = known.config
    named = [("teacher", config.teacher.model), *(("teacher", name) for name in config.teacher.also)]
    check_models([*named, *([] if is_relative(config.student.spec) else [("student", config.student.spec)])])
    check_data(config.data.path, config.data.subset)
    if config.general.data and not is_there(config.general.data, "general.data"):
        raise InputError(
            f"general.data {config.general.data!r}: expected a file or a folder with text, found nothing there"
        )


def check_layout_settings(known: Known) -> None:
    """Checks that the layouts fit the processes and the models, and the settings that depend on layouts.

    Layouts that depend on the models' sizes in memory are not checked here.
    """
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
    """Checks that the teacher was trained for the task, and that language models have their language-modelling head."""
    own = known.teacher.task if known.teacher is not None else ""
    if own and known.task and alike(own) != alike(known.task):
        raise InputError(
            f"--task {known.task}: the teacher {known.config.teacher.model!r} was trained for {own}: its outputs have "
            "another meaning"
        )
    ends = LANGUAGE_HEADS.get(known.task)
    for facts in (known.teacher, known.student):
        if ends and facts is not None and not any(name.endswith(ends) for name in facts.architectures):
            raise InputError(
                f"model {facts.name!r}: expected a head for {known.task} ({', '.join(ends)}), found "
                f"{', '.join(facts.architectures) or 'no architecture'}: a new head would have to learn every word anew"
            )


def alike(task: str) -> str:
    """Returns a task that has the same kind of head."""
    return "text-classification" if task in PROBLEMS.values() else task


def check_task(known: Known) -> None:
    """Checks that the task supports the settings."""
    config, task = known.config, known.task
    if not task:
        return
    check_task_fits(config, task)
    kept = default_signal(task) if config.keep.signals == "auto" else config.keep.signals
    if task in LANGUAGE and config.teacher.signals == "cached" and kept != "logits":
        check_part(config.loss, kept)


def check_terms(known: Known) -> None:
    """Checks that the models have the layers that the loss refers to.

    Only encoders are checked whose feature vectors all have the width of their hidden states.
    """
    sizes = known.teacher_sizes, known.student_sizes
    kinds = [facts.config.get("model_type") for facts in (known.teacher, known.student) if facts is not None]
    if None in sizes or not known.task or known.task == "sentence-embedding" or not {*kinds} <= {*WIDE}:
        return
    teacher, student = (LayerSizes(len(each.layers), each.hidden, each.heads) for each in sizes if each is not None)
    match_layers(known.config.loss, student, teacher)


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
