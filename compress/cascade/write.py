"""Writes a cascade's folder, and classifies texts with it in a fresh process."""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from compress.cascade import reader
from compress.cascade.thresholds import ChosenCascade
from compress.errors import ExportError

CASCADE_FILE = "cascade.json"
_CLASSIFY = (
    "import json, sys; from reader import Cascade; "
    "print(json.dumps([[each.label, each.member] for each in Cascade().classify(json.load(sys.stdin))]))"
)


def write_cascade(
    folder: Path,
    chosen: ChosenCascade,
    exports: Mapping[str, Path],
    temperatures: Mapping[str, float],
    *,
    labels: Sequence[str],
    multi_label: bool,
    max_lengths: Mapping[str, int],
) -> None:
    """Writes a folder for each member, `cascade.json`, and `reader.py`, which answers texts with them.

    Args:
        folder: Where to write.
        chosen: Members and thresholds.
        exports: Member -> its exported folder with `model.onnx`, which is copied.
        temperatures: Member -> temperature of its logits.
        labels: Names of the classes in the order of the logits.
        multi_label: Whether a text has any number of labels, instead of one.
        max_lengths: Member -> tokens at which its texts are cut.
    """
    folder.mkdir(parents=True, exist_ok=True)
    members = []
    for name, threshold, share in zip(chosen.order, chosen.thresholds, chosen.shares, strict=True):
        shutil.copytree(exports[name], folder / name)
        member = {"name": name, "temperature": temperatures[name], "threshold": threshold, "share": share}
        members.append(member | {"max_length": max_lengths[name]})
    content = {"labels": list(labels), "multi_label": multi_label, "members": members}
    (folder / CASCADE_FILE).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")
    shutil.copyfile(reader.__file__, folder / "reader.py")


def classify_in_subprocess(
    folder: Path, texts: Sequence[str] | Sequence[tuple[str, str]]
) -> list[tuple[str | list[str], str]]:
    """Returns (label, member that answered) for each text or pair, from the folder's own reader in a fresh process.

    Raises:
        ExportError: The process fails.
    """
    command = [sys.executable, "-c", _CLASSIFY]
    done = subprocess.run(  # noqa: S603 - Python itself, with a file that write_cascade wrote
        command, cwd=folder, input=json.dumps(list(texts)), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ExportError(f"cascade: {folder} can't be read in a fresh process:\n{done.stderr[-2000:]}")
    return [(label, member) for label, member in json.loads(done.stdout)]
