"""What starts the processes of a command."""

import importlib.util
from typing import Literal

from distill.errors import InputError
from pipelines.settings.values import check_count

Launcher = Literal["torchrun", "ray"]


def check_launcher_package(launcher: str, setting: str) -> None:
    """Checks that the package of a launcher is installed.

    Raises:
        InputError: It isn't.
    """
    if launcher == "ray" and importlib.util.find_spec("ray") is None:
        raise InputError(f"{setting} ray: Ray isn't installed: pip install -e '.[ray]', or use torchrun")


def check_devices(devices: int, launcher: str, setting: str) -> None:
    """Checks the number of processes; Ray's may be those of a whole cluster.

    Raises:
        InputError: There are fewer than one, or more than are useful on this machine.
    """
    if devices < 1:
        raise InputError(f"{setting}: expected at least 1, found {devices}")
    if launcher != "ray":
        check_count(setting, devices)
