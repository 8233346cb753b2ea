"""Two machines on one: network namespaces with addresses and a cable between them that can be cut (Linux, root)."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2")
LINKS = ("link0", "link1")  # each machine's end of the cable
BURST_SECONDS = 2e-3  # of a limited link: what it may send at once after a pause


class TwoMachines:
    """The namespaces; their names contain this process's id, so that those of other processes don't meet them."""

    def __init__(self) -> None:
        self.names = tuple(f"stillroom-{os.getpid()}-{number}" for number in range(2))
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, number: int, command: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[str]:
        """Starts a command on a machine."""
        process = subprocess.Popen(  # noqa: S603 - the caller's own
            ["ip", "netns", "exec", self.names[number], *command],  # noqa: S607 - differs between systems
            env=os.environ | variables, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def cut(self) -> None:
        """Cuts the cable."""
        run_ip("-n", self.names[1], "link", "set", LINKS[1], "down")

    def join(self) -> None:
        """Joins the cable again."""
        run_ip("-n", self.names[1], "link", "set", LINKS[1], "up")


def limit_link(link: str, rate: float) -> None:
    """Limits what this machine sends to so many bytes a second, by a token bucket; 0: no limit."""
    # A large burst would let small collectives through at once, a small one costs time at high rates.
    burst = max(2**16, round(rate * BURST_SECONDS))
    bucket = ("tbf", "rate", f"{rate:.0f}bps", "burst", f"{burst}b", "latency", "50ms") if rate else ("pfifo",)
    command = ["tc", "qdisc", "replace", "dev", link, "root", *bucket]
    subprocess.run(command, check=True, capture_output=True)  # noqa: S603 - fixed words


def read_sent_bytes(link: str) -> int:
    """Returns the bytes that this machine has sent through its end of the cable."""
    return int(Path(f"/sys/class/net/{link}/statistics/tx_bytes").read_text())


def run_ip(*arguments: str) -> None:
    """Runs `ip`.

    Raises:
        CalledProcessError: It failed.
    """
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)  # noqa: S603, S607


def can_make_namespaces() -> bool:
    """Returns whether this user may make them; the tools may be missing, too."""
    name = f"stillroom-{os.getpid()}-probe"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return False
    try:
        run_ip("netns", "add", name)
        run_ip("netns", "del", name)
    except subprocess.CalledProcessError:
        return False
    return True


@contextmanager
def two_machines() -> Iterator[TwoMachines]:
    """Yields the machines, whose processes are ended with them."""
    machines = TwoMachines()
    (first, second), (one, other) = machines.names, LINKS
    for name in machines.names:
        run_ip("netns", "add", name)
    try:
        run_ip("link", "add", one, "netns", first, "type", "veth", "peer", "name", other, "netns", second)
        for name, link, address in zip(machines.names, LINKS, ADDRESSES, strict=True):
            run_ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            run_ip("-n", name, "link", "set", "lo", "up")
            run_ip("-n", name, "link", "set", link, "up")
        yield machines
    finally:
        for process in machines.processes:
            with suppress(ProcessLookupError):  # a process that is left keeps its namespace alive
                os.killpg(process.pid, signal.SIGKILL)
        for name in machines.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)  # noqa: S603, S607
