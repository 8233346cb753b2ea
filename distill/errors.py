"""The error for invalid input that the user can correct."""


class InputError(ValueError):
    """Invalid input; the message names the item, what was expected, what was found and the consequence."""


def check_setting(config: object, name: str, good: bool, wanted: str) -> None:
    """Checks a setting of `config`; `name` is its full name, such as `on_policy.share`.

    Raises:
        InputError: `good` is False.
    """
    if not good:
        raise InputError(f"{name}: expected {wanted}, found {getattr(config, name.rpartition('.')[2])}")
