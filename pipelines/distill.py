"""`python -m pipelines.distill`: distills a teacher into a small model, exports it and reports on it."""

from collections.abc import Sequence
from pathlib import Path

from pipelines.runs import cli
from pipelines.runs.console import Console
from pipelines.runs.launch import launch_processes
from pipelines.runs.processes import (
    FileExchange,
    count_processes,
    flatten_settings,
    is_distributed,
    is_first_process,
    join_world,
    leave_world,
)
from pipelines.runs.ray_launcher import Workers, launch_on_ray
from pipelines.settings.commands.distill import SHORT_OPTIONS, DistillConfig

# May differ between machines; the contents may not.
_PATHS = ("data.path", "data.unlabelled", "teacher.model", "general.data")
EXAMPLES = """\
  python -m pipelines.distill --config configs/demo.yaml --output runs/demo
  python -m pipelines.distill --config configs/demo.yaml --data my_texts/ --output runs/mine
  python -m pipelines.distill --teacher runs/bert --student layers=3,hidden=192,heads=6,ffn=768 \\
      --data train.csv --data.text question --data.label intent --epochs 10 --temperature 4 --output runs/small
  python -m pipelines.distill --teacher runs/bert --data my_texts/ --speedup 10 --epochs 20 --output runs/ten-times
  python -m pipelines.distill --config configs/demo.yaml --output runs/demo --dry-run
  python -m pipelines.distill --config configs/demo.yaml --devices 2 --student.layout fsdp=2 --output runs/two
  python -m pipelines.distill --config configs/layouts/teacher-processes.yaml --output runs/apart
  python -m pipelines.distill --config configs/demo.yaml --until cache --output runs/cached"""


def main(argv: Sequence[str]) -> None:
    """Runs the command with these arguments."""
    config = cli.parse(
        DistillConfig,
        argv,
        prog="pipelines.distill",
        about="Distill a teacher into a smaller student, for any supported task: fine-tune the teacher if needed, "
        "cache its signals, train a student, export, measure and report. Run the same command again to resume after a "
        "kill.",
        examples=EXAMPLES,
        short=SHORT_OPTIONS,
    )
    run_command("pipelines.distill", argv, config)


def run_command(command: str, argv: Sequence[str], settings: DistillConfig) -> None:
    """Runs all stages of a command with these arguments, on the number of processes that it requests."""
    from pipelines.runs.storage.localize import localize

    with localize(settings) as (local, files):
        run_locally(command, argv, local, files)


def run_locally(command: str, argv: Sequence[str], settings: DistillConfig, files: FileExchange | None) -> None:
    """Runs all stages of a command whose settings name folders of this machine; `files` exchanges the output's."""
    from pipelines.runs.output import check_output
    from pipelines.settings.layouts import leaves_layout_open
    from pipelines.settings.resolve import examine_settings, resolve

    if not is_distributed():  # otherwise the first process may already be writing there
        check_output(Path(settings.output))
    devices = 1 if settings.machine.asynchronous else settings.machine.devices  # else a stage starts the replicas
    on_ray = settings.machine.launcher == "ray"
    starts = (devices > 1 or on_ray) and not is_distributed()  # starts processes, or plans for them
    count = max(count_processes(), devices if starts or settings.dry_run else 1)
    if leaves_layout_open(settings, count):
        examine_settings(settings, count)
        from pipelines.planner.auto_layouts import fill_layouts

        settings = fill_layouts(settings, count)
    plan = resolve(settings, count, reads_weights=is_first_process())

    from pipelines.runs.failure_reports import explain_failures
    from pipelines.runs.stage import Run
    from pipelines.stages.cache.online_teacher import dismiss_teacher, serve_teacher
    from pipelines.stages.dry_run import show_plan
    from pipelines.stages.run_stages import reported_settings, run_to_report

    settings = plan.settings
    if starts and not settings.dry_run:
        if on_ray:
            machine = settings.machine
            workers = Workers(devices, machine.restarts, machine.threads, machine.timeout, machine.accelerator)
            launch_on_ray(command, argv, workers, Path(settings.output))
        else:
            launch_processes(command, argv, devices, settings.machine.restarts)
        return
    world = join_world(settings.machine.timeout, 0 if settings.dry_run else settings.teacher.processes, files)
    shared = reported_settings(settings) | {"until": settings.until}
    compared = flatten_settings(shared) | {"student.spec": plan.student_key}
    world.everyone.check_agreement({name: value for name, value in compared.items() if name not in _PATHS})
    with explain_failures(world.everyone):
        if world.is_teacher:
            serve_teacher(world, plan)
        else:
            run = Run(Path(settings.output), settings.seed, Console(), dry=settings.dry_run, world=world)
            run.console.say(f"  task: {plan.task} ({plan.task_reason})")
            (show_plan if settings.dry_run else run_to_report)(run, plan)
            dismiss_teacher(world)
    leave_world()


if __name__ == "__main__":
    cli.run(main)
