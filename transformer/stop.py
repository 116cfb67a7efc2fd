"""SIGTERM and Ctrl-C as a wish to stop: the first is noted and honoured at the next step, a second
one ends the process at once."""

import os
import signal
import sys
import threading
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """While entered, `requested` says whether a signal has come. Only the main thread may set
    handlers; elsewhere this watches nothing. Leaving restores the handlers there were."""

    def __init__(self):
        self.requested = False
        self._before = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._note) for s in _SIGNALS}
        return self

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.requested = True
        name = signal.Signals(number).name
        print(f"{name}: finishing the step, then saving (again to stop at once)", file=sys.stderr)
