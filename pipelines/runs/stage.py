"""Stages: functions of (inputs, config, seed, version) that write a folder with a manifest.

A complete stage is skipped, and a killed stage is resumed.
"""

import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

from compress.measure.memory import peak_memory, reset_peak_memory
from distill.errors import InputError
from pipelines.runs.console import Console
from pipelines.runs.files import content_hash as content_hash
from pipelines.runs.files import replacing as replacing
from pipelines.runs.files import write_json
from pipelines.runs.manifest import LOGS as LOGS
from pipelines.runs.manifest import (
    MANIFEST,
    SCRATCH,
    ManifestError,
    complete_manifest,
    digest_of,
    digest_of_outputs,
    outputs_of,
    seal,
    set_aside,
)
from pipelines.runs.manifest import sha256 as sha256
from pipelines.runs.output import check_output, check_still_there, open_output
from pipelines.runs.processes import World, flat

REMOVAL_SECONDS = 1.0  # wait, because a removal of the output may still be deleting its files one by one
PACKAGES = ("stillroom", "torch", "transformers", "lightning", "datasets", "onnx", "onnxruntime", "numpy")


@dataclass(frozen=True)
class Artefact:
    """A complete stage, or a stage that a dry run would have to build (`digest` None)."""

    name: str
    folder: Path
    digest: str | None
    manifest: Mapping[str, Any]
    skipped: bool = False

    @property
    def metrics(self) -> Mapping[str, Any]:
        return self.manifest.get("metrics", {})


class Run:
    """The stages of one output folder.

    Args:
        output: Folder of the run; created if missing.
        seed: Part of every seeded stage's key.
        console: Console that shows the progress.
        dry: Only plan: no folder is created and no stage runs.
        world: The processes that work on the run together; the first one manages the folder.

    Raises:
        InputError: The folder contains other files, can't be written, or another process is writing to it.
    """

    def __init__(self, output: Path, seed: int, console: Console, *, dry: bool = False, world: World | None = None):
        self.output, self.seed, self.console, self.dry = output, seed, console, dry
        self.world = world or World()
        self.done: list[Artefact] = []
        self.plan: list[tuple[str, str, str]] = []  # (stage, planned action, folder)
        self.lock: Any = None
        if self.world.is_rank_zero:
            check_output(output)
        if self.world.is_rank_zero and not dry:
            self.lock, older = open_output(output)
            if older:
                console.say(
                    f"output {str(output)!r}: its stages were made by an older Stillroom, whose manifests don't name "
                    "the versions of their algorithms; they stay, and every stage is made anew beside them"
                )
        self.world.check_folder(output)

    def stage(
        self,
        name: str,
        config: Mapping[str, Any],
        inputs: Mapping[str, Any],
        work: Callable[[Path], dict[str, Any]],
        *,
        version: int,
        together: bool = False,
        seeded: bool = True,
    ) -> Artefact:
        """Returns the complete stage: an existing one, or one built by `work(folder)`, which returns the metrics.

        `work` writes to the folder that is passed to it, may store checkpoints in the folder's `scratch`, and is called
        again with the same folder after a kill.

        Args:
            name: Name of the stage, and of the folder with its results.
            config: Settings that the result depends on.
            inputs: Artefacts of earlier stages, or content hashes.
            work: Function that builds the stage.
            version: Version of the algorithm in `work`, a constant next to it. Bump it when the same settings and
                inputs give a different result, so that finished runs rebuild the stage.
            together: All processes call `work`, and the first one's metrics are recorded; otherwise only the first
                calls it and the others wait.
            seeded: The result depends on the run's seed.

        Raises:
            InputError: Files of the finished stage were changed, or the folder was removed while `work` ran.
        """
        digests = {k: v.digest if isinstance(v, Artefact) else v for k, v in inputs.items()}
        if None in digests.values():
            return self.planned(name)
        wanted = {"stage": name, "version": version, "config": dict(config), "inputs": digests}
        wanted |= {"seed": self.seed} if seeded else {}
        self.world.agree(flat(wanted, f"stage {name}, "))
        folder = self.output / name / key_of(wanted)
        manifest, damage = self.world.broadcast(self._found(folder, wanted) if self.world.is_rank_zero else None)
        skipped = manifest is not None
        if manifest is None and self.dry:
            what = "will go on" if partial_of(folder).exists() else "will run"
            return self.planned(name, folder, f"will be made again: it {damage}" if damage else what)
        if manifest is None:
            read = [stage.folder for stage in inputs.values() if isinstance(stage, Artefact)]
            manifest = self._make(folder, wanted, work, together, read)
        else:
            self.console.say(f"{name}: done before, skipped ({folder})")
            self.plan.append((name, "done, will be skipped", str(folder)))
        artefact = Artefact(name, folder, manifest["digest"], manifest, skipped)
        self.done.append(artefact)
        return artefact

    def planned(self, name: str, folder: Path | None = None, what: str = "will run") -> Artefact:
        """Records and returns a stage that a dry run would have to build."""
        folder = folder or self.output / name
        self.plan.append((name, what, str(folder)))
        return Artefact(name, folder, None, {})

    def _found(self, folder: Path, wanted: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str]:
        """Returns (manifest of the finished stage, ""), or (None, the reason why it has to be rebuilt).

        The reason is empty if there is no folder. A damaged folder is renamed, except in a dry run.
        """
        if not self.dry:
            check_still_there(self.output)
        if not os.path.lexists(folder):
            return None, ""
        try:
            return complete_manifest(folder, wanted), ""
        except ManifestError as damage:
            if not self.dry:
                aside = set_aside(folder)
                self.console.say(
                    f"{wanted['stage']}: {str(folder)!r} {damage}: nothing says what else is in it, so it is made "
                    f"again; what was there is in {str(aside)!r}"
                )
            return None, str(damage)

    def _make(
        self,
        folder: Path,
        wanted: dict[str, Any],
        work: Callable[[Path], dict[str, Any]],
        together: bool,
        read: Sequence[Path],
    ) -> dict[str, Any]:
        partial, leads = partial_of(folder), self.world.is_rank_zero
        if self.world.broadcast(is_finished(partial, wanted) if leads else None):
            return self.world.broadcast(finalize_stage(partial, folder) if leads else None)
        resumed = partial.exists()
        self.console.say(f"{wanted['stage']}: {'going on' if resumed else 'started'} ({folder})")
        if leads:
            make_partial(partial)
        self.world.barrier()
        reset_peak_memory()
        start = time.perf_counter()
        with self._watched([partial / SCRATCH, *read]):
            metrics = work(partial) if leads or together else {}
            memory = self.world.gather(peak_memory())
            if leads:
                check_still_there(self.output)
                if not (partial / SCRATCH).is_dir():
                    raise FileNotFoundError(f"{partial} was removed while the stage ran")
                made = self._manifest(partial, wanted, metrics, time.perf_counter() - start, resumed, memory)
                write_json(partial / MANIFEST, made)
        return self.world.broadcast(finalize_stage(partial, folder) if leads else None)

    def _manifest(
        self,
        partial: Path,
        wanted: Mapping[str, Any],
        metrics: Mapping[str, Any],
        seconds: float,
        resumed: bool,
        memory: Sequence[int],
    ) -> dict[str, Any]:
        outputs = outputs_of(partial)
        return seal(
            {
                **wanted,
                "versions": {"python": platform.python_version()} | {name: package_version(name) for name in PACKAGES},
                "outputs": outputs,
                "digest": digest_of_outputs(outputs),
                "metrics": metrics,
                "wall_seconds": round(seconds, 3),
                "resumed": resumed,
                "processes": self.world.size,
                "peak_memory_bytes": max(memory),
            }
        )

    @contextmanager
    def _watched(self, folders: Sequence[Path]) -> Iterator[None]:
        """Explains an error of the stage if a folder that it reads or writes was removed."""
        try:
            yield
        except Exception as error:
            if isinstance(error, FileNotFoundError):
                time.sleep(REMOVAL_SECONDS)
            check_still_there(self.output)
            gone = [folder for folder in folders if not folder.is_dir()]
            if not gone:
                raise
            raise InputError(
                f"stage {str(gone[0])!r}: its folder was removed, or moved, while the run was working with it; all "
                "else is kept: run the same command again, which makes it anew"
            ) from error


def is_finished(partial: Path, wanted: Mapping[str, Any]) -> bool:
    """Returns whether the stage was killed after its manifest was written and before its folder was renamed.

    Removes an unreliable manifest.
    """
    if not os.path.lexists(partial / MANIFEST):
        return False
    try:
        complete_manifest(partial, wanted)
    except ManifestError:
        (partial / MANIFEST).unlink()
        return False
    return True


def make_partial(partial: Path) -> None:
    try:
        (partial / SCRATCH).mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise InputError(
            f"stage {str(partial)!r}: expected a folder or nothing there, found a file or a broken link at "
            f"{str(error.filename)!r}; nothing was overwritten: move it elsewhere"
        ) from error


def finalize_stage(partial: Path, folder: Path) -> dict[str, Any]:
    """Gives a finished stage its final name and returns its manifest.

    The checkpoints are deleted last, so that a kill here never requires training again.
    """
    partial.rename(folder)
    shutil.rmtree(folder / SCRATCH, ignore_errors=True)
    return json.loads((folder / MANIFEST).read_text())


def partial_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.partial")


def key_of(wanted: Mapping[str, Any]) -> str:
    return digest_of(wanted)[:12]
