"""A stage: (inputs, config, seed) to a folder with a manifest; skipped when there, resumed after a kill."""

import fcntl
import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from compress.memory import peak_memory, reset_peak_memory
from distill.errors import InputError
from pipelines.console import Console
from pipelines.world import World, flat

MANIFEST = "manifest.json"
SCRATCH = "scratch"  # inside a stage under way: checkpoints and the like, removed when it is complete
LOGS = "logs"  # kept, but no part of the result: they hold times
MARKER = "stillroom.json"
PACKAGES = ("torch", "transformers", "lightning", "datasets", "onnx", "onnxruntime", "numpy")


@dataclass(frozen=True)
class Artefact:
    """A complete stage, or (`digest` None) one that a dry run would have to make."""

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
        output: Folder of the run; made when missing.
        seed: Part of every stage's key.
        console: Where progress is shown.
        dry: Only look: no folder is made, nothing runs.
        world: The processes that work on it together; the first one keeps the folder.

    Raises:
        InputError: The folder holds something else, or another process is writing in it.
    """

    def __init__(self, output: Path, seed: int, console: Console, *, dry: bool = False, world: World | None = None):
        self.output, self.seed, self.console, self.dry = output, seed, console, dry
        self.world = world or World()
        self.done: list[Artefact] = []
        self.plan: list[tuple[str, str, str]] = []  # (stage, what would happen, folder)
        self.lock: Any = None
        if self.world.leads:
            check_output(output)
        if self.world.leads and not dry:
            output.mkdir(parents=True, exist_ok=True)
            self.lock = take_lock(output)
            write_json(output / MARKER, {"stillroom": version("stillroom")})
        self.world.check_folder(output)

    def stage(
        self,
        name: str,
        config: Mapping[str, Any],
        inputs: Mapping[str, Any],
        work: Callable[[Path], dict[str, Any]],
        *,
        together: bool = False,
    ) -> Artefact:
        """Returns the stage's folder, complete: found, or made by `work(folder)`, which returns the metrics.

        `inputs` are artefacts of earlier stages, or content hashes. With `together` every process works, and the first
        one's metrics count; else the first works and the others wait.

        `work` writes into the folder it is given, may keep checkpoints in its `scratch`, and is called again with the
        same folder after a kill.
        """
        digests = {k: v.digest if isinstance(v, Artefact) else v for k, v in inputs.items()}
        if None in digests.values():
            return self._planned(name, self.output / name, "will run")
        wanted = {"stage": name, "config": dict(config), "seed": self.seed, "inputs": digests}
        self.world.agree(flat(wanted, f"stage {name}, "))
        folder = self.output / name / key_of(wanted)
        manifest = self.world.tell(complete_manifest(folder, wanted) if self.world.leads else None)
        skipped = manifest is not None
        if manifest is None and self.dry:
            return self._planned(name, folder, "will go on" if partial_of(folder).exists() else "will run")
        if manifest is None:
            manifest = self._make(folder, wanted, work, together)
        else:
            self.console.say(f"{name}: done before, skipped ({folder})")
            self.plan.append((name, "done, will be skipped", str(folder)))
        artefact = Artefact(name, folder, manifest["digest"], manifest, skipped)
        self.done.append(artefact)
        return artefact

    def _planned(self, name: str, folder: Path, what: str) -> Artefact:
        self.plan.append((name, what, str(folder)))
        return Artefact(name, folder, None, {})

    def _make(
        self, folder: Path, wanted: dict[str, Any], work: Callable[[Path], dict[str, Any]], together: bool
    ) -> dict[str, Any]:
        partial, leads = partial_of(folder), self.world.leads
        # killed after the last line of the manifest and before the renaming
        if self.world.tell((partial / MANIFEST).exists() if leads else None):
            return self.world.tell(settle(partial, folder) if leads else None)
        resumed = partial.exists()
        self.console.say(f"{wanted['stage']}: {'going on' if resumed else 'started'} ({folder})")
        if leads:
            (partial / SCRATCH).mkdir(parents=True, exist_ok=True)
        self.world.meet()
        reset_peak_memory()
        start = time.perf_counter()
        metrics = work(partial) if leads or together else {}
        memory = self.world.gather(peak_memory())
        if leads:
            made = self._manifest(partial, wanted, metrics, time.perf_counter() - start, resumed, memory)
            write_json(partial / MANIFEST, made)
        return self.world.tell(settle(partial, folder) if leads else None)

    def _manifest(
        self,
        partial: Path,
        wanted: Mapping[str, Any],
        metrics: Mapping[str, Any],
        seconds: float,
        resumed: bool,
        memory: Sequence[int],
    ) -> dict[str, Any]:
        outputs = {k: v for k, v in file_hashes(partial).items() if not k.startswith(f"{SCRATCH}/")}
        return {
            **wanted,
            "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
            "outputs": outputs,
            "digest": digest_of({k: v["sha256"] for k, v in outputs.items() if not k.startswith(f"{LOGS}/")}),
            "metrics": metrics,
            "wall_seconds": round(seconds, 3),
            "resumed": resumed,
            "processes": self.world.size,
            "peak_memory_bytes": max(memory),
        }


def settle(partial: Path, folder: Path) -> dict[str, Any]:
    """Gives a finished stage its name; the checkpoints go last, so a kill here never costs the training again."""
    partial.rename(folder)
    shutil.rmtree(folder / SCRATCH, ignore_errors=True)
    return json.loads((folder / MANIFEST).read_text())


def partial_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.partial")


def check_output(output: Path) -> None:
    if output.exists() and not output.is_dir():
        raise InputError(f"output {str(output)!r}: expected a folder, found a file; nothing was overwritten")
    if output.is_dir() and any(output.iterdir()) and not (output / MARKER).is_file():
        names = ", ".join(sorted(p.name for p in output.iterdir())[:5])
        raise InputError(
            f"output {str(output)!r}: the folder holds something else ({names}); nothing was overwritten: "
            "name a new or an empty folder, or one of an earlier run"
        )


def take_lock(output: Path) -> Any:
    """Holds the folder until the process ends, however it ends."""
    handle = (output / ".lock").open("w")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"output {str(output)!r}: another process is writing there; wait for it or stop it") from None
    return handle


def key_of(wanted: Mapping[str, Any]) -> str:
    return digest_of(wanted)[:12]


def digest_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def complete_manifest(folder: Path, wanted: Mapping[str, Any]) -> dict[str, Any] | None:
    """The manifest of a complete stage whose files are all there and unchanged; None when it has to be made.

    Raises:
        InputError: The stage is there, but a file of it is missing or was changed.
    """
    file = folder / MANIFEST
    if not file.is_file():
        return None
    manifest = json.loads(file.read_text())
    if any(manifest.get(key) != value for key, value in json.loads(json.dumps(wanted, default=str)).items()):
        raise InputError(f"stage {str(folder)!r}: its manifest is of another stage; remove the folder to make it again")
    for name, stated in manifest["outputs"].items():
        path = folder / name
        if not path.is_file() or sha256(path) != stated["sha256"]:
            what = "was changed" if path.is_file() else "is missing"
            raise InputError(
                f"stage {str(folder)!r}: {name} {what} since the stage ended: what follows would be built on something "
                "unknown; restore it, or remove the folder to make the stage again"
            )
    return manifest


def file_hashes(folder: Path) -> dict[str, dict[str, Any]]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): {"sha256": sha256(p), "bytes": p.stat().st_size} for p in files}


def content_hash(path: Path) -> str:
    """Hash of a file, or of every file of a folder with its name; symbolic links are followed."""
    if path.is_file():
        return sha256(path)
    return digest_of({name: entry["sha256"] for name, entry in file_hashes(path).items()})


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, content: Any) -> None:
    """Writes beside the place and renames, so that a reader never sees half a file."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w") as file:
        json.dump(content, file, indent=1, default=str)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A new folder to fill, which takes the place of `folder` when the block ends well."""
    fresh, old = folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    fresh.mkdir(parents=True)
    yield fresh
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
