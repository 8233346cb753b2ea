"""The error for input that a person can mend."""


class InputError(ValueError):
    """Names the thing, what was expected, what was found and what would follow from going on."""


def expect(config: object, name: str, good: bool, wanted: str) -> None:
    """
    Raises:
        InputError: The setting of `config` that goes by this name, such as `on_policy.share`, isn't `good`.
    """
    if not good:
        raise InputError(f"{name}: expected {wanted}, found {getattr(config, name.rpartition('.')[2])}")
