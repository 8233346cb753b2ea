"""The error for input that a person can mend."""


class InputError(ValueError):
    """Names the thing, what was expected, what was found and what would follow from going on."""
