"""The example notebook, executed completely in a kernel of this interpreter on few texts."""

import re
from pathlib import Path

import nbformat
import pytest
from ipykernel.kernelspec import write_kernel_spec
from nbclient import NotebookClient
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from support.commands import ROOT

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
CLASSES = 77


def read_notebook() -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=4)


@pytest.fixture(scope="module")
def finished_notebook(tmp_path_factory: pytest.TempPathFactory) -> tuple[nbformat.NotebookNode, Path]:
    """The executed notebook with its outputs, and its output folder."""
    folder = tmp_path_factory.mktemp("notebook")
    # A separate kernel spec: `python3` may name another interpreter in the user's home, or be absent.
    write_kernel_spec(folder / "kernels" / "stillroom-test")
    notebook = read_notebook()
    client = NotebookClient(
        notebook, kernel_name="stillroom-test", timeout=300, resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(folder))
        patch.setenv("NOTEBOOK_ROWS", "160")
        patch.setenv("NOTEBOOK_EPOCHS", "1")
        patch.setenv("NOTEBOOK_OUTPUT", str(folder / "output"))
        patch.setenv("OMP_NUM_THREADS", "1")
        client.execute()
    return notebook, folder / "output"


def read_output(notebook: nbformat.NotebookNode) -> str:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(output.text for output in outputs if output.get("name") == "stdout")


@pytest.mark.slow
def test_every_cell_runs_without_an_error(finished_notebook):
    notebook, _ = finished_notebook
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [output for output in outputs if output.output_type == "error"]
    message = "".join(output.get("text", "") for output in outputs)
    assert "Traceback" not in message
    assert "160 texts to train on, 160 to validate, 160 to test" in message


@pytest.mark.slow
def test_the_notebooks_students_are_better_than_chance(finished_notebook):
    notebook, _ = finished_notebook
    scores = [(name, float(score)) for name, score in re.findall(r"(.*): accuracy (\d\.\d+)", read_output(notebook))]
    assert [name for name, _ in scores] == [
        *("teacher", "teacher", "student", "student, loaded", "student with our own objective")
    ]
    by_name = dict(scores)
    assert by_name["student, loaded"] == by_name["student"]
    assert min(by_name.values()) > 5 / CLASSES
    assert scores[-1][1] > 5 / CLASSES


@pytest.mark.slow
def test_the_notebooks_student_folder_is_a_stock_checkpoint(finished_notebook):
    _, output = finished_notebook
    student = AutoModelForSequenceClassification.from_pretrained(output / "student")
    assert student.config.num_hidden_layers == 2
    assert student.config.num_labels == CLASSES
    ids = AutoTokenizer.from_pretrained(output / "student")("Where is my card?", return_tensors="pt")
    assert student(**ids).logits.shape == (1, CLASSES)
    assert sorted(folder.name for folder in output.iterdir()) == ["cache", "student"]


def test_the_data_is_found_from_the_root_and_from_the_examples_folder(monkeypatch):
    first = next(cell.source for cell in read_notebook().cells if cell.cell_type == "code")
    for name in ("NOTEBOOK_ROWS", "NOTEBOOK_EPOCHS", "NOTEBOOK_OUTPUT"):
        monkeypatch.delenv(name, raising=False)
    for start in (ROOT, ROOT / "examples"):
        monkeypatch.chdir(start)
        variables: dict = {}
        exec(first, variables)
        assert variables["ROOT"].samefile(ROOT)
        assert (variables["ROOT"] / variables["DATA"] / "train.csv").is_file()
        assert (variables["ROWS"], variables["EPOCHS"]) == (600, 1)
        assert variables["OUTPUT"] == variables["ROOT"] / "runs" / "notebook"


def test_the_notebook_is_stored_without_outputs():
    notebook = read_notebook()
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.execution_count is None
            assert not cell.outputs
