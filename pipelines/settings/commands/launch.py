"""Settings of `python -m pipelines.launch`."""

import re
from dataclasses import dataclass
from typing import Literal

from compress.prune.budget import parse_bytes
from distill.errors import InputError, check_setting
from pipelines.settings.places import check_local

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")  # a DNS label, with room for the suffixes of pods
_NODES = re.compile(r"([1-9]\d*)(?::([1-9]\d*))?")
# Settings that only some launchers have.
_OWN = {
    "image": ("ray", "kubernetes", "marathon"),
    "address": ("torchrun", "marathon"),
    "form": ("kubernetes",),
    "namespace": ("ray", "kubernetes"),
    "queue": ("ray", "kubernetes", "slurm"),
    "account": ("slurm",),
    "accelerator": ("skypilot",),
    "spot": ("skypilot",),
    "volume": ("ray", "kubernetes", "marathon", "skypilot"),
    "mount": ("ray", "kubernetes", "marathon", "skypilot"),
    "hours": ("ray", "kubernetes", "slurm"),
}
_OF_AN_IMAGE = ("volume", "mount", "hours", "queue", "namespace")  # settings of a cluster that ray starts


@dataclass(frozen=True)
class LaunchConfig:
    """Settings of `python -m pipelines.launch`.

    Args:
        nodes: Number of nodes, or a range such as 1:4: the command continues with fewer when some are lost, and takes
            them back.
        gpus: GPUs of each node.
        processes: Processes per node; 0: one per GPU, or one without GPUs.
        cpus: Processor cores of each node.
        memory: Memory of each node, such as 64GB.
        name: Name of the job.
        image: Container image with Stillroom, for kubernetes, marathon, and ray on Kubernetes; the Dockerfile builds
            one.
        volume: Storage that all nodes share: a persistent volume claim for kubernetes and ray, a host folder for
            marathon, a bucket URL for skypilot.
        mount: Path at which the volume is mounted on each node.
        restarts: Maximum restarts of the processes after a failure, and of the job by its launcher.
        grace: Seconds from the stop signal until processes are killed, in which they write a checkpoint.
        hours: Hours after which the job is ended; for kubernetes, slurm, and ray with an image.
        address: Name or address of the node that the others connect to; only for torchrun and marathon.
        port: Port on that node.
        timeout: Seconds that a node waits for a response from that node, even in a later network failure.
        form: What is written for kubernetes: a `job` (indexed, with a headless service), a `jobset`, or a `trainjob`
            for Kubeflow's Trainer.
        namespace: Namespace of kubernetes, also for ray.
        queue: Kueue queue for kubernetes and ray, or partition for slurm.
        account: Account that slurm charges.
        accelerator: Type of GPU that skypilot requests, such as H100.
        spot: Let skypilot use spot instances, which may be preempted.
        output: Folder that the files are written to.
        submit: Submit the job with the launcher's own command, if it is installed here.
    """

    nodes: str = "1"
    gpus: int = 0
    processes: int = 0
    cpus: int = 4
    memory: str = "16GB"
    name: str = "stillroom"
    image: str = ""
    volume: str = ""
    mount: str = "/shared"
    restarts: int = 10
    grace: int = 120
    hours: float = 24.0
    address: str = ""
    port: int = 29400
    timeout: int = 60
    form: Literal["job", "jobset", "trainjob"] = "job"
    namespace: str = ""
    queue: str = ""
    account: str = ""
    accelerator: str = ""
    spot: bool = False
    output: str = "launch"
    submit: bool = False

    def __post_init__(self) -> None:
        check_local("output", self.output)
        for name, least in (("gpus", 0), ("processes", 0), ("cpus", 1), ("restarts", 0), ("grace", 1), ("timeout", 1)):
            check_setting(self, name, getattr(self, name) >= least, f"at least {least}")
        if not 1 <= self.port <= 65535:
            raise InputError(f"port: expected 1 to 65535, found {self.port}: nodes couldn't connect there")
        if not self.hours > 0:
            raise InputError(f"hours: expected more than 0, found {self.hours}: the job would end at once")
        parse_nodes(self.nodes)
        if not _NAME.fullmatch(self.name):
            raise InputError(
                f"name: expected at most 40 lowercase letters, digits and hyphens after a letter, found {self.name!r}: "
                "hosts are named after it"
            )
        if parse_bytes(self.memory, "memory") < 10**6:
            raise InputError(f"memory: expected a size such as 64GB, found {self.memory!r}: nothing would start in it")
        if not self.mount.startswith("/"):
            raise InputError(f"mount: expected a path from the root, found {self.mount!r}")

    @property
    def min_nodes(self) -> int:
        """The fewest nodes that the command goes on with."""
        return parse_nodes(self.nodes)[0]

    @property
    def max_nodes(self) -> int:
        """The most nodes."""
        return parse_nodes(self.nodes)[1]

    @property
    def per_node(self) -> int:
        """Number of processes of each node."""
        return self.processes or self.gpus or 1

    @property
    def worker_grace(self) -> int:
        """Seconds from the signal until a node ends its processes, so that it can tell the launcher in time."""
        return max(1, self.grace - 10)

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory of each node."""
        return parse_bytes(self.memory, "memory")


def parse_nodes(text: str) -> tuple[int, int]:
    """Returns the fewest and the most nodes, such as of 2 or of 1:4.

    Raises:
        InputError: The text has another form, or fewer at most than at least.
    """
    match = _NODES.fullmatch(text)
    if match is None or (match[2] and int(match[2]) < int(match[1])):
        raise InputError(f"nodes: expected a number, or the fewest and the most as 1:4, found {text!r}")
    return int(match[1]), int(match[2] or match[1])


def check_launcher(launcher: str, config: LaunchConfig) -> None:
    """Checks that a launcher has what it needs, and that settings of others aren't ignored.

    Raises:
        InputError: A setting is missing, or has no meaning for this launcher.
    """
    if launcher == "kubernetes" and not config.image:
        raise InputError("image: expected a container image with Stillroom for kubernetes, found none; see Dockerfile")
    if launcher == "skypilot" and config.gpus and not config.accelerator:
        raise InputError(
            f"accelerator: expected a kind of GPU for skypilot, such as H100, found none for {config.gpus} GPUs: it "
            "couldn't look for machines"
        )
    is_fixed = launcher in ("skypilot", "marathon") or (launcher == "kubernetes" and config.form == "trainjob")
    if is_fixed and config.min_nodes != config.max_nodes:
        name = "a trainjob" if launcher == "kubernetes" else launcher
        raise InputError(f"nodes: expected a fixed number for {name}, found {config.nodes}: it starts all or none")
    if launcher == "ray" and not config.image:
        for name in _OF_AN_IMAGE:
            if getattr(config, name) != getattr(LaunchConfig(), name):
                raise InputError(
                    f"{name}: expected an image with it for ray, found none: without one the command joins a cluster "
                    "that is already running, and it would be ignored"
                )
    for name, launchers in _OWN.items():
        if getattr(config, name) != getattr(LaunchConfig(), name) and launcher not in launchers:
            raise InputError(
                f"{name}: expected only for {' and '.join(launchers)}, found {getattr(config, name)!r} for {launcher}: "
                "it would be ignored"
            )
