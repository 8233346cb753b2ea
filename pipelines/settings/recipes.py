"""The YAML recipes of this repository by name, `--config recipe:pruned`, from a checkout or an installation."""

import difflib
import site
import sysconfig
from pathlib import Path

from distill.errors import InputError

_PREFIX = "recipe:"
CHECKOUT = Path(__file__).parents[2] / "configs"
INSTALLED = Path("share") / "stillroom" / "configs"  # pyproject.toml puts them there


def recipe_file(name: str) -> str:
    """Returns the path of the recipe in `recipe:NAME`; any other text is returned unchanged.

    Raises:
        InputError: There is no recipe of that name.
    """
    if not name.startswith(_PREFIX):
        return name
    recipes, wanted = find_recipes(), name.removeprefix(_PREFIX)
    if wanted not in recipes:
        near = difflib.get_close_matches(wanted, recipes, 1)
        hint = f"did you mean {_PREFIX}{near[0]}?" if near else f"there are {', '.join(sorted(recipes)) or 'none here'}"
        raise InputError(f"config {name!r}: no recipe of that name; {hint}")
    return str(recipes[wanted])


def find_recipes() -> dict[str, Path]:
    """Returns name -> file of every recipe; files in subfolders are named by their stem alone."""
    candidates = (CHECKOUT, Path(sysconfig.get_path("data")) / INSTALLED, Path(site.getuserbase()) / INSTALLED)
    folder = next((candidate for candidate in candidates if (candidate / "demo.yaml").is_file()), None)
    return {} if folder is None else {file.stem: file for file in sorted(folder.rglob("*.yaml"))}
