"""SIGTERM and Ctrl-C as a wish to stop: the first is noted and honoured at the next step, a second
one ends the process at once, even while the main thread is deep in a compilation."""

import os
import signal
import sys
import threading

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """While entered, `requested` says whether a signal has come. Only the main thread may set
    handlers; elsewhere this watches nothing. Leaving restores the handlers there were."""

    def __init__(self):
        self.requested = False
        self._leave = lambda: None

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            self._leave = self._watch()
        return self

    def __exit__(self, *_):
        self._leave()

    def _watch(self):
        """Starts to watch; what is returned ends it.

        Python runs handlers between two bytecodes of the main thread, which a compilation may keep
        away for minutes. The number of a signal is written to the wakeup file at once.
        """
        read, write = os.pipe()
        os.set_blocking(write, False)
        woken = signal.set_wakeup_fd(write)
        handlers = {s: signal.signal(s, lambda *_: None) for s in _SIGNALS}
        listener = threading.Thread(target=self._listen, args=(read,), daemon=True)
        listener.start()

        def leave():
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(woken)
            os.close(write)  # the end of what the listener reads
            listener.join()
            os.close(read)

        return leave

    def _listen(self, read: int) -> None:
        while number := os.read(read, 1):
            if number[0] in _SIGNALS:
                self._note(signal.Signals(number[0]))

    def _note(self, number: signal.Signals) -> None:
        if self.requested:
            os._exit(128 + number)  # what a shell shows for a process that died of the signal
        self.requested = True
        line = f"{number.name}: finishing the step, then saving (again to stop at once)"
        print(line, file=sys.stderr, flush=True)
