"""Names of persons, found by a tagger."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import AutoModelForTokenClassification, AutoTokenizer, pipeline

from distill.data.clean.config import is_person

_OVERLAP = 32  # tokens that two pieces of a long text share, so that a name isn't cut


@dataclass(frozen=True)
class NameFinder:
    """Replaces the names of persons in a text.

    Args:
        folder: Checkpoint of a token classifier with a label of persons, see `is_person`.
        mask: Text that takes the place of a name.
    """

    folder: str
    mask: str = "<name>"

    def replace(self, text: str) -> str:
        """Returns the text with `mask` in the place of each name; a long text is read in pieces."""
        for entity in reversed(self._tagger(text)):
            if is_person(entity["entity_group"]):
                text = text[: entity["start"]] + self.mask + text[entity["end"] :]
        return text

    @cached_property
    def _tagger(self) -> Any:
        """The tagger, loaded in the process that uses it."""
        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        model = AutoModelForTokenClassification.from_pretrained(self.folder)
        longest = getattr(model.config, "max_position_embeddings", None) or tokenizer.model_max_length
        tokenizer.model_max_length = min(tokenizer.model_max_length, longest)
        return pipeline(
            "token-classification", model=model, tokenizer=tokenizer, aggregation_strategy="first", stride=_OVERLAP,
            device="cpu",
        )  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "mask": self.mask}
