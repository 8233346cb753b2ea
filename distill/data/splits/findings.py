"""Findings from reading a data set: counts for the report, and remarks for the user."""

from dataclasses import dataclass, field


@dataclass
class Findings:
    """Counts by name, and remarks, in the order in which they are added."""

    counts: dict[str, int | str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def add(self, name: str, count: int, remark: str) -> None:
        """Records the count, and the remark if the count isn't 0."""
        self.counts[name] = count
        if count:
            self.remarks.append(remark)

    def add_dropped_empty(self, split: str, dropped: int, rows: int, what: str = "rows") -> None:
        """Records that `dropped` of the `rows` of a split were left out because they contain no text."""
        remark = f"{split}: {dropped:,} of {rows:,} {what} were left out, because they contain no text"
        self.add(f"{split}_dropped_empty", dropped, remark)
        self.counts["dropped_empty"] = int(self.counts.get("dropped_empty", 0)) + dropped


def format_rows(numbers: list[int], limit: int = 5) -> str:
    """Formats row numbers, for example as `row 3`, `rows 3, 7 and 9` or `rows 3, 7, 9, 12, 15, …`."""
    shown = [f"{number:,}" for number in numbers[:limit]]
    if len(numbers) > limit:
        return f"rows {', '.join(shown)}, …"
    return f"row {shown[0]}" if len(shown) == 1 else f"rows {', '.join(shown[:-1])} and {shown[-1]}"
