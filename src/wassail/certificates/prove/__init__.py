"""Proofs about samples: one problem, one ladder of ways to prove it, and what is asked of it."""
