"""The slope at infinity as the paper defines it, by all cells: a check that shares no search."""

from collections.abc import Sequence
from dataclasses import replace

from wassail.certificates.bound import Bound
from wassail.certificates.exact.cells import enumerate_cells
from wassail.certificates.exact.cones import pairs_of
from wassail.certificates.exact.infinity import _over_cones
from wassail.certificates.graph.dense import Piecewise
from wassail.certificates.graph.region import Region


def infinity_by_cells(network: Piecewise, norm: float, labels: Sequence[int]) -> Bound:
    """The steepest gap over the recession cones of all cells, biases included.

    `max over D, k, j of sup { (e_j - e_k)^T J_D u : u in rec(C_D), ||u||_r <= 1 }`. The upper side
    holds if the list of cells is complete (info says whether).
    """
    pairs = pairs_of(network, labels)
    cells = enumerate_cells(network, Region.make(None, network.inputs))
    tasks = [(mask, pair) for mask in cells.masks for pair in pairs]
    bound = _over_cones(network, norm, tasks, "cells")
    return replace(bound, info={**bound.info, "complete": cells.complete})
