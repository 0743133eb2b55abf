"""From distances to distributions and curves."""

from wassail.transport.allocation import knapsack, sample_weights, transport_cost
from wassail.transport.curve import RiskCurve, risk_curve
from wassail.transport.distribution import Distribution, allocate
from wassail.transport.flips import Flips

__all__ = [
    "Distribution",
    "Flips",
    "RiskCurve",
    "allocate",
    "knapsack",
    "risk_curve",
    "sample_weights",
    "transport_cost",
]
