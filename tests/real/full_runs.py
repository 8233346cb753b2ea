"""A working directory in which documented commands run in full: the checkout's recipes and data, and novels."""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from real.documents import ROOT
from real.execution import Done, execute
from support.reports import report_of

NOVELS = ROOT.parent / "shared" / "data" / "eltec_eng"  # not shipped: 26 MB
LIMIT = 3 * 3600  # seconds; a full run takes a quarter of an hour on an idle core


@dataclass(frozen=True)
class FullRun:
    """A finished command and what it left in its output folder."""

    done: Done
    output: Path

    @property
    def report(self) -> dict[str, Any]:
        return report_of(self.output)

    def entry(self, name: str, runtime: str = "onnxruntime", precision: str = "fp32") -> dict[str, Any]:
        """Returns the report's entry of a model in one runtime."""
        wanted = (name, runtime, precision)
        return next(e for e in self.report["models"] if (e["name"], e["runtime"], e["precision"]) == wanted)

    def folder(self, name: str) -> Path:
        """Returns the checkpoint that `from_pretrained` loads: the teacher's, or a published student's."""
        published = self.output / name
        is_published = (published / "config.json").is_file()  # the teacher's folder of this name holds its stage
        return published if is_published else self.output.parent.parent / self.entry(name, "pytorch")["path"]


class FullRuns:
    """Runs each command once, unreduced, in one working directory, where a run finds what earlier runs left.

    Args:
        folder: The working directory; stages of an earlier run in it are skipped.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.runs: dict[str, FullRun] = {}
        folder.mkdir(parents=True, exist_ok=True)
        names = ("configs", "benchmarks", "examples", "Makefile", "pyproject.toml", "constraints.txt")
        links = {name: ROOT / name for name in names}
        for name, target in (links | {".venv": Path(sys.executable).parent.parent}).items():
            if not (folder / name).exists():
                (folder / name).symlink_to(target)

    def run(self, line: str) -> FullRun:
        """Runs a command, which must succeed, or returns its earlier result.

        `*` in the command stands for the one name that is there, such as a stage's key.
        """
        if line not in self.runs:
            done = execute(line, self.folder, LIMIT)
            assert done.code == 0, done.output
            assert "Traceback" not in done.output, done.output
            named = re.search(r"--output (\S+)", line)
            self.runs[line] = FullRun(done, self.folder / (named[1] if named else "runs/demo"))
        return self.runs[line]

    def only(self, pattern: str) -> Path:
        """Returns the only path that matches the pattern."""
        (path,) = self.folder.glob(pattern)
        return path

    def extract_novels(self, name: str, characters: int) -> None:
        """Writes the middle of each English novel of ELTeC-eng to train.parquet and dev.parquet of a folder."""
        if not (self.folder / name).exists():
            (self.folder / name).mkdir()
            for split in ("train", "dev"):
                texts = [text[max(0, len(text) - characters) // 2 :][:characters] for text in novels(split)]
                pq.write_table(pa.table({"text": texts}), self.folder / name / f"{split}.parquet")


def novels(split: str) -> Iterator[str]:
    for batch in pq.ParquetFile(NOVELS / f"{split}.parquet").iter_batches(8, columns=["text"]):
        yield from batch["text"].to_pylist()
