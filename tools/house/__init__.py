"""Counts of the repository about itself: size, the way of a call, names, long functions."""
