"""`python -m pipelines.launch`: writes what a launcher runs, and submits it where the launcher is at hand."""

import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path

from distill.errors import InputError
from pipelines.launchers.job import ClusterJob, LauncherFiles, read_command
from pipelines.launchers.kubernetes import write_kubernetes
from pipelines.launchers.marathon import write_marathon
from pipelines.launchers.ray import write_ray
from pipelines.launchers.skypilot import write_skypilot
from pipelines.launchers.slurm import write_slurm
from pipelines.launchers.torchrun import write_torchrun
from pipelines.runs import cli
from pipelines.runs.console import Console
from pipelines.runs.output import write_unedited
from pipelines.settings.commands.launch import LaunchConfig, check_launcher

LAUNCHERS: dict[str, Callable[[ClusterJob], LauncherFiles]] = {
    "torchrun": write_torchrun,
    "ray": write_ray,
    "kubernetes": write_kubernetes,
    "slurm": write_slurm,
    "skypilot": write_skypilot,
    "marathon": write_marathon,
}
EXAMPLES = """\
  python -m pipelines.launch torchrun --processes 2 -- python -m pipelines.distill --config configs/demo.yaml \\
      --output runs/demo
  python -m pipelines.launch kubernetes --nodes 2 --gpus 8 --image registry/stillroom:1 --volume shared-claim -- \\
      python -m pipelines.distill --teacher /shared/teacher --data /shared/texts --output /shared/runs/mine
  python -m pipelines.launch slurm --nodes 1:4 --gpus 8 --queue gpu --submit -- python -m pipelines.distill \\
      --config configs/demo.yaml --output /shared/runs/demo"""


def main(argv: Sequence[str]) -> None:
    """Runs the command with these arguments."""
    launcher, options, command = split_launcher(argv)
    config = cli.parse(
        LaunchConfig,
        options,
        prog=f"pipelines.launch {launcher}",
        about="Write the script or the manifests with which a launcher runs the command after -- on several machines. "
        f"LAUNCHER is {', '.join(LAUNCHERS)}.",
        examples=EXAMPLES,
        short={},
        command="-- python -m pipelines.COMMAND ...",
    )
    check_launcher(launcher, config)
    job = read_command(command, config)
    manifest, console, folder = LAUNCHERS[launcher](job), Console(), Path(config.output)
    write_unedited(folder, manifest.files)
    rows = [(name, str(folder / name)) for name in manifest.files]
    console.table(f"{launcher}: {config.nodes} nodes of {config.per_node} processes", ("file", "where"), rows)
    for note in manifest.notes:
        console.say(f"  {note}")
    if config.submit:
        submit(launcher, manifest, folder, console)
    elif manifest.submit:
        console.say(f"  submit it with: {shlex.join(list_submission(manifest, folder))}")


def split_launcher(argv: Sequence[str]) -> tuple[str, list[str], list[str]]:
    """Returns the launcher, the options, and the words after `--`.

    Raises:
        InputError: The launcher is unknown or missing.
    """
    args = list(argv)
    options, command = (args[: args.index("--")], args[args.index("--") + 1 :]) if "--" in args else (args, [])
    if not options or options[0] in ("-h", "--help"):
        return "LAUNCHER", ["--help"], []
    if options[0] not in LAUNCHERS:
        near = get_close_matches(options[0], LAUNCHERS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"launcher: expected one of {', '.join(LAUNCHERS)}, found {options[0]!r}{hint}")
    return options[0], options[1:], command


def list_submission(manifest: LauncherFiles, folder: Path) -> list[str]:
    """Returns the words that submit a manifest from here, where the command's relative paths are found."""
    return [str(folder / word) if word in manifest.files else word for word in manifest.submit]


def submit(launcher: str, manifest: LauncherFiles, folder: Path, console: Console) -> None:
    """Runs the launcher's own command on the files.

    Raises:
        InputError: The launcher has no such command, it isn't installed, or it rejected the files.
    """
    if not manifest.submit:
        raise InputError(f"submit: {launcher} has no command that submits files: submit them yourself")
    program = shutil.which(manifest.submit[0])
    if program is None:
        raise InputError(
            f"submit: expected {manifest.submit[0]} on this machine, found none: the files are in {folder}, submit "
            "them from a machine that has it"
        )
    command = list_submission(manifest, folder)
    done = subprocess.run([program, *command[1:]], check=False)  # noqa: S603 - the launcher's own
    if done.returncode:
        raise InputError(f"submit: {shlex.join(command)} ended with {done.returncode}: see its message above")
    console.say(f"  submitted with: {shlex.join(command)}")


if __name__ == "__main__":
    cli.run(main)
