"""Modules that take long to load, loaded when they are needed."""

import signal
import threading
from importlib import import_module
from types import ModuleType


def load(name: str) -> ModuleType:
    """Import a module; an interrupt from the keyboard ends the process at once, and in silence.

    The exception that Python raises otherwise passes through whatever is half loaded: it comes out
    as a traceback of imports, as an error of another kind, or as an abort of a C library.
    """
    if threading.current_thread() is not threading.main_thread():  # signals are the main one's
        return import_module(name)
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return import_module(name)
    finally:
        signal.signal(signal.SIGINT, before)
