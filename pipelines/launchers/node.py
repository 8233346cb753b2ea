"""What launchers start on every node: torchrun's agent, with exit codes that tell whether to run the job again.

    python -m pipelines.launchers.node --nodes 2 --rank 0 --address first:29400 --processes 8 -- pipelines.distill ...

torchrun itself ends with 1 whatever its processes returned. This ends with 0 after success, with 2 if the command's
input is invalid, with 75 (EX_TEMPFAIL) if it was stopped, or lost the rendezvous node, before its end, and with 1
otherwise. After a signal, processes have `--grace` seconds to write a checkpoint.
"""

import argparse
import fcntl
import logging
import os
import socket
import struct
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipelines.launchers.job import INVALID_INPUT, RETRY
from pipelines.runs import stops
from pipelines.runs.launch import STOP_CODES, set_thread_share
from pipelines.settings.commands.launch import parse_nodes

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig as AgentConfig

JOIN_SECONDS = 600  # for which a node waits for the others, whose images may still be loading
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of linux/sockios.h


def main(argv: Sequence[str]) -> int:
    """Runs the command on this node and returns its exit code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    options = parse_options(argv)
    config = build_agent_config(options)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # outcomes are reported below
    say(
        f"node {options.rank} of {options.nodes}: {options.processes} processes, rendezvous at {options.address}; "
        f"waits {JOIN_SECONDS} s for the other nodes and {options.timeout} s for an answer, restarts "
        f"{options.restarts} times"
    )
    stops.defer_stop()  # the agent stops the processes
    try:
        elastic_launch(config, sys.executable)("-m", *options.command)
    except SignalException as stop:
        say(f"stopped by {stop.sigval.name}: finished work is kept, exit code {RETRY} asks to run it again")
        return RETRY
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return find_exit_code(rank, failure.exitcode)
    except RendezvousError as error:
        say(
            f"{options.address}: no response from the rendezvous node (node 0) in {options.timeout} s "
            f"({type(error).__name__}): exit code {RETRY} asks to run it again"
        )
        return RETRY
    return 0


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """Returns the options, with the command's module and arguments as `command`."""
    parser = argparse.ArgumentParser(
        prog="pipelines.launchers.node", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", required=True, help="number of nodes, or the fewest and the most as 1:4")
    parser.add_argument("--rank", type=int, required=True, help="number of this node; the rendezvous is on node 0")
    parser.add_argument("--address", required=True, help="host and port of node 0")
    parser.add_argument("--processes", type=int, default=1, help="on this node")
    parser.add_argument("--name", default="stillroom", help="of the job")
    parser.add_argument("--restarts", type=int, default=10)
    parser.add_argument("--grace", type=int, default=110, help="seconds from a signal to the end of processes")
    parser.add_argument("--timeout", type=int, default=60, help="seconds for which an answer is waited for")
    parser.add_argument("command", nargs="+", help="module and arguments, after --")
    return parser.parse_args(argv)


def build_agent_config(options: argparse.Namespace) -> "AgentConfig":
    """Returns the settings of torchrun's agent, and sets the variables that its processes need."""
    from torch.distributed.launcher.api import LaunchConfig

    min_nodes, max_nodes = parse_nodes(options.nodes)
    host = options.address.rpartition(":")[0]
    is_single = max_nodes == 1
    address = None if is_single else find_local_address(host, is_first=options.rank == 0)
    set_thread_share(options.processes)
    interface = find_interface(address) if address else None
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    return LaunchConfig(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        nproc_per_node=options.processes,
        run_id=options.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0" if is_single else options.address,
        rdzv_configs={"read_timeout": options.timeout, "join_timeout": JOIN_SECONDS}
        | ({} if is_single else {"is_host": str(int(options.rank == 0))}),
        max_restarts=options.restarts,
        monitor_interval=0.5,
        local_addr=address,
        shutdown_timeout=options.grace,
    )


def find_local_address(host: str, *, is_first: bool) -> str | None:
    """Returns the address by which the other nodes reach this one; None if it can't be told."""
    try:
        target = socket.gethostbyname(host)
        if is_first:
            return target
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))  # sends nothing: the system only chooses the route
            return str(probe.getsockname()[0])
    except OSError:
        return None


def find_interface(address: str) -> str | None:
    """Returns the network interface with this IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def find_exit_code(rank: int, code: int) -> int:
    """Returns the node's exit code after a process failed for good."""
    if code in STOP_CODES or -code in stops.SIGNALS:
        say(f"process {rank} was stopped: finished work is kept, exit code {RETRY} asks to run it again")
        return RETRY
    say(f"process {rank} failed with exit code {code}")
    return INVALID_INPUT if code == INVALID_INPUT else 1


def say(line: str) -> None:
    """Writes a line at once: the launcher's log is what a user sees."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
