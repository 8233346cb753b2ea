"""Remains of HTML and Markdown in texts."""

import html
import re

_BLOCKS = (
    "address article aside blockquote br dd div dl dt fieldset figcaption figure footer form h1 h2 h3 h4 h5 h6 header"
)
_BLOCKS += " hr li main nav ol p pre section table tbody td tfoot th thead tr ul"
_INLINE = "a abbr b big cite code del em font i img ins kbd mark q s samp small span strike strong sub sup tt u var"
_WHOLE = re.compile(r"<!--.*?-->|<(script|style)\b[^<>]*>.*?</\1\s*>", re.DOTALL | re.IGNORECASE)


def _match_tags(names: str) -> re.Pattern[str]:
    return re.compile(rf"</?(?:{'|'.join(names.split())})(?:\s[^<>]*)?/?>", re.IGNORECASE)


_BLOCK_TAGS, _INLINE_TAGS = _match_tags(_BLOCKS), _match_tags(_INLINE)
_REFERENCE = re.compile(r"&(?:#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,30});")

_MARKDOWN = (
    (re.compile(r"^\s*(?:`{3,}|~{3,})\w*\s*$", re.M), ""),  # fences
    (re.compile(r"!?\[([^\[\]\n]+)\]\([^()\s]+(?:\s+\"[^\"]*\")?\)"), r"\1"),  # links and images
    (re.compile(r"^\s{0,3}#{1,6}\s+", re.M), ""),  # headings
    (re.compile(r"^\s{0,3}(?:>\s?)+", re.M), ""),  # quotes
    (re.compile(r"(?<!\w)(\*\*\*|\*\*|\*|___|__|_|~~)(?=\S)(.+?)(?<=\S)\1(?!\w)"), r"\2"),  # emphasis
    (re.compile(r"(`+)([^`]+)\1"), r"\2"),  # code
)


def remove_html(text: str) -> str:
    """Returns the text without known tags, scripts, styles and comments, with character references resolved.

    Tags of blocks leave a blank. Other angle brackets and ampersands stay: they aren't HTML.
    """
    text = _INLINE_TAGS.sub("", _BLOCK_TAGS.sub(" ", _WHOLE.sub(" ", text)))
    return _REFERENCE.sub(lambda match: html.unescape(match[0]), text)


def remove_markdown(text: str) -> str:
    """Returns the text without marks of emphasis, headings, quotes, code and fences; of links, their text stays."""
    for pattern, replacement in _MARKDOWN:
        text = pattern.sub(replacement, text)
    return text
