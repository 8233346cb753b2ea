"""Runs the project's commands as a user would, with the arguments that a benchmark passes on to them."""

import argparse
import subprocess
import sys

from pipelines.quantize import QUANTIZE_SHORT
from pipelines.settings.command_line import override_flags
from pipelines.settings.commands.distill import SHORT_OPTIONS


class PassThroughParser(argparse.ArgumentParser):
    """Parser of a benchmark that passes the arguments it doesn't know on to a command.

    None is abbreviated: `--seed 5` is the command's and not the benchmark's `--seeds`.

    Args:
        about: The module's docstring, shown by `--help` as it is written.
    """

    def __init__(self, about: str | None):
        super().__init__(description=about, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)

    def parse_options(self) -> argparse.Namespace:
        """Returns the benchmark's options, with the arguments to pass on as `more`."""
        options, more = self.parse_known_args()
        options.more = more
        return options


def run_command(module: str, *arguments: str) -> None:
    """Runs `python -m pipelines.MODULE ARGUMENTS`; of a repeated flag, the last one applies.

    Raises:
        subprocess.CalledProcessError: The command failed, after it printed why.
    """
    once = override_flags((), arguments, QUANTIZE_SHORT if module == "quantize" else SHORT_OPTIONS)
    subprocess.run([sys.executable, "-m", f"pipelines.{module}", *once], check=True)  # noqa: S603 - own command
