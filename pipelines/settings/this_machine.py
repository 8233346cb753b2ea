"""A description of this machine, for reports and for the keys of stages whose results are measurements."""

import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any


def describe_machine() -> dict[str, Any]:
    """Returns the processor, number of cores and platform."""
    return {"processor": find_processor(), "cores": count_cores(), "platform": platform.platform()}


def count_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def find_processor() -> str:
    """Returns the processor's name with the instruction sets that affect inference speed."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = {line.split(":")[0].strip(): line.split(":", 1)[1].strip() for line in lines if ":" in line}
    flags = set(fields.get("flags", "").split())
    sets = [name for name in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8") if name in flags]
    return f"{fields.get('model name', platform.machine())} ({', '.join(sets)})"


def find_commit() -> str | None:
    """Returns the short hash of this checkout's commit; None if there is no repository or no git."""
    if shutil.which("git") is None:
        return None
    root = Path(__file__).parents[2]
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],  # noqa: S607 - the git of the PATH
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or None
