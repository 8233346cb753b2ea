"""Runs the project's commands as a user would."""

import subprocess
import sys

from pipelines.quantize import QUANTIZE_SHORT
from pipelines.settings.command_line import override_flags
from pipelines.settings.commands.distill import SHORT_OPTIONS


def run_command(module: str, *arguments: str) -> None:
    """Runs `python -m pipelines.MODULE ARGUMENTS`; of a repeated flag, the last one applies.

    Raises:
        subprocess.CalledProcessError: The command failed, after it printed why.
    """
    once = override_flags((), arguments, QUANTIZE_SHORT if module == "quantize" else SHORT_OPTIONS)
    subprocess.run([sys.executable, "-m", f"pipelines.{module}", *once], check=True)  # noqa: S603 - own command
