"""Invalid combinations of processes and launchers, and files that they can't read."""

from distill.errors import InputError
from pipelines.settings.deepspeed_json import check_strategy
from pipelines.settings.facts import Facts
from pipelines.settings.launchers import check_launcher_package
from pipelines.settings.places import check_data, is_url, path_exists
from pipelines.settings.rules.asynchronous import check_asynchronous, check_replica_precision
from pipelines.settings.rules.rule import Check, Rule


def check_deepspeed(f: Facts) -> None:
    """Checks that DeepSpeed is installed."""
    if f.settings.machine.deepspeed:
        check_strategy(f.settings.machine.deepspeed)


def check_run_launcher(f: Facts) -> None:
    """Checks that Ray is installed where it is to start the processes, and that nothing else does.

    Raises:
        InputError: It isn't, or the strategy starts processes itself.
    """
    machine = f.settings.machine
    if machine.launcher == "ray" and machine.asynchronous:
        raise InputError(
            f"machine.launcher ray: expected a layout, DeepSpeed or no strategy, found machine.strategy "
            f"{machine.strategy}, which starts its replicas itself on this machine"
        )
    if machine.launcher == "ray" and is_url(f.settings.output):
        raise InputError(
            f"output {f.settings.output!r}: expected a folder that all nodes share with launcher ray, found a URL: its "
            "workers may be on several machines"
        )
    check_launcher_package(machine.launcher, "machine.launcher")


def check_general_text(f: Facts) -> None:
    """Checks that the general phase has text for its kind of model."""
    data = f.settings.general.data
    if data and not path_exists(data, "general.data"):
        raise InputError(f"general.data {data!r}: expected a file or a folder with text, found nothing there")


PROCESS_RULES: tuple[Rule | Check, ...] = (
    # What is stored of the teacher
    Rule(
        lambda s, f: s.keep.temperature is not None or s.keep.signals not in ("auto", "sampled", "topk", "logits"),
        "keep: expected signals sampled, topk or logits and no temperature, found {s.keep.signals} and "
        "{s.keep.temperature}: the loss determines the other signals and the temperature",
    ),
    # Processes
    Rule(
        lambda s, f: s.machine.restarts and s.machine.devices == 1 and s.machine.launcher == "torchrun",
        "machine.restarts {s.machine.restarts}: expected machine.devices of 2 or more, found 1: a single process has "
        "no parent process that could restart it",
    ),
    Check(check_run_launcher),
    Rule(
        lambda s, f: s.teacher.processes and s.teacher.processes >= f.processes,
        "teacher.processes {s.teacher.processes}: expected fewer than the {f.processes} processes, because the student "
        "needs some; start more (--devices, or torchrun)",
    ),
    Check(check_deepspeed),
    Check(check_asynchronous),
    Check(check_replica_precision, ("precision",)),
    Rule(
        lambda s, f: s.machine.deepspeed and s.student.layout not in ("auto", "replicated"),
        "machine.strategy {s.machine.strategy!r}: expected student.layout auto, found {s.student.layout!r}: DeepSpeed "
        "shards the student itself; leave one of the two out",
    ),
    # Files
    Check(lambda f: check_data(f.settings.data.path, f.settings.data.subset), ("opened",)),
    Check(check_general_text, ("opened",)),
)
