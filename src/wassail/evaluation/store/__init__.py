"""The run directory: written so that nothing is lost, read so that nothing is believed."""

from wassail.evaluation.store.store import Store

__all__ = ["Store"]
