"""Fits a new head to the features of a body, before both are trained."""

from transformers import PreTrainedModel

from distill.data.batches.batches import EvalBatches
from distill.data.batches.data_module import TextDataModule
from distill.tasks.task import Task, output_layer
from distill.teacher.head import probe_head
from pipelines.runs.console import TEXTS, Console


def fit_new_head(console: Console, role: str, model: PreTrainedModel, task: Task, texts: TextDataModule) -> None:
    """Fits the model's output layer to the labels of the training texts; the body remains as it is.

    Args:
        console: Shows the progress.
        role: What the model is, `teacher` or `student`.
        model: A body with a new head for the task.
        task: The task, with labels.
        texts: The labelled texts.
    """
    with console.track(f"{role}: fitting the new head", len(texts.train), TEXTS) as advance:
        batches = EvalBatches(texts.train, task.eval_batch_size, texts.pad_id)
        probe_head(model, output_layer(model), batches, task.output_rows, advance)
