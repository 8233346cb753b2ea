"""The job that a launcher is to run: a command of this package on some nodes."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from distill.errors import InputError
from pipelines.settings.commands.launch import LaunchConfig
from pipelines.settings.places import is_url

RETRY = 75  # EX_TEMPFAIL of sysexits.h: stopped before its end, to be run again
INVALID_INPUT = 2  # invalid input: running it again would not help
PARALLEL = ("distill", "cache", "prune", "quantize")  # commands that run on several processes
_SPLIT = ("--devices", "--machine.devices")


class ShellWord(str):
    """A word with an expression that a shell on the node expands."""


@dataclass(frozen=True)
class ClusterJob:
    """A command on some nodes.

    Args:
        module: Module of the command, such as pipelines.distill.
        arguments: Its arguments.
        config: The nodes and the settings of the launcher.
    """

    module: str
    arguments: tuple[str, ...]
    config: LaunchConfig

    @property
    def is_kept_at_url(self) -> bool:
        """Whether the command's output is at a URL."""
        parts = [part for argument in self.arguments for part in argument.split("=", 1)]
        return any(name == "--output" and is_url(value) for name, value in pairwise(parts))

    def node_command(self, rank: str, address: str) -> list[str]:
        """Returns the words that a node starts.

        Args:
            rank: Its number, or a shell's expression for it.
            address: Address of the first node, or a shell's expression for it.
        """
        config = self.config
        return [
            "python", "-m", "pipelines.launchers.node", f"--nodes={config.nodes}", f"--processes={config.per_node}",
            ShellWord(f"--rank={rank}"), ShellWord(f"--address={address}:{config.port}"), f"--name={config.name}",
            f"--restarts={config.restarts}", f"--grace={config.worker_grace}", f"--timeout={config.timeout}",
            "--", self.module, *self.arguments,
        ]  # fmt: skip


@dataclass(frozen=True)
class LauncherFiles:
    """What a launcher runs.

    Args:
        files: File name -> content.
        submit: The words that submit it, with the files' names as they are.
        notes: Sentences on what isn't in the files.
    """

    files: Mapping[str, str] = field(default_factory=dict)
    submit: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def read_command(command: Sequence[str], config: LaunchConfig) -> ClusterJob:
    """Returns the job that runs the command after `--`.

    Args:
        command: `python -m pipelines.distill …`, `stillroom distill …` or `distill …`.
        config: The nodes.

    Raises:
        InputError: It isn't a command that runs on several processes, or sets their number itself.
    """
    rest = list(command)
    if rest[:2] and rest[0].startswith("python") and rest[1] == "-m":
        rest = rest[2:]
    elif rest[:1] == ["stillroom"]:
        rest = rest[1:]
    name = rest[0].removeprefix("pipelines.") if rest else ""
    if name not in PARALLEL:
        raise InputError(
            f"command after --: expected python -m pipelines.distill, or {', '.join(PARALLEL[1:])}, found "
            f"{' '.join(command[:3]) or 'none'}: there would be nothing to run on the nodes"
        )
    flag = next((word for word in rest[1:] if word.partition("=")[0] in _SPLIT), None)
    if flag is not None:
        raise InputError(
            f"command after --: expected no {flag.partition('=')[0]}, found {flag}: --processes sets how many run on "
            "each node"
        )
    return ClusterJob(f"pipelines.{name}", tuple(rest[1:]), config)


def quote_words(words: Sequence[str]) -> str:
    """Returns the words as a line for a shell, which expands nothing but the expressions."""
    return " ".join(f'"{word}"' if isinstance(word, ShellWord) else shlex.quote(word) for word in words)
