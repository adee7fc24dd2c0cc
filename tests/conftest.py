"""What holds for all tests: one thread, no network, and the fixtures of ``tests.support``."""

import os
import sys
from pathlib import Path

from hypothesis import settings

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported: the same as set_num_threads(1)
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

ROOT = str(Path(__file__).resolve().parents[1])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)  # makes tests.support importable

settings.register_profile("no-clock", deadline=None)  # machines are shared, and may be slow
settings.load_profile("no-clock")

pytest_plugins = (
    "tests.support.interpreter",
    "tests.support.fixtures",
    "tests.support.figures",
)
