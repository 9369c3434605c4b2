"""Pairs of emulated runs in one process, which measure gaps of the final loss of 0.05%; --emulate --help."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

from benchmarks.emulation import campaign


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, add_help="--emulate" not in sys.argv)
    parser.add_argument("--emulate", action="store_true", required=True)
    return campaign.main(parser.parse_known_args()[1])


if __name__ == "__main__":
    sys.exit(main())
