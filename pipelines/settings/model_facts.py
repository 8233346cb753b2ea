"""Facts from a local checkpoint's config.json, read as JSON, for checks before torch is imported."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from distill.checkpoint.folder import PACKAGE, in_package
from distill.student.family import FAMILIES, family_of
from distill.student.spec import Sizes
from distill.tasks.names import task_of_head


@dataclass(frozen=True)
class ModelFacts:
    """A checkpoint's config.json.

    If a key is absent, transformers has a default for it. Properties that depend on such a key are None, and are
    checked after the config has been loaded.
    """

    name: str
    config: Mapping[str, Any]

    @property
    def architectures(self) -> list[str]:
        names = self.config.get("architectures")
        return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []

    @property
    def labels(self) -> int | None:
        """Number of labels of the head; None if unknown."""
        names, count = self.config.get("id2label"), self.config.get("num_labels")
        return len(names) if isinstance(names, dict) else count if isinstance(count, int) else None

    @property
    def task(self) -> str:
        """Task that the model was trained for; empty for a pre-trained model without a head, or if ambiguous."""
        problem = self.config.get("problem_type")
        return task_of_head(self.architectures, problem if isinstance(problem, str) else None, self.labels)

    def check_family(self) -> None:
        """Checks that students can be built from this architecture.

        Raises:
            InputError: No student can be built from this family of models.
        """
        if isinstance(self.config.get("model_type"), str) and "auto_map" not in self.config:
            with suppress(AttributeError):
                family_of(SimpleNamespace(**self.config))  # type: ignore[arg-type]

    @property
    def sizes(self) -> Sizes | None:
        """Sizes of the model; None if its family isn't supported or a size is unknown."""
        own = SimpleNamespace(**self.config)
        if self.config.get("model_type") not in FAMILIES or "auto_map" in self.config:
            return None
        try:
            family = family_of(own)  # type: ignore[arg-type]
            if family.free and not {"num_key_value_heads", "head_dim"} <= self.config.keys():
                return None
            sizes = family.sizes(own)  # type: ignore[arg-type]
        except (AttributeError, TypeError, ZeroDivisionError):
            return None
        whole = all(isinstance(size, int) for size in (sizes.hidden, sizes.heads, sizes.ffn))
        return sizes if whole else None  # the config's class reports the wrong size by name


def read_facts(model: str) -> ModelFacts | None:
    """Returns the facts of a local checkpoint; None if it isn't on this machine or its config can't be read.

    Errors in the checkpoint are reported by the function that loads it.
    """
    try:
        folder = local_folder(model)
        content = json.loads((folder / "config.json").read_text(encoding="utf-8")) if folder else None
    except (OSError, ValueError, RecursionError):
        return None
    return ModelFacts(model, content) if isinstance(content, dict) else None


def local_folder(model: str) -> Path | None:
    """Returns the folder of a checkpoint on this machine or in an installed package."""
    if model.startswith(PACKAGE):
        return in_package(model, "model")  # raises a ValueError if there is no such package
    return Path(model) if Path(model).is_dir() else None
