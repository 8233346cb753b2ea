"""The settings of a cache as stored in its `cache.json`, from which `rebuild` and `inspect` find teacher and data."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distill.data.config import DataConfig
from distill.data.masking.config import MaskConfig
from distill.data.rows.chat_config import ChatConfig
from distill.errors import InputError
from pipelines.runs.manifest import JsonObject
from pipelines.settings.commands.cache import KeepConfig, WriteConfig

NOT_RECORDED = ("cache", "force", "dry_run", "writer", "writers", "devices", "layout", "timeout", "accelerator",
                "threads", "launcher")  # fmt: skip


def record_settings(config: WriteConfig) -> JsonObject:
    """Returns the settings that `cache.json` stores, with absolute paths."""
    stored = {name: value for name, value in asdict(config).items() if name not in NOT_RECORDED}
    stored["teacher"] = _make_absolute(stored["teacher"])
    for name in ("path", "unlabelled"):
        stored["data"][name] = _make_absolute(stored["data"][name])
    stored["chat"]["template"] = _make_absolute(stored["chat"]["template"])
    return stored


def restore_settings(cache: Path, metadata: Mapping[str, Any], *, teacher: str = "", data: str = "") -> WriteConfig:
    """Returns the settings that a cache was written with.

    Args:
        cache: Folder of the cache.
        metadata: Content of its `cache.json`.
        teacher: Checkpoint that replaces the stored one; empty keeps that.
        data: Path of the data that replaces the stored one; empty keeps that.

    Raises:
        InputError: The cache was written by other code, which stored no settings.
    """
    stored = dict(metadata.get("made_from") or {})
    if "data" not in stored:
        raise InputError(
            f"cache {str(cache)!r}: expected the teacher and the data that it was written with, found none: it was "
            "written by other code; write it again with that code"
        )
    stored.pop("engine", None)  # recorded by earlier versions
    rows = dict(stored.pop("data"))
    rows["path"] = data or _resolve_stored_path(cache, rows["path"])
    rows["unlabelled"] = _resolve_stored_path(cache, rows["unlabelled"])
    stored["teacher"] = teacher or _resolve_stored_path(cache, stored["teacher"])
    return WriteConfig(
        cache=str(cache),
        data=DataConfig(**rows),
        keep=KeepConfig(**stored.pop("keep")),
        masking=MaskConfig(**stored.pop("masking")),
        chat=ChatConfig(**stored.pop("chat", {})),
        **stored,
    )


def _make_absolute(path: str | None) -> str | None:
    return str(Path(path).expanduser().resolve()) if path and Path(path).expanduser().exists() else path


def _resolve_stored_path(cache: Path, path: str | None) -> str | None:
    """Resolves a path that is relative to the cache's folder, as stages store theirs."""
    if path and path.startswith("..") and (cache / path).exists():
        return str((cache / path).resolve())
    return path
