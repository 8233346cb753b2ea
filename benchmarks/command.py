"""Runs the project's commands as a user would."""

import subprocess
import sys

from pipelines.quantize import OWN
from pipelines.settings.command_line import replace_words
from pipelines.settings.distill_config import SHORT


def command(module: str, *words: str) -> None:
    """`python -m pipelines.MODULE WORDS`; of a flag that is given again, as by --more, the last one counts.

    Raises:
        subprocess.CalledProcessError: It ended with an error, which it has told.
    """
    once = replace_words((), words, OWN if module == "quantize" else SHORT)
    subprocess.run([sys.executable, "-m", f"pipelines.{module}", *once], check=True)
