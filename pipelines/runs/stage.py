"""Stages: functions of (inputs, config, seed, version) that write a folder with a manifest.

A complete stage is skipped, and a killed stage is resumed.
"""

import gc
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version as package_version
from pathlib import Path
from typing import NamedTuple, TextIO, cast

from compress.measure.memory import read_peak_memory, reset_peak_memory
from distill.checkpoint.checkpoint import Checkpoint
from distill.errors import InputError
from pipelines.runs.console import Console
from pipelines.runs.digests import DIGESTS, DigestIndex
from pipelines.runs.files import hash_content, write_json
from pipelines.runs.manifest import (
    MANIFEST,
    OPTIMIZER_BITS,
    SCRATCH,
    JsonObject,
    Manifest,
    ManifestError,
    Measurements,
    StageIdentity,
    describe_outputs,
    hash_json,
    hash_outputs,
    read_complete_manifest,
    read_manifest,
    seal_manifest,
    set_aside,
)
from pipelines.runs.output import check_not_removed, check_output, find_version, open_output
from pipelines.runs.processes import World, flatten_settings

REMOVAL_SECONDS = 1.0  # wait, because a removal of the output may still be deleting its files one by one
PACKAGES = ("torch", "transformers", "lightning", "datasets", "onnx", "onnxruntime", "numpy")
UNBUILT = cast(Manifest, {})  # of a stage that a dry run would have to build


@dataclass(frozen=True)
class Artefact:
    """A complete stage, or a stage that a dry run would have to build (`digest` None)."""

    name: str
    folder: Path
    digest: str | None
    manifest: Manifest
    skipped: bool = False

    @property
    def metrics(self) -> JsonObject:
        """What the stage measured; empty if it isn't built."""
        return self.manifest.get("metrics", {})


class PlannedStage(NamedTuple):
    """A row of the table that a dry run prints."""

    name: str
    action: str
    folder: str


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

    is_sample = False  # whether it works on a sample of the data, to predict what its stages take

    def __init__(self, output: Path, seed: int, console: Console, *, dry: bool = False, world: World | None = None):
        self.output, self.seed, self.console, self.dry = output, seed, console, dry
        self.world = world or World()
        self.done: list[Artefact] = []
        self.plan: list[PlannedStage] = []
        self._lock: TextIO | None = None
        if self.world.manages_files:
            check_output(output)
        if self.world.manages_files and not dry:
            self._lock, older = open_output(output)
            if older:
                console.say(
                    f"output {str(output)!r}: an older Stillroom built its stages, and their manifests don't state the "
                    "versions of their algorithms: they are kept, and every stage is rebuilt beside them"
                )
        self.world.check_folder(output)
        if not dry:
            self.world.share_files()
        self.digests = DigestIndex(output / DIGESTS, writes=self.world.is_rank_zero and not dry)

    def __getstate__(self) -> dict[str, object]:
        """Returns the state of a copy that another process reads finished stages with; the lock stays here."""
        return self.__dict__ | {"_lock": None}

    def stage(
        self,
        name: str,
        config: Mapping[str, object],
        inputs: Mapping[str, Artefact | str],
        work: Callable[[Path], JsonObject],
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
        digests = {key: each.digest if isinstance(each, Artefact) else each for key, each in inputs.items()}
        known = {key: digest for key, digest in digests.items() if digest is not None}
        if len(known) < len(digests):
            return self.plan_stage(name)
        identity: StageIdentity = {"stage": name, "version": version, "config": dict(config), "inputs": known}
        if seeded:
            identity["seed"] = self.seed
        self.world.check_agreement(flatten_settings(identity, f"stage {name}, "))
        folder = self.output / name / stage_key(identity)
        manifest, damage = self.world.broadcast(
            self._find_manifest(folder, identity) if self.world.is_rank_zero else None
        )
        skipped = manifest is not None
        if manifest is None and self.dry:
            action = "will resume" if partial_path(folder).exists() else "will run"
            return self.plan_stage(name, folder, f"will be rebuilt: it {damage}" if damage else action)
        if manifest is None:
            read = [each.folder for each in inputs.values() if isinstance(each, Artefact)]
            manifest = self._build(folder, identity, work, together, read)
        else:
            self.console.say(f"{name}: already complete, skipped ({folder})")
            if remark := describe_low_bit_states(manifest):
                self.console.say(f"  {name}: {remark}")
            self.plan.append(PlannedStage(name, "complete, will be skipped", str(folder)))
        artefact = Artefact(name, folder, manifest["digest"], manifest, skipped)
        if folder not in [each.folder for each in self.done]:  # a student that is cut again starts from stages done
            self.done.append(artefact)
        return artefact

    def content_hash(self, path: Path) -> str:
        """Returns the hash of a file or folder that the run uses; each machine of the run reads it once."""
        return self.world.compute_once(lambda: hash_content(path, self.digests.hash_file))

    def digest(self, checkpoint: Checkpoint) -> str:
        """Returns the hash of a checkpoint that the run uses; each machine of the run reads it once."""
        return self.world.compute_once(lambda: checkpoint.digest)

    def plan_stage(self, name: str, folder: Path | None = None, action: str = "will run") -> Artefact:
        """Records and returns a stage that a dry run would have to build."""
        folder = folder or self.output / name
        self.plan.append(PlannedStage(name, action, str(folder)))
        return Artefact(name, folder, None, UNBUILT)

    def _find_manifest(self, folder: Path, identity: StageIdentity) -> tuple[Manifest | None, str]:
        """Returns (manifest of the finished stage, ""), or (None, the reason why it has to be rebuilt).

        The reason is empty if there is no folder. A damaged folder is renamed, except in a dry run.
        """
        if not self.dry:
            check_not_removed(self.output)
        if not os.path.lexists(folder):
            return None, ""
        try:
            return read_complete_manifest(folder, identity, self.digests.hash_file), ""
        except ManifestError as damage:
            if not self.dry:
                aside = set_aside(folder)
                self.console.say(
                    f"{identity['stage']}: {str(folder)!r} {damage}: its other files can't be trusted either, so the "
                    f"stage is rebuilt; the old folder is now {str(aside)!r}"
                )
            return None, str(damage)

    def _build(
        self,
        folder: Path,
        identity: StageIdentity,
        work: Callable[[Path], JsonObject],
        together: bool,
        read: Sequence[Path],
    ) -> Manifest:
        partial, leads = partial_path(folder), self.world.is_rank_zero
        if self.world.broadcast(is_finished(partial, identity) if leads else None):
            return self._finalize(partial, folder)
        resumed = partial.exists()
        self.console.say(f"{identity['stage']}: {'resuming' if resumed else 'started'} ({folder})")
        if self.world.manages_files:
            create_partial(partial)
        self.world.barrier()
        gc.collect()  # models of earlier stages are in cycles, and their memory would count for this stage
        reset_peak_memory()
        start = time.perf_counter()
        with self._explain_removal([partial / SCRATCH, *read]):
            metrics = work(partial) if leads or together else {}
            self.world.share_files()
            memory = self.world.gather(read_peak_memory())
            if leads:
                check_not_removed(self.output)
                if not (partial / SCRATCH).is_dir():
                    raise FileNotFoundError(f"{partial} was removed while the stage ran")
                measured = self._measure_outputs(partial, metrics, time.perf_counter() - start, resumed, memory)
                write_json(partial / MANIFEST, seal_manifest({**identity, **measured}))
        return self._finalize(partial, folder)

    def _finalize(self, partial: Path, folder: Path) -> Manifest:
        """Gives a finished stage its final name on all machines and returns its manifest."""
        manifest = self.world.broadcast(finalize_stage(partial, folder) if self.world.is_rank_zero else None)
        if self.world.manages_files:
            shutil.rmtree(partial, ignore_errors=True)  # another machine's copy
        self.world.share_files()
        return manifest

    def _measure_outputs(
        self, partial: Path, metrics: JsonObject, seconds: float, resumed: bool, memory: Sequence[int]
    ) -> Measurements:
        outputs = describe_outputs(partial, self.digests.hash_file)
        return {
            "versions": {"python": platform.python_version(), "stillroom": find_version()}
            | {name: package_version(name) for name in PACKAGES},
            "outputs": outputs,
            "digest": hash_outputs(outputs),
            "metrics": metrics,
            "wall_seconds": round(seconds, 3),
            "resumed": resumed,
            "processes": self.world.size,
            "peak_memory_bytes": max(memory),
        }

    @contextmanager
    def _explain_removal(self, folders: Sequence[Path]) -> Iterator[None]:
        """Explains an error of the stage if a folder that it reads or writes was removed."""
        try:
            yield
        except Exception as error:
            if isinstance(error, FileNotFoundError):
                time.sleep(REMOVAL_SECONDS)
            check_not_removed(self.output)
            gone = [folder for folder in folders if not folder.is_dir()]
            if not gone:
                raise
            raise InputError(
                f"stage {str(gone[0])!r}: its folder was removed or renamed during the run; all other stages are kept: "
                "run the same command again to rebuild it"
            ) from error


def is_finished(partial: Path, identity: StageIdentity) -> bool:
    """Returns whether the stage was killed after its manifest was written and before its folder was renamed.

    Removes an unreliable manifest.
    """
    if not os.path.lexists(partial / MANIFEST):
        return False
    try:
        read_complete_manifest(partial, identity)
    except ManifestError:
        (partial / MANIFEST).unlink()
        return False
    return True


def create_partial(partial: Path) -> None:
    """Creates the folder of a running stage.

    Raises:
        InputError: A file is in its place.
    """
    try:
        (partial / SCRATCH).mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise InputError(
            f"stage {str(partial)!r}: expected a folder or nothing there, found a file or a broken link at "
            f"{str(error.filename)!r}; nothing was overwritten: move it elsewhere"
        ) from error


def finalize_stage(partial: Path, folder: Path) -> Manifest:
    """Gives a finished stage its final name and returns its manifest.

    The checkpoints are deleted last, so that a kill here never requires training again.
    """
    partial.rename(folder)
    shutil.rmtree(folder / SCRATCH, ignore_errors=True)
    return read_manifest(folder)


def describe_low_bit_states(manifest: Manifest) -> str:
    """Returns how a stage's training differs from the requested one, if AdamW's states had fewer bits; else nothing.

    The key doesn't tell, because whether a memory limit changes the training is only known once it is measured.
    """
    bits = manifest["metrics"].get(OPTIMIZER_BITS)
    if bits is None:
        return ""
    return (
        f"was trained with AdamW's states in {bits:.0f} bits to fit into machine.memory, which changes the result; to "
        "train it with full ones, remove its folder and run again with more memory or without a limit"
    )


def partial_path(folder: Path) -> Path:
    """Returns where a stage is written until it is complete."""
    return folder.with_name(f"{folder.name}.partial")


def stage_key(identity: StageIdentity) -> str:
    """Returns the name of a stage's folder, a hash of all that decides its result."""
    return hash_json(identity)[:12]
