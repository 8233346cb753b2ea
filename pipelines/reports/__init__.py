"""Reports: formatting of numbers, tables and sentences, charts, the HTML page and model cards.

Public names are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipelines.reports.pruning_summary import find_code, read_pruning
    from pipelines.reports.render import Charts, render_card, render_cards, render_html, render_page
    from pipelines.reports.schema import ModelEntry, Report
    from pipelines.reports.tables import build_scores, build_summary
    from pipelines.reports.targets import deployed_shares

EXPORTS = {
    "Charts": "render",
    "ModelEntry": "schema",
    "Report": "schema",
    "build_scores": "tables",
    "build_summary": "tables",
    "deployed_shares": "targets",
    "find_code": "pruning_summary",
    "read_pruning": "pruning_summary",
    "render_card": "render",
    "render_cards": "render",
    "render_html": "render",
    "render_page": "render",
}
__all__ = [
    "Charts",
    "ModelEntry",
    "Report",
    "build_scores",
    "build_summary",
    "deployed_shares",
    "find_code",
    "read_pruning",
    "render_card",
    "render_cards",
    "render_html",
    "render_page",
]


def __getattr__(name: str) -> object:
    if name in EXPORTS:
        return getattr(import_module(f"{__name__}.{EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
