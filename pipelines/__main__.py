"""The entry point of `stillroom COMMAND …` and `python -m pipelines COMMAND …`."""

import sys
from difflib import get_close_matches
from importlib import import_module

from pipelines.runs import cli, stops
from pipelines.runs.console import print_error

COMMANDS = {
    "distill": "train a small student on a teacher's signals, export it, measure it, report on it",
    "cache": "write, inspect, verify or repair a cache of teacher signals",
    "prune": "prune a trained model to a measured speed and train what is left",
    "quantize": "store a model in 8 bits or fewer, with or without training",
    "export": "write a checkpoint for the runtimes that it is deployed on",
    "evaluate": "score a checkpoint, measure its size and speed",
    "cascade": "answer with a small student where it is confident, and with larger ones elsewhere",
    "report": "draw the report of a finished run again, or report on any checkpoint",
    "plan": "predict memory and time of every layout on machines you don't have yet, and choose one",
    "launch": "write job files for torchrun, Ray, Kubernetes, Slurm, SkyPilot or Marathon, and submit them",
    "harness": "evaluate a causal language model on lm-eval tasks",
}


def main() -> None:
    """Runs the command named by the first argument, with the remaining arguments.

    Exits with code 2 if the command is unknown.
    """
    stops.watch_process()
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print(format_usage())
        return
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {near[0]!r}?" if near else "stillroom --help lists them"
        print_error(f"expected one of {', '.join(COMMANDS)}, found {name!r}; {hint}")
        sys.exit(2)
    sys.argv = [f"{sys.argv[0]} {name}", *sys.argv[2:]]
    cli.run(import_module(f"pipelines.{name}").main)


def format_usage() -> str:
    """Returns the text that `stillroom --help` prints."""
    lines = [f"  {name:<9} {about}" for name, about in COMMANDS.items()]
    head = "usage: stillroom COMMAND [OPTIONS]\n\nDistill and compress transformers. COMMAND is one of:\n"
    return "\n".join([head, *lines, "\n`stillroom COMMAND --help` shows its options with examples."])


if __name__ == "__main__":
    main()
