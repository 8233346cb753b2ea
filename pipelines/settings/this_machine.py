"""What this machine is, for reports and for the keys of stages whose result is a measurement."""

import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any


def describe() -> dict[str, Any]:
    """Processor, cores and platform."""
    return {"processor": processor(), "cores": cores(), "platform": platform.platform()}


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """The processor's name with the instruction sets that decide its speed here."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    found = {line.split(":")[0].strip(): line.split(":", 1)[1].strip() for line in lines if ":" in line}
    flags = set(found.get("flags", "").split())
    sets = [name for name in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8") if name in flags]
    return f"{found.get('model name', platform.machine())} ({', '.join(sets)})"


def commit() -> str | None:
    """The commit of this checkout, where it is one and git is installed."""
    if shutil.which("git") is None:
        return None
    root = Path(__file__).parents[2]
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None
