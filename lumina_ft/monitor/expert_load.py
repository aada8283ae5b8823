"""Numbers that describe how evenly tokens are spread over experts."""

import numpy as np
from numpy.typing import NDArray


def load_shares(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Share of routed slots per expert, relative to an even spread.

    Args:
        counts: [L, E] tokens routed to each expert, one row per MoE layer.

    Returns:
        [L, E]; 1.0 everywhere is perfect balance, a row without tokens is 0.
    """
    totals = counts.sum(axis=1, keepdims=True).astype(np.float64)
    return np.divide(counts * counts.shape[1], totals, out=np.zeros(counts.shape), where=totals > 0)


def load_summary(counts: NDArray[np.int64]) -> dict[str, float]:
    """Balance of a set of counts for the metrics.

    Args:
        counts: [L, E] tokens routed to each expert, one row per MoE layer.

    Returns:
        `expert_load_max`: largest share in any layer relative to an even spread (1 is perfect, E the worst);
        `expert_load_cv`: coefficient of variation over experts, mean over layers;
        `experts_idle`: experts without a single token, summed over layers.
    """
    shares = load_shares(counts)
    return {
        "expert_load_max": float(shares.max(initial=0.0)),
        "expert_load_cv": float(shares.std(axis=1).mean()) if counts.size else 0.0,
        "experts_idle": float((counts == 0).sum()),
    }
