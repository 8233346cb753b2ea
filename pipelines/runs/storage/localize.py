"""Replaces the URLs in a run's settings by folders of this machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from typing import Any

from distill.errors import InputError
from pipelines.runs import stops
from pipelines.runs.console import Console
from pipelines.runs.processes import FileExchange, find_machine, is_first_on_machine, is_first_process
from pipelines.runs.storage.fetch import fetch
from pipelines.runs.storage.mirror import Mirror
from pipelines.runs.storage.shared_mirror import SharedMirror
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.places import is_url

INPUTS = ("data.path", "data.unlabelled", "teacher.model", "student.spec", "general.data")


@contextmanager
def localize(settings: DistillConfig) -> Iterator[tuple[DistillConfig, FileExchange | None]]:
    """Yields the settings with local paths: inputs are copied here first, and the output is kept at its URL.

    Beside them it yields what exchanges the output's files between several machines, if it is at a URL.

    Raises:
        InputError: A URL can't be read or written, or an output at one isn't supported with these settings.
    """
    for name in INPUTS:
        url = get_setting(settings, name)
        if isinstance(url, str) and is_url(url):
            settings = set_setting(settings, name, str(fetch(url, name)))
    machine, machines = find_machine()
    if not is_url(settings.output) or settings.machine.launcher == "ray":
        yield settings, None
    elif machines > 1:
        check_exchanged(settings)
        shared = SharedMirror(settings.output, Console(), machine, machines)
        if is_first_on_machine():
            shared.pull(writes=not settings.dry_run)
        yield replace(settings, output=str(shared.folder)), shared
        shared.console.say(f"  output: {settings.output}, and here {shared.folder}")
    else:
        mirror = Mirror(settings.output, Console())
        with keep_at_url(mirror, settings.dry_run):
            yield replace(settings, output=str(mirror.folder)), None


@contextmanager
def keep_at_url(mirror: Mirror, is_dry: bool) -> Iterator[None]:
    """Keeps the output of a run on one machine at its URL; the first process, or the one that started it, does so."""
    if is_dry:
        mirror.pull(writes=False)
    if is_dry or stops.is_launched() or not is_first_process():
        yield
        return
    mirror.pull()
    with mirror.keep_pushed():
        yield


def check_exchanged(settings: DistillConfig) -> None:
    """Checks that several machines can exchange the files of a run.

    Raises:
        InputError: They can't.
    """
    reasons = {
        "teacher.processes": (
            settings.teacher.processes,
            "a teacher on processes of its own reads the students' folder",
        ),
        "strategy": (settings.machine.deepspeed, "DeepSpeed's checkpoints need a folder that all processes see"),
    }
    for name, (is_set, reason) in reasons.items():
        if is_set:
            raise InputError(
                f"output {settings.output!r}: expected a folder that all machines share, found a URL together with "
                f"{name}: {reason}: write to a shared file system (NFS, EFS, Lustre, Filestore, JuiceFS), or leave "
                f"{name} out"
            )


def get_setting(settings: Any, name: str) -> object:
    """Returns a setting by its dotted name."""
    for part in name.split("."):
        settings = getattr(settings, part)
    return settings


def set_setting(settings: Any, name: str, value: object) -> Any:
    """Returns settings with another value under a dotted name."""
    first, _, rest = name.partition(".")
    assert is_dataclass(settings)
    return replace(settings, **{first: set_setting(getattr(settings, first), rest, value) if rest else value})  # type: ignore[type-var]
