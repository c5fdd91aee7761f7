"""Measuring Strata on this machine, against what the machine can do. May import anything."""
