"""The error for an artefact that doesn't keep its promise."""


class ArtefactError(RuntimeError):
    """An exported artefact could not be written, or doesn't reproduce the model it was made from."""
