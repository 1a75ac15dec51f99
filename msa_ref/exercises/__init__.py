"""Checks of the exercises: each `check_...(answer)` says at once whether an answer is right and, if not, why."""
