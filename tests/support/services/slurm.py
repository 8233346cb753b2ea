"""A Slurm of two nodes on this machine and in one folder, from Debian's packages: nothing is installed (root)."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from support.commands import ROOT

PACKAGES = (
    *("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins"),
    *("libmunge2", "libhwloc15", "liblua5.1-0"),
)
NODES = ("n1", "n2")
# No munge, systemd or cgroups; a requeued job waits for the end of its credential, of 120 seconds by default.
SETTINGS = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
PluginDir={plugins}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
KillWait=20
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 RealMemory=4000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 RealMemory=4000
PartitionName=tests Nodes=n1,n2 Default=YES State=UP
"""


def find_obstacle() -> str:
    """Returns why no Slurm can be started here; an empty text if one can."""
    if os.geteuid() != 0:
        return "Slurm's daemons start processes of other users: expected root"
    missing = [name for name in ("apt-get", "dpkg") if shutil.which(name) is None]
    return f"Slurm comes from Debian's packages: expected {' and '.join(missing)}" if missing else ""


def unpack_slurm(folder: Path) -> str:
    """Downloads the packages and unpacks them, once; returns apt's message if it has none."""
    if (folder / "usr").exists():
        return ""
    downloads, unpacked = folder / "downloads", folder / "unpacked"
    downloads.mkdir(parents=True, exist_ok=True)
    download = subprocess.run(
        ["apt-get", "download", *PACKAGES], cwd=downloads, capture_output=True, text=True, check=False
    )
    if download.returncode:
        return download.stderr
    for package in downloads.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, unpacked], check=True)
    (unpacked / "usr").rename(folder / "usr")
    return ""


class SlurmCluster:
    """The daemons. `variables` are the environment in which sbatch and the other commands find them.

    Args:
        slurm: Folder with the unpacked packages.
        folder: Folder for settings, state and logs.
    """

    def __init__(self, slurm: Path, folder: Path) -> None:
        (self.plugins,) = slurm.glob("usr/lib/*/slurm-wlm")
        self.programs, self.folder = slurm / "usr/sbin", folder
        self.daemons: list[subprocess.Popen] = []
        self.variables = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{slurm / 'usr/bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": f"{self.plugins.parent}:{self.plugins}",
            "PYTHONPATH": str(ROOT),
        }

    def start(self) -> None:
        for name in ("state", *(f"spool.{node}" for node in NODES)):
            (self.folder / name).mkdir(parents=True)
        host = socket.gethostname().partition(".")[0]
        text = SETTINGS.format(folder=self.folder, plugins=self.plugins, host=host, ports=find_free_ports(3))
        (self.folder / "slurm.conf").write_text(text)
        self.start_daemon("slurmctld-wlm", "-c")
        for node in NODES:
            self.start_daemon("slurmd-wlm", "-N", node, "-d", str(self.programs / "slurmstepd-wlm"))
        wait_until(lambda: self.call("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "2", "two idle nodes", 60)

    def start_daemon(self, name: str, *options: str) -> None:
        with (self.folder / "daemons.txt").open("a") as printed:
            command = [str(self.programs / name), "-D", *options]
            self.daemons.append(subprocess.Popen(command, env=self.variables, stdout=printed, stderr=printed))

    def stop(self) -> None:
        """Ends the jobs, whose processes would outlive the daemons, and then these."""
        subprocess.run(["scancel", "-u", "root"], env=self.variables, check=False)
        try:
            wait_until(lambda: not self.call("squeue", "-h"), "an empty queue", 60)
        finally:
            for daemon in self.daemons:
                daemon.terminate()
            for daemon in self.daemons:
                daemon.wait(30)

    def call(self, *arguments: str) -> str:
        """Runs a command of Slurm and returns what it printed; nothing while the controller starts."""
        return subprocess.run(
            arguments, env=self.variables, capture_output=True, text=True, timeout=60, check=False
        ).stdout

    def read_job(self, number: str) -> dict[str, str]:
        """Returns the fields of a job, such as JobState and Restarts."""
        words = self.call("scontrol", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)


@contextmanager
def slurm_cluster(slurm: Path, folder: Path) -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(slurm, folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def find_free_ports(count: int) -> list[int]:
    """Returns ports of this machine on which nobody listens."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def wait_until(condition: Callable[[], object], what: str, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"no {what} within {seconds:.0f} s"
        time.sleep(0.2)
