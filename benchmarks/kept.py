"""What earlier calls of a benchmark left in its folder: which settings made it, and where a run's checkpoints are."""

import argparse
import json
from collections.abc import Collection
from pathlib import Path

SETTINGS = "settings.json"


def keep_to(output: Path, given: argparse.Namespace, *, free: Collection[str]) -> None:
    """What is kept in a folder was made with one set of settings; those named in `free` may change.

    Raises:
        SystemExit: Another call made something there with others.
    """
    own = {name: value for name, value in vars(given).items() if name not in {"output", *free}}
    output.mkdir(parents=True, exist_ok=True)
    file = output / SETTINGS
    # A call that ended before it made anything, as with a misspelt path, binds no other.
    bound = file.exists() and any(place != file for place in output.iterdir())
    before = json.loads(file.read_text()) if bound else own
    if before != own:
        names = [name for name in {**before, **own} if before.get(name) != own.get(name)]
        changed = ", ".join(f"{name} {before.get(name)}, not {own.get(name)}" for name in names)
        raise SystemExit(f"{output} was made with {changed}: its results would be told as this call's; name a new one")
    file.write_text(json.dumps(own))


def checkpoint_of(output: Path, stage: str) -> Path:
    """The checkpoint of a finished run's stage, as its report tells; those of other settings may lie beside it."""
    stages = json.loads((output / "report.json").read_text())["stages"]
    told = next(Path(each["folder"]) for each in stages if each["name"] == stage)
    return output / stage / told.name / "model"


def only_checkpoint(output: Path, stage: str) -> Path:
    """The same of a run that ended before its report.

    Raises:
        SystemExit: The stage was made more than once.
    """
    return only(output, stage, "model", "checkpoint")


def only(output: Path, stage: str, name: str, what: str) -> Path:
    """What a stage that was made once has of that name; `what` it is, for the error.

    Raises:
        SystemExit: It was made more than once, or has none.
    """
    found = sorted((output / stage).glob(f"*/{name}"))
    if len(found) != 1:
        raise SystemExit(
            f"{output / stage}: expected one {what}, found {len(found)}: it isn't known which is this call's; "
            "name a new folder"
        )
    return found[0]
