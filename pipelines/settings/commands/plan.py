"""Settings of `python -m pipelines.plan`."""

import re
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

from compress.prune.budget import parse_bytes
from distill.errors import InputError, check_setting
from pipelines.settings.commands.distill import SHORT_OPTIONS, DistillConfig

CPU = "cpu"
UNKNOWN_DATA, UNKNOWN_OUTPUT = "DATA", "OUTPUT"  # of a run that is planned without them


class GpuKind(NamedTuple):
    """A GPU according to its data sheet.

    Attributes:
        memory: Bytes.
        half: Floating-point operations a second of dense products in 16 bits.
        single: Of those in float32.
        links: Bytes a second to other GPUs of the node: one direction of NVLink, or of PCIe where there is none.
    """

    memory: int
    half: float
    single: float
    links: float


GPU_KINDS = {
    "t4": GpuKind(16 * 10**9, 65e12, 8.1e12, 16e9),
    "v100": GpuKind(32 * 10**9, 125e12, 15.7e12, 150e9),
    "a100": GpuKind(80 * 10**9, 312e12, 19.5e12, 300e9),
    "l4": GpuKind(24 * 10**9, 121e12, 30.3e12, 32e9),
    "l40s": GpuKind(48 * 10**9, 362e12, 91.6e12, 32e9),
    "h100": GpuKind(80 * 10**9, 989e12, 67e12, 450e9),
    "h200": GpuKind(141 * 10**9, 989e12, 67e12, 450e9),
}
# Share of a GPU's rate that trainings reach: 0.46 of Chowdhery et al. 2022 (PaLM, arXiv 2204.02311, section 4.1) and
# 0.38 to 0.43 of Grattafiori et al. 2024 (Llama 3, arXiv 2407.21783, table 4), on large models.
REACHED = 0.4
RATE_UNITS = {"gb/s": 1e9, "mb/s": 1e6, "gbit/s": 1e9 / 8, "mbit/s": 1e6 / 8}
SHORT_PLANNER_OPTIONS = SHORT_OPTIONS | {
    name: f"cluster.{name}"
    for name in ("gpus", "nodes", "gpu", "gpu_memory", "tflops", "links", "bandwidth")
}  # fmt: skip


@dataclass(frozen=True)
class ClusterConfig:
    """Machines that a run is planned for.

    Args:
        gpus: GPUs per node, at least 1; processes if `gpu` is cpu.
        nodes: Number of nodes, at least 1.
        gpu: Kind of GPU: t4, v100 (needs a torch built for CUDA 12), a100, l4, l40s, h100 or h200; or cpu, which is
            measured on this machine.
        gpu_memory: Memory of each GPU, such as 80GB; if omitted, that of its kind.
        tflops: Matrix-product throughput that a GPU reaches, in TFLOP/s; 0: 40 % of the peak of its kind in the
            precision of training.
        links: Bandwidth from a GPU to another one of its node, such as 300GB/s; if omitted, that of its kind.
        bandwidth: Bandwidth from a GPU to those of other nodes, such as 100Gbit/s or 12.5GB/s.
    """

    gpus: int = 1
    nodes: int = 1
    gpu: str = "a100"
    gpu_memory: str = ""
    tflops: float = 0.0
    links: str = ""
    bandwidth: str = "25GB/s"

    def __post_init__(self) -> None:
        check_setting(self, "cluster.gpus", self.gpus >= 1, "at least 1")
        check_setting(self, "cluster.nodes", self.nodes >= 1, "at least 1")
        check_setting(self, "cluster.gpu", self.gpu in (*GPU_KINDS, CPU), f"one of {', '.join(GPU_KINDS)} or {CPU}")
        check_setting(self, "cluster.tflops", self.tflops >= 0, "at least 0")
        if self.gpu_memory:
            parse_bytes(self.gpu_memory, "cluster.gpu_memory")
        for name in ("links", "bandwidth"):
            if getattr(self, name) or name == "bandwidth":
                parse_rate(getattr(self, name), f"cluster.{name}")

    @property
    def processes(self) -> int:
        """Number of processes of a run."""
        return self.gpus * self.nodes


@dataclass(frozen=True)
class PlannerConfig(DistillConfig):
    """Settings of `python -m pipelines.plan`: those of the run that is planned, and the machines that it is for.

    Args:
        output: Folder that pairs.json and distill.yaml are written to.
        rows: Number of training rows, of `data.max_length` tokens each; 0: those of the data.
        labels: Number of labels; 0: those of the data, or of the teacher's head.
        cluster: The machines.
    """

    output: str = "plan"
    rows: int = 0
    labels: int = 0
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    def __post_init__(self) -> None:
        if not self.teacher.model:
            raise InputError("--teacher: missing; see --help for examples")
        check_setting(self, "rows", self.rows >= 0, "at least 0")
        check_setting(self, "labels", self.labels >= 0, "at least 0")
        if not self.data.path and not self.rows:
            raise InputError("--rows: expected the number of training rows, or the data in --data, found neither")

    def select_run(self) -> DistillConfig:
        """Returns the settings of the run, whose output isn't known yet; `output` is the plan's own folder."""
        values = {each.name: getattr(self, each.name) for each in fields(DistillConfig)}
        data = replace(self.data, path=self.data.path or UNKNOWN_DATA)
        return DistillConfig(**values | {"output": UNKNOWN_OUTPUT, "data": data})


def parse_rate(text: str, setting: str) -> float:
    """Parses what a link sends: `100Gbit/s` -> 12.5e9 bytes a second.

    Raises:
        InputError: The text isn't a number with one of the known units.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z/]+)\s*", text)
    if not match or match.group(2).lower() not in RATE_UNITS or float(match.group(1)) == 0:
        raise InputError(f"{setting}: expected a rate such as 100Gbit/s or 12.5GB/s, found {text!r}")
    return float(match.group(1)) * RATE_UNITS[match.group(2).lower()]
