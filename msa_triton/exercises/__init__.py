"""Checks of the exercises that need Triton or the model; the others are in `msa_ref.exercises`."""
