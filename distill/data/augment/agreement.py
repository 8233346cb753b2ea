"""How far a teacher's answer to a synthetic row agrees with its answer to the original."""

import torch
from torch import Tensor

from distill.data.augment.words import INSERTED, Words


def overlap_distributions(first: Tensor, second: Tensor) -> Tensor:
    """Returns the sum over classes of the smaller probability of both: 1 - their total variation, [rows].

    Args:
        first, second: Logits [rows, classes].

    Returns:
        1 for equal distributions, 0 for those without a class in common.
    """
    return torch.minimum(torch.softmax(first.float(), -1), torch.softmax(second.float(), -1)).sum(-1)


def measure_tag_agreement(words: Words, original: Tensor, synthetic: Tensor, indices: list[int]) -> float:
    """Returns the mean overlap over the words of a tagged row.

    A word that isn't from the original, such as one of another name, counts by the probability of its tag, and one
    that was put in without a tag doesn't count.

    Args:
        words: The words of the synthetic row.
        original: The teacher's logits for the original's words [words of the original, tags]; a missing word, beyond
            the maximum length, is a row of NaN.
        synthetic: Its logits for words of the synthetic row [words, tags].
        indices: The numbers of these words in `words`.
    """
    overlaps = []
    for index, logits in zip(indices, synthetic, strict=True):
        word = words[index]
        if word.origin != INSERTED:
            overlaps.append(float(overlap_distributions(original[word.origin][None], logits[None])))
        elif word.tag is not None:
            overlaps.append(float(torch.softmax(logits.float(), -1)[word.tag]))
    known = [each for each in overlaps if each == each]
    return sum(known) / len(known) if known else 1.0
