"""What starts the processes of a command."""

import importlib.util
from typing import Literal

from distill.errors import InputError

Engine = Literal["torchrun", "ray"]


def check_engine_package(engine: str, setting: str) -> None:
    """Checks that the package of an engine is installed.

    Raises:
        InputError: It isn't.
    """
    if engine == "ray" and importlib.util.find_spec("ray") is None:
        raise InputError(f"{setting} ray: Ray isn't installed: pip install -e '.[ray]', or use torchrun")
