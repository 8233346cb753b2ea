"""Two machines on one: network namespaces with addresses and a cable between them that can be cut (Linux, root)."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

ADDRESSES = ("10.77.0.1", "10.77.0.2")


class TwoMachines:
    """The namespaces; their names contain this process's id, so that tests beside each other don't meet."""

    def __init__(self) -> None:
        self.names = tuple(f"stillroom-{os.getpid()}-{number}" for number in range(2))
        self.links = tuple(f"link{number}" for number in range(2))
        self.processes: list[subprocess.Popen] = []

    def start(self, number: int, command: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen:
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.names[number], *command],
            env=os.environ | variables, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def cut(self) -> None:
        ip("-n", self.names[1], "link", "set", self.links[1], "down")

    def join(self) -> None:
        ip("-n", self.names[1], "link", "set", self.links[1], "up")

    def limit(self, megabits: float) -> None:
        """Limits what each machine sends, by a token bucket."""
        for name, link in zip(self.names, self.links, strict=True):
            bucket = ("root", "tbf", "rate", f"{megabits}mbit", "burst", "256kb", "latency", "50ms")
            command = ["ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", link, *bucket]
            subprocess.run(command, check=True, capture_output=True)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def can_make_namespaces() -> bool:
    """Returns whether this user may make them; the tool may be missing, too."""
    name = f"stillroom-{os.getpid()}-probe"
    if shutil.which("ip") is None:
        return False
    try:
        ip("netns", "add", name)
        ip("netns", "del", name)
    except subprocess.CalledProcessError:
        return False
    return True


@contextmanager
def two_machines() -> Iterator[TwoMachines]:
    machines = TwoMachines()
    (first, second), (one, other) = machines.names, machines.links
    for name in machines.names:
        ip("netns", "add", name)
    try:
        ip("link", "add", one, "netns", first, "type", "veth", "peer", "name", other, "netns", second)
        for name, link, address in zip(machines.names, machines.links, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", link, "up")
        yield machines
    finally:
        for process in machines.processes:
            with suppress(ProcessLookupError):  # a process that is left keeps its namespace alive
                os.killpg(process.pid, signal.SIGKILL)
        for name in machines.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
