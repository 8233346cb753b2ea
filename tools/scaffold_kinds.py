"""What tools/scaffold.py writes for each kind: new files from templates, and lines in the files that name the new one.

In templates, $name is the name with underscores, $label with hyphens, $class in camel case, $title in words.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Edit:
    """Lines to insert into a file.

    Args:
        file: Path in the repository.
        anchor: A line that the file contains exactly once.
        text: Template of the lines.
        end: The lines are inserted before the first such line below the anchor; if omitted, next to the anchor.
        before: Whether they are inserted above the anchor instead of below it, if `end` is omitted.
        is_sorted: Whether the lines between anchor and end are in alphabetical order.
    """

    file: str
    anchor: str
    text: str
    end: str | None = None
    before: bool = False
    is_sorted: bool = False


@dataclass(frozen=True)
class Kind:
    """A kind of thing that can be added.

    Args:
        files: Path of each new file -> its template in tools/templates.
        edits: Lines in existing files.
        remaining: What the author has to write, a line each.
    """

    files: Mapping[str, str]
    edits: tuple[Edit, ...]
    remaining: tuple[str, ...]


LOSS_FUNCTION = """\
def $name(
    student: Float[Tensor, "rows classes"], teacher: Float[Tensor, "rows classes"], *, temperature: float = 1.0
) -> Float[Tensor, ""]:
    \"""T² · mean of ½ KL(p ‖ q) + ½ KL(q ‖ p).

    Source: to be written; this is the draft of tools/scaffold.py.
    \"""
    return _mean_softened(student, teacher, temperature, lambda p, q: 0.5 * (row_kl(p, q) + row_kl(q, p)))


"""
LOSS = Kind(
    {"tests/unit/distill/losses/test_$name.py": "loss_test.txt"},
    (
        Edit("distill/losses/logits.py", "def cross_entropy(", LOSS_FUNCTION, before=True),
        Edit(
            "distill/losses/logits.py",
            "DIVERGENCE_FUNCTIONS: dict[str, Callable[..., Tensor]] = {",
            '    "$name": $name,',
            end="}",
        ),
        Edit("distill/losses/config.py", "DIVERGENCES = (", '    "$name",', end=")  # fmt: skip"),
        Edit(
            "distill/losses/config.py",
            "    divergence: Literal[",
            '        "$name",',
            end='    ] = "forward_kl"  # fmt: skip',
        ),
        Edit("distill/losses/__init__.py", "    from distill.losses.logits import (", "        $name,", end="    )"),
        Edit("distill/losses/__init__.py", "EXPORTS = {", '    "$name": "logits",', end="}", is_sorted=True),
        Edit("distill/losses/__init__.py", "__all__ = [", '    "$name",', end="]", is_sorted=True),
        Edit(
            "tests/unit/distill/losses/test_objectives.py",
            "TEXTBOOK = {",
            '    "$name": rowwise(lambda p, q: 0.5 * (kl(p, q) + kl(q, p))),',
            end="}",
        ),
        Edit(
            "docs/reference/objectives.md",
            "| `divergence` | formula, with the teacher's p and the student's q at `temperature` | source |",
            "| `$name` | ½ KL(p ‖ q) + ½ KL(q ‖ p) | |",
            end="",
        ),
    ),
    (
        "distill/losses/logits.py: the formula of $name, its docstring, and its source (paper, section, deviation)",
        "distill/losses/compose.py: select_divergence, if $name has settings or reads labels",
        "distill/losses/config.py: the description of `divergence`",
        "tests/unit/distill/losses/test_objectives.py: the textbook version of $name in TEXTBOOK",
        "tests/unit/distill/losses/test_$name.py: its identities and limits",
        "docs/reference/objectives.md: formula and source",
    ),
)
TASK = Kind(
    {
        "distill/tasks/$name.py": "task.txt",
        "tests/unit/distill/tasks/test_$name.py": "task_test.txt",
    },
    (
        Edit(
            "distill/tasks/choose.py",
            "from distill.tasks.task import BODIES, Task",
            "from distill.tasks.$name import $class",
        ),
        Edit("distill/tasks/choose.py", "TASKS: dict[str, type[Task]] = {", '    "$label": $class,', end="}"),
        Edit(
            "distill/tasks/__init__.py",
            "    from distill.tasks.task import Task",
            "    from distill.tasks.$name import $class",
        ),
        Edit("distill/tasks/__init__.py", "EXPORTS = {", '    "$class": "$name",', end="}", is_sorted=True),
        Edit("distill/tasks/__init__.py", "__all__ = [", '    "$class",', end="]", is_sorted=True),
        Edit("pipelines/settings/commands/distill.py", "TaskName = Literal[", '    "$label",', end="]  # fmt: skip"),
        Edit(
            "pipelines/reports/wording.py",
            "WORDING = {",
            """\
    "$label": Wording(
        "model for $label", "text-classification", "texts", "labelled texts",
        Comparison("test texts", "class"), Comparison("texts", "class"),
        {
            "accuracy": "share of the texts with the correct class",
            "macro F1": "mean of the classes' F1 scores",
        },
        "classes",
    ),
""",
            end="}  # fmt: skip",
        ),
        Edit(
            "tests/integration/tasks/test_report_tasks.py",
            "SCORES = {  # (teacher's score, student's score)",
            '    "$label": {"accuracy": (0.93, 0.91), "macro F1": (0.92, 0.9)},',
            end="}",
        ),
        Edit(
            "docs/reference/tasks.md",
            "| task | data | score | students |",
            "| `$label` | a text or a pair, and a class | accuracy, macro F1 | distilled |",
            end="",
        ),
    ),
    (
        "distill/tasks/$name.py: how rows are read and encoded, the head, the score and the baseline",
        "distill/checkpoint/head_task.py: the suffix of its classes, if its head is no other task's",
        "distill/tasks/choose.py: by which columns --task auto chooses it",
        "distill/tasks/names.py: LANGUAGE_TASKS, LANGUAGE_HEADS and default_signal, if its models predict tokens or "
        "vectors",
        "pipelines/settings/commands/cache.py: CachedTask, if the cache command accepts it",
        "pipelines/settings/commands/distill.py: the description of `task`",
        "pipelines/reports/wording.py: what the report says about it",
        "tests/unit/distill/tasks/test_$name.py: rows and scores of its own",
        "docs/reference/tasks.md: its data and scores",
    ),
)
EXPORT = Kind(
    {
        "compress/export/$name.py": "export.txt",
        "tests/unit/compress/export/test_$name.py": "export_test.txt",
    },
    (
        Edit(
            "compress/export/common/targets.py",
            "FORMATS: Mapping[str, Format] = {",
            '        Format("$label", "$label", supports_quantized=False),',
            end="    )",
        ),
        Edit(
            "compress/export/write.py",
            "WRITERS: dict[str, _WriteExport] = {",
            """\
def write_$name(source: Source, target: ExportTarget, folder: Path) -> None:
    \"""Writes the target's files.\"""
    from compress.export.$name import export_$name

    export_$name(source, folder / str(target))


""",
            before=True,
        ),
        Edit("compress/export/write.py", "WRITERS: dict[str, _WriteExport] = {", '    "$label": write_$name,', end="}"),
        Edit(
            "compress/export/runtimes.py",
            "    from compress.export.common.huggingface import TorchModel",
            """\
    if runtime == "$label":
        from compress.export.$name import ${class}Model

        return ${class}Model(folder, threads)
""",
            before=True,
        ),
        Edit("pipelines/reports/formatting.py", "RUNTIMES = {", '    "$label": "$title",', end="}"),
        Edit("docs/howto/export.md", "| format | for | extra |", "| `$label` | $title | |", end=""),
    ),
    (
        "compress/export/$name.py: the file that is written, and its runtime",
        "compress/export/common/targets.py: the Format's tolerance; EXTRAS, if its library is an extra of its own",
        "compress/export/probe.py: PROBES, and supports_quantized=True in its Format, once it holds quantized models",
        "pyproject.toml: the extra, if there is one; tests/unit/test_package_boundaries.py: the file that may import "
        "its library",
        "pipelines/settings/commands/distill.py and export.py: the description of `export`",
        "pipelines/reports/formatting.py: the runtime's name",
        "tests/unit/compress/export/test_$name.py: what the format rejects",
        "docs/howto/export.md: what it is for",
    ),
)
STAGE = Kind(
    {
        "pipelines/stages/prepare/$name.py": "stage.txt",
        "tests/unit/pipelines/stages/prepare/test_$name.py": "stage_test.txt",
    },
    (
        Edit(
            "pipelines/stages/run_stages.py",
            "    from pipelines.stages.prepare.teacher import teacher_stage",
            "    from pipelines.stages.prepare.$name import ${name}_stage",
        ),
        Edit(
            "pipelines/stages/run_stages.py",
            "    students, added = train_students(run, plan, stages, precision)",
            '    stages["$label"] = ${name}_stage(run, stages["data"])',
            before=True,
        ),
        Edit(
            "pipelines/settings/plan.py",
            '        ("distill", [*student_stages(settings)]),',
            '        ("$label", ["$label"]),',
            before=True,
        ),
        Edit(
            "docs/stages.md",
            "## What is published",
            """\
## The stage $label

`$label` (`pipelines/stages/prepare/$name.py`) writes `counts.json`, the number of rows of each split.

""",
            before=True,
        ),
    ),
    (
        "pipelines/stages/prepare/$name.py: what the stage computes, and the settings and artefacts that it depends on",
        "pipelines/stages/run_stages.py, pipelines/settings/plan.py: its place, and the settings that request it",
        "tests/unit/pipelines/stages/prepare/test_$name.py: its results",
        "docs/stages.md: what it writes",
    ),
)
KINDS = {"loss": LOSS, "task": TASK, "export": EXPORT, "stage": STAGE}
