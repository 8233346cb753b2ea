"""The commands in README.md and the pages of docs/, as written there."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands_of(document: Path) -> list[str]:
    """Returns the lines of the document's bash blocks without comments, then complete commands in its sentences."""
    text = document.read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, re.S)
    lines = [line.split(" #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    within = [" ".join(code.split()) for code in re.findall(r"`(python -m [^`]*)`", prose)]
    return lines + [code for code in within if is_complete(code)]


def is_complete(code: str) -> bool:
    """Returns whether a command in a sentence is complete: with arguments, and without ellipses or placeholders."""
    return "…" not in code and " --" in code and not re.search(r" [A-Z]+( |$)", code)
