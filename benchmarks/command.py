"""Runs the project's commands as a user would."""

import subprocess
import sys


def command(module: str, *words: str) -> None:
    """`python -m pipelines.MODULE WORDS`.

    Raises:
        subprocess.CalledProcessError: It ended with an error, which it has told.
    """
    subprocess.run([sys.executable, "-m", f"pipelines.{module}", *words], check=True)
