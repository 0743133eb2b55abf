"""Certificates: what no distribution in the ball can exceed. Structure, bound propagation,
cells, slopes, branch and bound.
"""
