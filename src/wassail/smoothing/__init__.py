"""Smoothing: certificates for networks of any size, for the model that sees its input with noise.

`model` has the smoothed model and its votes, `growth` how much accuracy a budget can take from it,
`certificate` what is proved. The statements are about the smoothed model, never about the bare one.
"""
