"""Replaces the URLs in a run's settings by folders of this machine."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from typing import Any

from distill.errors import InputError
from pipelines.runs import stops
from pipelines.runs.console import Console
from pipelines.runs.processes import is_distributed, is_first_process
from pipelines.runs.storage.fetch import fetch
from pipelines.runs.storage.mirror import Mirror
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.places import is_url

INPUTS = ("data.path", "data.unlabelled", "teacher.model", "student.spec", "general.data")


@contextmanager
def localize(settings: DistillConfig) -> Iterator[DistillConfig]:
    """Yields the settings with local paths: inputs are copied here first, and the output is kept at its URL.

    Raises:
        InputError: A URL can't be read or written, or a run of several machines has an output at one.
    """
    for name in INPUTS:
        url = get_setting(settings, name)
        if isinstance(url, str) and is_url(url):
            settings = set_setting(settings, name, str(fetch(url, name)))
    if not is_url(settings.output) or settings.machine.engine == "ray":
        yield settings
        return
    check_one_machine(settings.output)
    mirror = Mirror(settings.output, Console())
    settings = replace(settings, output=str(mirror.folder))
    if stops.is_launched() or not is_first_process() or settings.dry_run:
        if settings.dry_run:
            mirror.pull(writes=False)
        yield settings
        return
    mirror.pull()
    with mirror.keep_pushed():
        yield settings


def check_one_machine(output: str) -> None:
    """Checks that all processes are on one machine.

    Raises:
        InputError: They aren't.
    """
    here, size = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("WORLD_SIZE", "1"))
    if is_distributed() and here < size:
        raise InputError(
            f"output {output!r}: expected a folder that all machines share, found a URL for {size} processes of which "
            f"{here} are here: write to a shared file system (NFS, EFS, Lustre, Filestore, JuiceFS) and copy the "
            "finished folder to the store, or run on one machine"
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
