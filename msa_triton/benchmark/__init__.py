"""How long a step of MSA takes: `python -m msa_triton.benchmark cpu | million | gpu`."""
