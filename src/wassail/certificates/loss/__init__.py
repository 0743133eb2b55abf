"""The worst-case loss: slopes, exact values, curves."""
