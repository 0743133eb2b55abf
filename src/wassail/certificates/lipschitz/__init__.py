"""Lipschitz constants, from cheap to exact."""
