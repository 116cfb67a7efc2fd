"""Signals as a wish to stop, in this process and in one of its own."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from transformer.stop import Stop

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def handlers():
    return [signal.getsignal(s) for s in SIGNALS], signal.set_wakeup_fd(signal.set_wakeup_fd(-1))


def waited(condition):
    """Whether it comes true within five seconds."""
    end = time.monotonic() + 5
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_noted(number, capfd):
    before = handlers()
    with Stop() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert waited(lambda: stop.requested)
    assert handlers() == before
    assert capfd.readouterr().err == (
        f"{number.name}: finishing the step, then saving (again to stop at once)\n"
    )


def test_other_signals_and_handlers_are_left_alone(capfd):
    came = []
    old = signal.signal(signal.SIGUSR1, lambda *_: came.append(1))
    try:
        with Stop() as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert waited(lambda: came)
            time.sleep(0.05)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGUSR1, old)
    assert capfd.readouterr().err == ""


def test_handlers_are_restored_after_a_failure():
    before, threads = handlers(), threading.active_count()
    with pytest.raises(ZeroDivisionError), Stop():
        assert handlers() != before
        raise ZeroDivisionError
    assert handlers() == before and threading.active_count() == threads


def test_in_another_thread_nothing_is_watched():
    seen = []

    def body():
        with Stop() as stop:
            seen.append((handlers_only(), stop.requested))

    def handlers_only():
        return [signal.getsignal(s) for s in SIGNALS]

    before = handlers_only()
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [(before, False)]


# The main thread is in one call of C that releases the lock, like a compilation: no handler written
# in Python runs before it returns.
BUSY = """
import hashlib
from transformer.stop import Stop
with Stop():
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""


@pytest.mark.parametrize("second", SIGNALS)
def test_a_second_signal_ends_the_process_at_once(second):
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    too_long = threading.Timer(30, process.kill)
    too_long.start()
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stderr.readline().startswith("SIGTERM: finishing the step")
        process.send_signal(second)
        assert process.wait(timeout=5) == 128 + second
    finally:
        too_long.cancel()
        process.kill()
        process.communicate()
