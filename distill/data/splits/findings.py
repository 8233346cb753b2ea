"""What reading a data set brought to light: counts for the report, and a sentence for each that a person should see."""

from dataclasses import dataclass, field


@dataclass
class Findings:
    """Collects counts by name and sentences, in the order in which they are found."""

    counts: dict[str, int | str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def add(self, name: str, count: int, remark: str) -> None:
        """Keeps the count; the remark only where there is anything to remark on."""
        self.counts[name] = count
        if count:
            self.remarks.append(remark)

    def add_dropped_empty(self, split: str, dropped: int, rows: int, what: str = "rows") -> None:
        """Of `rows` of a split `dropped` hold no text."""
        remark = f"{split}: {dropped:,} of {rows:,} {what} were left out, because they hold no text"
        self.add(f"{split}_dropped_empty", dropped, remark)
        self.counts["dropped_empty"] = int(self.counts.get("dropped_empty", 0)) + dropped


def first_numbers(numbers: list[int], most: int = 5) -> str:
    """row 3; rows 3, 7 and 9; rows 3, 7, 9, 12, 15, …"""
    shown = [f"{number:,}" for number in numbers[:most]]
    if len(numbers) > most:
        return f"rows {', '.join(shown)}, …"
    return f"row {shown[0]}" if len(shown) == 1 else f"rows {', '.join(shown[:-1])} and {shown[-1]}"
