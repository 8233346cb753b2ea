"""Weights of the loss terms for a student that is trained on a share of the rows."""

from dataclasses import replace

from distill.losses.config import LossConfig


def follow_share(config: LossConfig, share: float) -> LossConfig:
    """Returns the loss with ce · share, and what ce loses added to kl: the fewer rows, the more the teacher counts.

    A loss with one of the two terms only stays as it is.

    Args:
        config: Weights of the terms.
        share: Share of the rows that is kept, above 0 and at most 1.

    Source:
        Ben-Baruch et al., "Distilling the Knowledge in Data Pruning" (ICML 2025): the optimal weight of the
        distillation term grows as fewer rows are kept. That it does so linearly is our choice.
    """
    if not (config.kl and config.ce):
        return config
    return replace(config, ce=config.ce * share, kl=config.kl + config.ce * (1 - share))
