"""Every kind of broken input ends a command in time with a message that names the cause and without a traceback, or is
accepted with a remark.
"""

import csv
import json
import re
import sys
from pathlib import Path

import pytest
from transformers import BertTokenizerFast

from pipelines import distill
from pipelines.runs import cli
from pipelines.runs.files import hash_content
from support.broken_inputs import broken_checkpoints, broken_data, broken_runs, broken_settings
from support.broken_inputs.broken_runs import REFUSED_OR_REBUILT, STAGES, folder_of
from support.broken_inputs.case import ACCEPTED, Case, Place, Words, place_from
from support.commands import small_run
from support.tiny_models import VOCABULARY, build_model, make_rows, saved

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
FRESH = [*broken_checkpoints.CASES, *broken_data.CASES, *broken_settings.CASES]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher with a head for the data's labels, a separate student, a headless body, and the data."""
    root = tmp_path_factory.mktemp("pristine")
    tokenizer = BertTokenizerFast(vocab={word: i for i, word in enumerate(VOCABULARY)}, model_max_length=64)
    saved(build_model("bert"), tokenizer, root / "teacher")
    saved(build_model("bert", num_hidden_layers=2), tokenizer, root / "student")
    saved(build_model("bert", "Model"), tokenizer, root / "body")
    (root / "data").mkdir()
    for split, count, seed in (("train", 60, 1), ("test", 20, 2)):
        with (root / "data" / f"{split}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("text", "label"), *make_rows(count, seed)])
    return root


@pytest.fixture(scope="module")
def finished(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a finished run with its inputs, and the hash of its student."""
    place = place_from(pristine, tmp_path_factory.mktemp("finished"))
    assert run(words_of(place, {})) == ACCEPTED
    return place.root, student_hash(place)


def words_of(place: Place, more: Words) -> list[str]:
    usual = small_run(place.teacher, place.data, place.run, "--until", "distill", "--epochs", "1")
    given: Words = dict(zip(usual[::2], usual[1::2], strict=True)) | more
    listed = [(flag, each) for flag, value in given.items() for each in ([value] if isinstance(value, str) else value)]
    return [f"{flag}={value}" for flag, value in listed]


def run(arguments: list[str]) -> int:
    """Runs the command in this process and returns its exit code; an uncaught exception is a traceback for the user."""
    before, sys.argv = sys.argv, ["pipelines.distill", *arguments]
    try:
        cli.run(distill.main)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    finally:
        sys.argv = before
    return 0


def student_hash(place: Place) -> str:
    return hash_content(folder_of(place, "distill") / "model")


@pytest.mark.parametrize("case", FRESH, ids=lambda case: case.name)
def test_a_broken_input_is_named_without_a_traceback(
    case: Case, pristine: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    place = place_from(pristine, tmp_path)
    more = case.damage(place)
    before = {name: hash_content(place.root / name) for name in ("teacher", "data") if (place.root / name).is_dir()}
    code = run(words_of(place, more))
    printed = "".join(capfd.readouterr())
    assert code == case.ends, printed
    assert "Traceback" not in printed
    assert re.search(case.message, printed, re.DOTALL), printed
    assert len(printed) < 20_000, "a message that nobody can read"
    after = {name: hash_content(place.root / name) for name in before}
    assert after == before, "an input was changed"


@pytest.mark.parametrize("case", broken_runs.CASES, ids=lambda case: case.name)
def test_a_damaged_run_is_named_or_rebuilt_identically(
    case: Case, finished: tuple[Path, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    root, student = finished
    place = place_from(root, tmp_path)
    case.damage(place)
    code = run(words_of(place, {}))
    printed = "".join(capfd.readouterr())
    assert code in (0, 2) if case.ends == REFUSED_OR_REBUILT else code == case.ends, printed
    assert "Traceback" not in printed
    assert re.search(case.message, printed), printed
    if code == 0:
        assert student_hash(place) == student, "built on something unknown"
        assert all(json.loads((folder_of(place, stage) / "manifest.json").read_text()) for stage in STAGES)
