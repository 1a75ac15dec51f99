"""The command line of the benchmark.

    python -m msa_triton.benchmark cpu       MSA against dense attention on the CPU
    python -m msa_triton.benchmark million   one training step of a million tokens on the CPU
    python -m msa_triton.benchmark gpu       MSA against dense attention on a GPU; --tune compares tile sizes

`--help` after a command lists its options. Triton is needed by `gpu` alone.
"""

from __future__ import annotations

import argparse
import sys

from msa_triton.benchmark import cpu, gpu, million

COMMANDS = {"cpu": cpu, "million": million, "gpu": gpu}


def main(arguments=None) -> int:
    """Runs a command; returns the exit status: 0, 1 for a failed check, 2 for bad options or no GPU."""
    parser = argparse.ArgumentParser(prog="python -m msa_triton.benchmark", description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        summary = module.__doc__.split("\n\n")[0]
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_options(command)
        command.set_defaults(run=module.run, parser=command)
    options = parser.parse_args(arguments)
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
