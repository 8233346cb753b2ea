"""Frozen teachers: their settings, fingerprints, and the computation of signals in one or several processes.

Public names are imported on first use, so that importing this package loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distill.teacher.config import TeacherConfig
    from distill.teacher.ensemble import Ensemble, EnsembleConfig, register_ensemble
    from distill.teacher.fingerprint import (
        check_same_tokenizer,
        freeze,
        stored_fingerprint,
        tokenizer_fingerprint,
        weights_fingerprint,
    )
    from distill.teacher.head import probe_head
    from distill.teacher.online import OnlineTeacher
    from distill.teacher.remote import Bridge, RemoteTeacher, serve_students
    from distill.teacher.sequences_config import SequencesConfig
    from distill.teacher.shard import ShardedTeacher

EXPORTS = {
    "Bridge": "remote",
    "Ensemble": "ensemble",
    "EnsembleConfig": "ensemble",
    "OnlineTeacher": "online",
    "RemoteTeacher": "remote",
    "SequencesConfig": "sequences_config",
    "ShardedTeacher": "shard",
    "TeacherConfig": "config",
    "check_same_tokenizer": "fingerprint",
    "freeze": "fingerprint",
    "probe_head": "head",
    "register_ensemble": "ensemble",
    "serve_students": "remote",
    "stored_fingerprint": "fingerprint",
    "tokenizer_fingerprint": "fingerprint",
    "weights_fingerprint": "fingerprint",
}
__all__ = [
    "Bridge",
    "Ensemble",
    "EnsembleConfig",
    "OnlineTeacher",
    "RemoteTeacher",
    "SequencesConfig",
    "ShardedTeacher",
    "TeacherConfig",
    "check_same_tokenizer",
    "freeze",
    "probe_head",
    "register_ensemble",
    "serve_students",
    "stored_fingerprint",
    "tokenizer_fingerprint",
    "weights_fingerprint",
]


def __getattr__(name: str) -> object:
    if name in EXPORTS:
        return getattr(import_module(f"{__name__}.{EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
