"""Adds a draft of a new loss, task, export target or stage, with its test and its place in the documentation.

Examples:
  python tools/scaffold.py loss symmetric_kl       a divergence for --loss.divergence
  python tools/scaffold.py task intent_detection   --task intent-detection
  python tools/scaffold.py export core_ml          --export core-ml
  python tools/scaffold.py stage count_tokens      a stage of every run, between cache and distill

The draft works and passes its test, so that each change to it can be tried at once. The script prints the files that it
wrote and what remains to be written by hand. It writes nothing, and exits with code 2, if the name is in use or isn't a
lower-case Python identifier.
"""

import argparse
import keyword
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

from scaffold_kinds import KINDS, Edit, Kind

ROOT = Path(__file__).parents[1]
TEMPLATES = Path(__file__).parent / "templates"
GENERATED = ("settings_reference.py", "architecture.py")  # scripts that write pages from the code


class ScaffoldError(Exception):
    """A name that can't be used, or a file in which the place to register it wasn't found."""


def main(argv: Sequence[str]) -> int:
    """Adds a component with these arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=list(KINDS), help="what to add")
    parser.add_argument("name", metavar="NAME", help="its name, in lower case with underscores")
    options = parser.parse_args(argv)
    kind, title = KINDS[options.kind], f"scaffold {options.kind} {options.name}"
    try:
        check_identifier(options.name)
        fields = build_fields(options.name)
        check_unused(kind, fields)
        texts = build_texts(kind, fields)
    except ScaffoldError as error:
        print(f"error: {title}: {error}; nothing was written", file=sys.stderr)
        return 2
    for path, text in texts.items():
        path.write_text(text)
    finish(list(texts))
    print("Written:", *(f"  {path.relative_to(ROOT)}" for path in texts), sep="\n")
    print("To be written by hand:", *(f"  {fill(line, fields)}" for line in kind.remaining), sep="\n")
    return 0


def check_identifier(name: str) -> None:
    """Checks that a name can be that of a file and of a function.

    Raises:
        ScaffoldError: It can't.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]", name) or keyword.iskeyword(name):
        raise ScaffoldError(
            f"expected a lower-case Python identifier, such as symmetric_kl, found {name!r}: no file and no function "
            "could have this name"
        )


def build_fields(name: str) -> dict[str, str]:
    """Returns the values of the templates' fields, for `core_ml`: core_ml, core-ml, CoreMl, Core ml."""
    words = name.split("_")
    return {
        "name": name,
        "label": name.replace("_", "-"),
        "class": "".join(word.capitalize() for word in words),
        "title": " ".join(words).capitalize(),
    }


def check_unused(kind: Kind, fields: Mapping[str, str]) -> None:
    """Checks that no file or registered name is that of the new thing.

    Raises:
        ScaffoldError: One is.
    """
    new = [ROOT / fill(path, fields) for path in kind.files]
    existing = next((each for path in new for each in (path, path.with_suffix("")) if each.exists()), None)
    if existing is None:
        marks = [f'"{fields["name"]}"', f'"{fields["label"]}"', f"def {fields['name']}("]
        registries = [ROOT / edit.file for edit in kind.edits if edit.file.endswith(".py")]
        existing = next((file for file in registries if any(mark in read_text(file) for mark in marks)), None)
    if existing is not None:
        raise ScaffoldError(
            f"expected a name that isn't in use, found it in {existing.relative_to(ROOT)}: the existing code would be "
            "overwritten or hidden"
        )


def build_texts(kind: Kind, fields: Mapping[str, str]) -> dict[Path, str]:
    """Returns the new text of each file to write.

    Raises:
        ScaffoldError: The place of an edit wasn't found.
    """
    texts = {
        ROOT / fill(path, fields): fill((TEMPLATES / template).read_text(), fields)
        for path, template in kind.files.items()
    }
    for edit in kind.edits:
        path = ROOT / edit.file
        text = texts[path] if path in texts else read_text(path)
        texts[path] = insert_text(text, edit, fill(edit.text, fields))
    return texts


def read_text(path: Path) -> str:
    """Returns the content of a text file."""
    if not path.is_file():
        raise ScaffoldError(
            f"expected {path.relative_to(ROOT)}, which names all of its kind, found no such file: nothing would use "
            "the new one; correct tools/scaffold_kinds.py"
        )
    return path.read_text()


def insert_text(text: str, edit: Edit, added: str) -> str:
    """Returns a file's text with `added` in the place that the edit names.

    Raises:
        ScaffoldError: The anchor isn't exactly one line of the text, or the end isn't below it.
    """
    lines = text.splitlines()
    count = lines.count(edit.anchor)
    if count != 1:
        raise ScaffoldError(
            f"{edit.file}: expected the line {edit.anchor.strip()!r} once, found it {count} times: the place to "
            "register the name is unknown; correct tools/scaffold_kinds.py"
        )
    first = lines.index(edit.anchor) + 1
    if edit.end is None:
        index = first - 1 if edit.before else first
        return "\n".join([*lines[:index], *added.splitlines(), *lines[index:], ""])
    if edit.end not in lines[first:]:
        raise ScaffoldError(
            f"{edit.file}: expected the line {edit.end.strip()!r} below {edit.anchor.strip()!r}, found none: the place "
            "to register the name is unknown; correct tools/scaffold_kinds.py"
        )
    last = lines.index(edit.end, first)
    block = [*lines[first:last], *added.splitlines()]
    return "\n".join([*lines[:first], *(sorted(block) if edit.is_sorted else block), *lines[last:], ""])


def fill(text: str, fields: Mapping[str, str]) -> str:
    """Returns a template with its fields filled in."""
    return Template(text).substitute(fields)


def finish(files: Sequence[Path]) -> None:
    """Sorts the imports of the written files, formats them, and writes the pages that are generated from the code."""
    python = [str(file) for file in files if file.suffix == ".py"]
    run_python("-m", "ruff", "check", "--quiet", "--select", "I", "--fix", *python)
    run_python("-m", "ruff", "format", "--quiet", *python)
    for script in GENERATED:
        run_python(f"tools/{script}")


def run_python(*arguments: str) -> None:
    """Runs Python with these arguments at the root of the project."""
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
