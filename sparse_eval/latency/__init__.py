"""Timing decode attention on a GPU: what is timed, how, and against what."""
