"""The public names of an evaluation on many machines; the parts are in `wassail.evaluation.ray`."""

from wassail.connection import Link
from wassail.evaluation.ray.actor import WorkerError
from wassail.evaluation.ray.shift import Ray
from wassail.evaluation.votes import counter

__all__ = ["Link", "Ray", "WorkerError", "counter"]
