"""From distances to distributions and curves."""

from wassail.transport.allocation import knapsack, sample_weights, transport_cost
from wassail.transport.confidence import samples_needed
from wassail.transport.curve import PopulationCurve, RiskCurve, risk_curve
from wassail.transport.distribution import Distribution, allocate
from wassail.transport.flips import Flips

__all__ = [
    "Distribution",
    "Flips",
    "PopulationCurve",
    "RiskCurve",
    "allocate",
    "knapsack",
    "risk_curve",
    "sample_weights",
    "samples_needed",
    "transport_cost",
]
