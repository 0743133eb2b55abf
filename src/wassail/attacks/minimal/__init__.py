"""Engines that look for the nearest flip: the tracker, how an engine is run, our own schedule, one
file a round.
"""
