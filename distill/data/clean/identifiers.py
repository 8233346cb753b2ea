"""Addresses, names of users, numbers and personal data in texts."""

import re
from collections.abc import Callable
from functools import partial

URL = re.compile(r"""(?:https?://|www\.)[^\s<>"]*[^\s<>"'.,;:!?)\]]""", re.IGNORECASE)
EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
USER = re.compile(r"(?<![\w@/.])@[^\W\d]\w+")
DIGITS = re.compile(r"(?<!\w)[-+]?\d+(?:[.,:/]\d+)*(?!\w)")
_IBAN = re.compile(r"\b[A-Z]{2}\d{2}(?:[ ]?[A-Z0-9]{4}){2,7}(?:[ ]?[A-Z0-9]{1,3})?\b")
_CARD = re.compile(r"(?<![\d.,])\d(?:[ -]?\d){12,18}(?![\d.,]?\d)")
_PHONE = re.compile(r"(?<![\w.,/-])(?:\+|00|\(?0)[\d(][\d ()/.-]{6,}\d(?!\w)")
_ADDRESS = re.compile(r"(?<![\w.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\w.])")
_DIGITS_OF_PHONE = (8, 15)  # 15 by ITU-T E.164


def replace_personal(masks: bool) -> Callable[[str], str]:
    """Returns a function that replaces account, card and telephone numbers and addresses of computers.

    Account and card numbers are recognized by their check digits (ISO 13616, ISO/IEC 7812). With `masks` their kind
    takes their place, otherwise nothing.
    """

    def replace(text: str) -> str:
        for name, pattern, accepts in _PERSONAL:
            text = pattern.sub(partial(_mask_accepted, f"<{name}>" if masks else "", accepts), text)
        return text

    return replace


def _mask_accepted(mask: str, accepts: Callable[[str], bool], match: re.Match[str]) -> str:
    return mask if accepts(match[0]) else match[0]


def has_valid_iban_digits(number: str) -> bool:
    """Returns whether the check digits of an account number are right."""
    plain = number.replace(" ", "")
    turned = plain[4:] + plain[:4]
    return 15 <= len(plain) <= 34 and int("".join(str(int(each, 36)) for each in turned)) % 97 == 1


def has_valid_card_digit(number: str) -> bool:
    """Returns whether the check digit of a card number is right (Luhn)."""
    digits = [int(each) for each in number if each.isdigit()]
    doubled = [sum(divmod(2 * each, 10)) for each in digits[-2::-2]]
    return (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0 and len(set(digits)) > 1


def _has_digits_of_phone(number: str) -> bool:
    count = sum(each.isdigit() for each in number)
    return _DIGITS_OF_PHONE[0] <= count <= _DIGITS_OF_PHONE[1]


_PERSONAL = (
    ("account", _IBAN, has_valid_iban_digits),
    ("card", _CARD, has_valid_card_digit),
    ("address", _ADDRESS, bool),
    ("phone", _PHONE, _has_digits_of_phone),
)
