"""Play scenarios of the explorer by hand: ``python -m tests.explore MODEL FIRST [LAST]``."""

import argparse
import tempfile
from pathlib import Path
from pprint import pprint

import torch

from tests.explore.devices import DEVICES
from tests.explore.scenario import Model, explore, random_scenario
from tests.support import handmade
from tests.support.oracle import Oracle


def main() -> None:
    """Play the seeds; for a single one, show the scenario first."""
    parser = argparse.ArgumentParser(prog="python -m tests.explore", description=__doc__)
    parser.add_argument("model", choices=("count", "tag", "moe"))
    parser.add_argument("first", type=int, help="first seed")
    parser.add_argument("last", type=int, nargs="?", help="last seed")
    parser.add_argument("--device", choices=DEVICES, default="sim")
    parser.add_argument("--depth", type=int, help="steps in flight; the seed decides by default")
    args = parser.parse_args()
    last = args.first if args.last is None else args.last
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = getattr(handmade, f"fx_{args.model}")(Path(name))
        model = Model(args.model, folder, oracle=lambda: Oracle(folder))
        if last == args.first:
            pprint(random_scenario(model.quiz, args.first), compact=True, width=100)
        for seed in range(args.first, last + 1):
            explore(model, [seed], args.device, depth=args.depth)
            print(f"\r{model.name}: seeds {args.first} to {seed} pass", end="", flush=True)
        print()


if __name__ == "__main__":
    main()
