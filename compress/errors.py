"""The errors of this package that a person can mend."""


class ArtefactError(RuntimeError):
    """An exported artefact could not be written, or doesn't reproduce the model it was made from."""


class CompressError(ValueError):
    """Something asked of a model or runtime that it can't give: names the thing, the expected and the found."""


class VerificationError(RuntimeError):
    """The comparison of an exported artefact with its model was cut short: nothing is known of the artefact."""
