"""Terminal output: progress with rate and remaining time, or plain lines if there is no terminal."""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

# Units of progress: texts once an epoch and once, steps of trials, and timed calls.
EXAMPLES, TEXTS, STEPS, CALLS = "examples", "texts", "steps", "calls"
PLAIN_EVERY = 10.0  # seconds between two plain lines of the same task


class Advance(Protocol):
    """A function that counts finished work; `resumed` work was finished by an earlier attempt."""

    def __call__(self, count: int, note: str = "", *, resumed: bool = False) -> None:
        """Adds `count` units of work and replaces the note beside them."""


class Console:
    """Prints for the first process; other processes print nothing."""

    def __init__(self, *, quiet: bool | None = None):
        rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
        # A log file has no width; rich's default of 80 columns would truncate tables.
        width = None if sys.stdout.isatty() else 160
        self._rich = RichConsole(
            quiet=rank > 0 if quiet is None else quiet, highlight=False, emoji=False, soft_wrap=True, width=width
        )

    def __reduce__(self) -> tuple[type["Console"], tuple[()]]:
        """Makes pickling recreate the console in a spawned process, because a terminal's locks can't be pickled."""
        return Console, ()

    def say(self, text: str) -> None:
        """Prints a line verbatim: brackets are no markup."""
        self._rich.print(text, markup=False)

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Prints a table with its title; every row has a cell for each name of the header."""
        # As Text: rich parses [brackets] in strings as markup, and names of labels, columns and files contain them.
        table = Table(title=Text(title, "table.title"), title_justify="left")
        for name in header:
            table.add_column(Text(name))
        for row in rows:
            table.add_row(*map(Text, row))
        self._rich.print(table)

    @contextmanager
    def track(self, label: str, total: int, unit: str = EXAMPLES) -> Iterator[Advance]:
        """Yields a function to be called as the work goes on: a progress bar on a terminal, otherwise plain lines."""
        progress = self._show_bar if self._rich.is_terminal else self._print_lines
        with progress(label, total, unit) as advance:
            yield advance

    @contextmanager
    def _show_bar(self, label: str, total: int, unit: str) -> Iterator[Advance]:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}", markup=False),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
        )
        meter = Meter(total)
        with Progress(*columns, console=self._rich) as progress:
            task = progress.add_task(label, total=total, rate="", note="")

            def advance(count: int, note: str = "", *, resumed: bool = False) -> None:
                meter.add(count, resumed)
                progress.update(task, advance=count, rate=f"{_format_rate(meter.rate)} {unit}/s", note=note)

            yield advance

    @contextmanager
    def _print_lines(self, label: str, total: int, unit: str) -> Iterator[Advance]:
        meter, last = Meter(total), time.monotonic()

        def advance(count: int, note: str = "", *, resumed: bool = False) -> None:
            nonlocal last
            meter.add(count, resumed)
            if time.monotonic() - last >= PLAIN_EVERY:
                last = time.monotonic()
                self.say(f"  {label}: {meter.describe_progress(unit)} {note}".rstrip())

        yield advance
        self.say(f"  {label}: {meter.done} {unit} in {meter.seconds:.1f} s, {_format_rate(meter.rate)} {unit}/s")


class Meter:
    """A counter of finished work, with its rate and the remaining time."""

    def __init__(self, total: int):
        self.total, self.done, self.resumed, self.start = total, 0, 0, time.monotonic()

    def add(self, count: int, resumed: bool = False) -> None:
        """Adds finished work; work resumed from an earlier attempt counts as done, but not towards the rate."""
        self.done += count
        self.resumed += count if resumed else 0

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start

    @property
    def rate(self) -> float:
        """Units of work per second of this attempt."""
        return (self.done - self.resumed) / max(self.seconds, 1e-9)

    def describe_progress(self, unit: str) -> str:
        """Returns finished and total work, the rate, and the remaining seconds if the rate is known."""
        left = f", {(self.total - self.done) / self.rate:.0f} s left" if self.rate > 0 else ""
        return f"{self.done}/{self.total} {unit}, {_format_rate(self.rate)} {unit}/s{left}"


def print_error(message: str) -> None:
    """Prints an error message for the user, without a traceback."""
    print(f"error: {message}", file=sys.stderr)


def _format_rate(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}"
