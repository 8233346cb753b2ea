"""`python -m pipelines.distill`: distils a teacher into a small model, exports it and reports on it."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.errors import InputError
from pipelines.runs import cli
from pipelines.runs.console import Console
from pipelines.runs.launch import launch
from pipelines.runs.processes import flat, is_first, join_world, launched, leave_world, processes
from pipelines.settings.distill_config import SHORT, DistillConfig

if TYPE_CHECKING:
    from compress.export.common.targets import Target
    from pipelines.runs.stage import Artefact, Run
    from pipelines.settings.layouts import Layouts
    from pipelines.stages.students import Trained

PATHS = ("data.path", "data.unlabelled", "teacher.model")  # may differ between machines; the contents may not
BLOCKS = 8  # maximum number of blocks for comparing a language model's exports; each has tens of megabytes of logits
EXAMPLES = """\
  python -m pipelines.distill --config configs/demo.yaml --output runs/demo
  python -m pipelines.distill --teacher bert-base-uncased --student distilbert --data my_texts/ --output runs/mine
  python -m pipelines.distill --teacher runs/bert --student layers=3,hidden=192,heads=6,ffn=768 \\
      --data train.csv --data.text question --data.label intent --epochs 10 --temperature 4 --output runs/small
  python -m pipelines.distill --teacher runs/bert --data my_texts/ --speedup 10 --epochs 20 --output runs/ten-times
  python -m pipelines.distill --config configs/demo.yaml --output runs/demo --dry-run
  python -m pipelines.distill --config configs/demo.yaml --devices 2 --student.layout fsdp=2 --output runs/two
  python -m pipelines.distill --config configs/layouts/teacher-ranks.yaml --output runs/apart
  python -m pipelines.distill --config configs/demo.yaml --until cache --output runs/cached"""


def main(argv: Sequence[str]) -> None:
    config = cli.parse(
        DistillConfig,
        argv,
        prog="pipelines.distill",
        about="Distil a model of any task: fine-tune the teacher if needed, cache its signals, train a student, "
        "export, measure and report. Run the same command again to go on after a kill.",
        examples=EXAMPLES,
        short=SHORT,
    )
    run_command("pipelines.distill", argv, config)


def run_command(command: str, argv: Sequence[str], config: DistillConfig) -> None:
    """Runs all stages of a command with these arguments, on the number of processes that it requests."""
    from pipelines.runs.output import check_output
    from pipelines.settings.machine_facts import check_accelerator
    from pipelines.settings.rules import check_run

    if not launched():  # otherwise the first process may already be writing there
        check_output(Path(config.output))
    starts = config.machine.devices > 1 and not launched()  # starts processes, or plans for them
    count = max(processes(), config.machine.devices if starts or config.dry_run else 1)
    check_run(config, count)  # checks that don't need torch, which takes seconds to import

    from pipelines.runs.stage import Run
    from pipelines.runs.watchdog import explain_failures
    from pipelines.settings.layouts import layouts_of
    from pipelines.settings.task_settings import resolve_task
    from pipelines.stages.online_teacher import dismiss_teacher, serve_teacher

    check_accelerator(config.machine.accelerator)
    config, why = resolve_task(config)
    source = check_inputs(config)
    layouts = layouts_of(config, source, count)
    if starts and not config.dry_run:
        launch(command, argv, config.machine.devices, config.machine.restarts)
        return
    world = join_world(config.machine.timeout, 0 if config.dry_run else config.teacher.ranks)
    asked = settings_of(config) | {"until": config.until}
    world.everyone.agree({name: value for name, value in flat(asked).items() if name not in PATHS})
    with explain_failures(world.everyone):
        if world.teaches:
            serve_teacher(world, config, layouts.teacher)
        else:
            run = Run(Path(config.output), config.seed, Console(), dry=config.dry_run, world=world)
            run.console.say(f"  task: {config.task} ({why})")
            (show_plan if config.dry_run else finish)(run, config, source, layouts)
            dismiss_teacher(world)
    leave_world()


def check_inputs(config: DistillConfig) -> Path:
    """Returns the teacher's folder, after all checks that are possible before the first long stage.

    Raises:
        InputError: The models, data or settings can't be used together.
    """
    from compress.prune.slicing.checkpoint import register_pruned
    from distill.checkpoint.config import load_config
    from distill.checkpoint.folder import checkpoint_folder
    from distill.checkpoint.tokenizer import check_fast
    from distill.losses.config import check_part, match_layers
    from distill.student.spec import is_relative
    from distill.tasks.choose import TASKS
    from distill.tasks.names import LANGUAGE
    from distill.train.module import sizes_of
    from distill.train.steps.progressive import check_turns
    from pipelines.settings.task_settings import check_lengths, check_task_fits, check_tokenizer_of, check_tokenizers
    from pipelines.stages.ensemble import check_teachers
    from pipelines.stages.general import check_general
    from pipelines.stages.label_order import check_in_float
    from pipelines.stages.online_teacher import config_of_student

    source = checkpoint_folder(config.teacher.model)
    register_pruned(source)
    if config.quantize.scheme:
        check_in_float(source, "teacher")
    teacher, task = load_config(source, "teacher"), config.task
    check_task_fits(config, task)
    kind = TASKS[task](())
    kind.check(teacher, config.teacher.model)
    tokenizer = check_tokenizer_of(source, "teacher", kind)
    check_fast(tokenizer, "teacher", "the student's could not be compared with it")
    kind.check_weights(source, "teacher", new_head=task not in LANGUAGE, finite=is_first())
    if not is_relative(config.student.spec):
        folder = checkpoint_folder(config.student.spec, "student")
        register_pruned(folder)
        kind.check(load_config(folder, "student"), config.student.spec)
        check_tokenizers(config, tokenizer, check_tokenizer_of(folder, "student", kind))
        new_head = task not in LANGUAGE and not config.student.given
        kind.check_weights(folder, "student", new_head=new_head, finite=is_first())
        if config.quantize.scheme:
            check_in_float(folder, "student")
    check_teachers(config.teacher, config.loss, source)
    if config.general.data:
        check_general(config, source)
        own = sizes_of(config_of_student(config, source))
        taught = match_layers(config.general.loss, own, sizes_of(teacher))
        if config.general.progressive:
            check_turns(taught, own.layers)
    kept = TASKS[task].kept if config.keep.signals == "auto" else config.keep.signals
    if task in LANGUAGE and config.teacher.signals == "cached" and kept != "logits":
        check_part(config.loss, kept)
    match_layers(config.loss, sizes_of(config_of_student(config, source)), sizes_of(teacher))
    check_lengths(config, source)
    return source


def run_stages(
    run: "Run", config: DistillConfig, source: Path, layouts: "Layouts"
) -> tuple[dict[str, "Artefact"], list["Trained"]]:
    """Runs all stages in order up to the evaluation, or to the last one requested.

    Returns:
        (stage name -> artefact, the students)
    """
    from distill.train.module import sizes_of
    from pipelines.runs.stage import content_hash
    from pipelines.settings.task_settings import how_of_run
    from pipelines.stages.cache import cache_stage
    from pipelines.stages.data import data_stage
    from pipelines.stages.ensemble import ensemble_stage
    from pipelines.stages.general import general_stage
    from pipelines.stages.online_teacher import config_of_student
    from pipelines.stages.precision import chosen_precision
    from pipelines.stages.students import check_schedule, train_students
    from pipelines.stages.teacher import teacher_stage
    from pipelines.stages.teacher_answers import answers_stage

    made: dict[str, Artefact] = {}
    digest, task = content_hash(source), config.task
    made["data"] = data_stage(run, config.data, task, how_of_run(config, task))
    precision = chosen_precision(run, config, source, made["data"], layouts.student)
    check_schedule(config, precision, layouts)
    if config.general.data:
        made["general"] = general_stage(run, config, source, digest, precision, layouts)
    if config.until == "general":
        return made, []
    made["teacher"] = teacher_stage(run, config, source, digest, made["data"], precision, layouts.tuned)
    if config.until == "teacher":
        return made, []
    if config.sequences.share:
        made["answers"] = answers_stage(run, config, made["data"], made["teacher"])
        made["data"] = made["answers"]
    if config.loss.needs_teacher and config.teacher.signals == "cached":
        own = sizes_of(config_of_student(config, source))
        asked = made["teacher"]
        if config.teacher.also:
            made["ensemble"] = asked = ensemble_stage(run, config, made["data"], made["teacher"], precision, layouts)
        made["cache"] = cache_stage(run, config, made["data"], asked, own, layouts.teacher)
    if config.until == "cache":
        return made, []
    students, stages = train_students(run, config, made, precision, layouts)
    made |= stages
    if config.until != "distill":
        made |= export_and_evaluate(run, config, made, students)
    return made, students


def export_and_evaluate(
    run: "Run", config: DistillConfig, made: dict[str, "Artefact"], students: Sequence["Trained"]
) -> dict[str, "Artefact"]:
    from distill.tasks.language import Language
    from pipelines.settings.schemes import is_dynamic_reduced
    from pipelines.stages.compared_texts import as_plain_texts
    from pipelines.stages.data import read_data, read_task
    from pipelines.stages.evaluate import Candidate, evaluate_stage
    from pipelines.stages.export import export_stage
    from pipelines.stages.teacher import MODEL

    waiting = next((each.made for each in students if each.made.digest is None), None)
    if waiting is not None:
        for name in ("export-teacher", *(f"export{each.suffix}" for each in students), "evaluate", "report"):
            run.planned(name)
        return {}
    splits, task = read_data(made["data"]), read_task(made["data"])
    exports, candidates = {}, []
    wanted = [("export-teacher", "teacher", made["teacher"], forms_of_teacher(config), scored_target(config))]
    wanted += [
        (
            f"export{each.suffix}",
            each.name,
            each.made,
            student_targets(config, each.scheme),
            scored_target(config, each),
        )
        for each in students
    ]
    for stage, name, model, targets, judged in wanted:
        exports[stage] = export_stage(
            run,
            stage,
            model,
            model.folder / MODEL,
            as_plain_texts(splits.test),
            parity=min(config.measure.parity, BLOCKS) if isinstance(task, Language) else config.measure.parity,
            max_length=config.data.max_length,
            targets=targets,
            reduced=is_dynamic_reduced(config),
        )
        candidates.append(Candidate(name, model.name, exports[stage], judged))
    done = evaluate_stage(run, candidates, splits, made["data"], config.measure, config.data.max_length, task)
    return exports | {"evaluate": done}


def forms_of_teacher(config: DistillConfig) -> list["Target"]:
    """Returns the teacher's export targets, for the comparison: all float targets of the students."""
    from compress.export.common.targets import Target, formats_of
    from pipelines.stages.export import ALWAYS

    asked = config.budget.asked and config.budget.runtime != "pytorch"
    names = [*formats_of(config.export), *([config.budget.runtime] if asked else [])]
    return list(dict.fromkeys((*ALWAYS, *(Target(name) for name in names if Target(name).kind.floats))))


def student_targets(config: DistillConfig, scheme: str = "") -> list["Target"]:
    """Returns a student's export targets: float targets and, if `scheme` is given, the formats that support it.

    Those formats are exported in float too, so that the report shows the gain of quantization on each runtime.
    """
    from compress.export.common.targets import Target, formats_of
    from compress.quantize.schemes import scheme_of
    from distill.tasks.names import WRITING
    from pipelines.settings.schemes import is_dynamic, schemes_of
    from pipelines.stages.export import HUGGINGFACE, rounded_targets

    floats, schemes = forms_of_teacher(config), schemes_of(config)
    if config.task in WRITING and "onnx" in formats_of(config.export):
        floats.append(Target("onnx-decoder"))
    if not scheme:
        return [*floats, *([Target("onnxruntime", "int8")] if is_dynamic(config) else [])]
    taken = rounded_targets(schemes[scheme], scheme_of(scheme).precision)
    if scheme != next(iter(schemes)):  # a student in addition to the main one
        floats = [HUGGINGFACE, *(Target(each.format) for each in taken if each.kind.floats)]
    others = {name for each, names in schemes.items() if each != scheme for name in names}
    return [*(each for each in floats if each.format not in others), *taken]


def finish(run: "Run", config: DistillConfig, source: Path, layouts: "Layouts") -> None:
    """Runs all stages, then writes the report and prints where the results are."""
    from pipelines.runs.publication import check_publishable
    from pipelines.runs.stage import write_json
    from pipelines.stages.data import read_task
    from pipelines.stages.export import check_refused
    from pipelines.stages.report import REPORT, STUDENT, publish, report_stage, show

    if run.world.is_rank_zero:
        check_publishable(run.output / STUDENT)
        write_json(run.output / "config.json", asdict(config))
    made, students = run_stages(run, config, source, layouts)
    if config.until != "report":
        rows = [(name, f"{stage.manifest['wall_seconds']:.1f}", str(stage.folder)) for name, stage in made.items()]
        run.console.table("Made", ("stage", "seconds", "where"), rows)
        return
    report = report_stage(run, settings_of(config), read_task(made["data"]), made["evaluate"])
    exports = {each.name: made[f"export{each.suffix}"] for each in students}
    if run.world.is_rank_zero:
        places = publish(run, report, exports)
        show(run.console, json.loads((report.folder / REPORT).read_text()), places)
    check_scores(config, made["evaluate"])
    check_refused(list(exports.values()))


def scored_target(config: DistillConfig, student: "Trained | None" = None) -> "Target | None":
    """Returns the export target of a student, or of the teacher, to which the budget's minimum score applies."""
    from pipelines.stages.budget_timing import target_for

    if not (config.budget.asked and config.budget.min_score):
        return None
    wanted = target_for(config.budget, teacher=student is None)
    forms = student_targets(config, student.scheme) if student is not None else [wanted]
    return wanted if wanted in forms else forms[-1]


def check_scores(config: DistillConfig, evaluation: "Artefact") -> None:
    """Checks that the deployed students preserve the requested share of the teacher's validation score.

    The students' files are retained either way.

    Raises:
        InputError: A student preserves less; the message names all such students.
    """
    from pipelines.reports.steps_text import shares_kept

    least = config.budget.min_score
    if not (config.budget.asked and least):
        return
    kept = shares_kept(json.loads((evaluation.folder / "evaluation.json").read_text()))
    if not kept:
        raise InputError(
            f"budget.min_score {least:g}: expected the teacher's file on {config.budget.runtime} to compare with, "
            "found none that was proven: nothing says what was kept"
        )
    missed = [f"{name} keeps {share:.1%}" for name, share in kept.items() if share < least]
    if missed:
        reached = [f"{name} keeps {share:.1%}" for name, share in kept.items() if share >= least]
        raise InputError(
            f"budget.min_score {least:g}: of the teacher's score on the validation split {', '.join(missed)}. "
            "Everything was written all the same; it would take a lower speed, more epochs or more text "
            "(--data.unlabelled)" + (f"; {reached[-1]}" if reached else "")
        )


def settings_of(config: DistillConfig) -> dict[str, Any]:
    """Returns the configuration as shown in the report."""
    from pipelines.settings.schemes import resolved_reduced

    settings = {name: value for name, value in asdict(config).items() if name not in ("output", "until", "dry_run")}
    return settings | {"quantize": settings["quantize"] | {"reduced": resolved_reduced(config)}}


def show_plan(run: "Run", config: DistillConfig, source: Path, layouts: "Layouts") -> None:
    """Prints the stages with their planned actions, and the estimated sizes."""
    from pipelines.stages.dry_run import planned_sizes

    run_stages(run, config, source, layouts)
    run.console.table("Plan", ("stage", "what would happen", "where"), run.plan)
    run.console.table("Sizes", ("what", "size"), planned_sizes(config, source, config.task))
    run.console.say("dry run: nothing was written")


if __name__ == "__main__":
    cli.run(main)
