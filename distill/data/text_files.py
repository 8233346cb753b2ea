"""Text files that a setting names, such as a list of words."""

from pathlib import Path

from distill.errors import InputError


def read_text_file(file: Path, setting: str, consequence: str) -> str:
    """Returns the content of a file in UTF-8.

    Args:
        file: The file.
        setting: The setting that names it, for messages.
        consequence: What would follow without it, for messages.

    Raises:
        InputError: There is no such file, it can't be read, or it isn't in UTF-8.
    """
    if not file.is_file():
        raise InputError(f"{setting}: expected a file, found none at {file}: {consequence}")
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{setting} {file}: expected text in UTF-8, found {error}: {consequence}") from error
