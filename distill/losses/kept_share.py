"""Weights of the loss terms for a student that is trained on a share of the rows."""

from dataclasses import replace

from distill.losses.config import LossConfig


def scale_ce_by_kept_share(config: LossConfig, share: float) -> LossConfig:
    """Returns the loss with ce · share, and what ce loses added to kl: the fewer rows, the more the teacher counts.

    Ramps of the two weights follow it too. A loss with one of the two terms only stays as it is.

    Args:
        config: Weights of the terms.
        share: Share of the rows that is kept, above 0 and at most 1.

    Source:
        Ben-Baruch et al., "Distilling the Knowledge in Data Pruning" (ICML 2025): the optimal weight of the
        distillation term grows as fewer rows are kept. That it does so linearly is our choice.
    """
    if not (config.computes("kl") and config.computes("ce")):
        return config
    weights = replace(config, ce=config.ce * share, kl=config.kl + config.ce * (1 - share))
    if not config.ramps.keys() & {"kl", "ce"}:
        return weights
    kl, ce = (config.ramps.get(name, (getattr(config, name),) * 2) for name in ("kl", "ce"))
    ramps = {
        "ce": (ce[0] * share, ce[1] * share),
        "kl": (kl[0] + ce[0] * (1 - share), kl[1] + ce[1] * (1 - share)),
    }
    return replace(weights, ramps=config.ramps | ramps)
