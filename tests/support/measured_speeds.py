"""Stored measurements of students' speeds, replaced by those of other machines."""

import json
from pathlib import Path

from pipelines.runs.files import write_json
from pipelines.runs.manifest import MANIFEST, describe_outputs, hash_outputs, seal_manifest


def list_finished(output: Path, stage: str) -> list[Path]:
    """Returns the stage's complete folders, the oldest first."""
    return [
        file.parent for file in sorted((output / stage).glob(f"*/{MANIFEST}"), key=lambda file: file.stat().st_mtime)
    ]


def record_speed(stage: Path, share: float) -> None:
    """Replaces a stored measurement by one of a machine with another speed, with a manifest to match.

    Args:
        stage: Folder of the stage that measured.
        share: The speed relative to the requested one.
    """
    measured = {"share": {"value": share, "low": share - 0.01, "high": share + 0.01}, "settled": True}
    record = json.loads((stage / "speed.json").read_text())
    write_json(stage / "speed.json", record | measured)
    manifest = json.loads((stage / MANIFEST).read_text())
    manifest.pop("checksum")
    outputs = describe_outputs(stage)
    changed = {"outputs": outputs, "digest": hash_outputs(outputs), "metrics": measured}
    write_json(stage / MANIFEST, seal_manifest(manifest | changed))
