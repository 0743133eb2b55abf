"""Losses for training: what a batch can lose over a Wasserstein ball, from both sides.

`robust` climbs, as an attack does; `certified` bounds, as a certificate does. Each is a line in
anybody's training loop.
"""
