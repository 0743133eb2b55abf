"""The public names of an evaluation on many machines; the parts are in `wassail.evaluation.ray`."""

from wassail.connection import Link
from wassail.evaluation.ray.runner import Ray, WorkerError
from wassail.evaluation.votes import counter

__all__ = ["Link", "Ray", "WorkerError", "counter"]
