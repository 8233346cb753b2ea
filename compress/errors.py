"""Exceptions of this package that the user can act on."""

from distill.errors import InputError


class ExportError(RuntimeError):
    """An exported artefact could not be written or doesn't reproduce the model that it was exported from."""


class CompressError(InputError):
    """A request that a model or runtime doesn't support; the message has the setting, expected and found value."""


class VerificationError(RuntimeError):
    """The comparison of an exported artefact with its model was interrupted, so the artefact is unverified."""


class TimingError(RuntimeError):
    """The process that times models failed or was killed, so that their latency is unknown."""
