"""`python -m tests.chaos --rounds 1000 --seed 7`: a long run by hand; status 1 if a rule broke."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import time

from tests.chaos.run import run


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=int(time()))
    parser.add_argument("--every", type=int, default=3, help="one fault in so many rounds")
    parser.add_argument("--logs", type=Path, help="a folder to keep the gateways' logs in")
    chosen = parser.parse_args()
    with TemporaryDirectory() as folder:
        where = chosen.logs or Path(folder)
        where.mkdir(parents=True, exist_ok=True)
        report = asyncio.run(run(chosen.seed, chosen.rounds, where, chosen.every))
    print(report)
    sys.exit(0 if report.is_good else 1)


if __name__ == "__main__":
    main()
