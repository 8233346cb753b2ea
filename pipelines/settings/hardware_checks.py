"""Checks of the settings that depend on the machine's hardware."""

import os
import platform
import sys
from pathlib import Path

from distill.errors import InputError

GPUS = ("gpu", "cuda")
# Device files of NVIDIA's, NVIDIA's embedded, AMD's and WSL's drivers: without any of them no GPU is usable.
DRIVERS = ("nvidiactl", "nvidia[0-9]*", "nvgpu", "nvhost-gpu", "kfd", "dxg")
ON_GPUS = ("16-mixed", "fp8")  # precisions that CPUs can't train in


def check_machine(accelerator: str, precision: str) -> None:
    """Checks, without torch, that the machine has the accelerator and that the precision is available on it.

    Raises:
        InputError: The machine doesn't have the accelerator, or the precision requires a different one.
    """
    if accelerator in GPUS and not may_have_gpu():
        raise InputError(
            f"machine.accelerator {accelerator}: expected a GPU, found none on this machine; use cpu, or auto, which "
            "uses what the machine has"
        )
    if accelerator == "mps" and (sys.platform, platform.machine()) != ("darwin", "arm64"):
        raise InputError(
            f"machine.accelerator mps: expected a Mac with Apple silicon, found {platform.system()} on "
            f"{platform.machine()}; use cpu, or auto, which uses what the machine has"
        )
    if precision in ON_GPUS and (accelerator in ("cpu", "mps") or not may_have_gpu()):
        raise InputError(
            f"machine.precision {precision}: expected a GPU, found "
            + (f"machine.accelerator {accelerator}" if accelerator in ("cpu", "mps") else "none on this machine")
            + ": the CPU doesn't support it; use 32, bf16-mixed or auto"
        )


def may_have_gpu() -> bool:
    """Returns whether a GPU driver is present; `check_accelerator` then asks torch whether a GPU is usable."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return Path("/dev/kfd").exists()
    return sys.platform != "linux" or any(file for driver in DRIVERS for file in Path("/dev").glob(driver))


def check_accelerator(accelerator: str) -> None:
    """Checks that torch can use the accelerator.

    Raises:
        InputError: A GPU's driver is present, but torch can't use the GPU.
    """
    import torch

    if accelerator in GPUS and not torch.cuda.is_available():
        raise InputError(
            f"machine.accelerator {accelerator}: expected a GPU that torch {torch.__version__} can use, found none; "
            "use cpu, or install torch for it"
        )
    if accelerator == "mps" and not torch.backends.mps.is_available():
        raise InputError(f"machine.accelerator mps: torch {torch.__version__} can't use it here; use cpu")
