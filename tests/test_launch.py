"""When a script starts itself once more, and with what."""

import os
import platform
import sys
from pathlib import Path

import pytest

from transformer import launch


@pytest.fixture
def started(monkeypatch):
    """The calls of `os.execve`, on a machine with glibc and no accelerator."""
    calls = []
    for name in ("GLIBC_TUNABLES", *launch._KEEP):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "execve", lambda *call: calls.append(call))
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(()))
    monkeypatch.setattr(sys, "orig_argv", ["python", "-u", "train.py", "--workdir=a b"])
    return calls


def test_the_same_command_is_started_with_the_settings(started, monkeypatch):
    monkeypatch.setenv("KEPT", "1")
    launch.on_huge_pages()
    ((program, command, settings),) = started
    assert program == sys.executable
    assert command == [sys.executable, "-u", "train.py", "--workdir=a b"]
    assert settings["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1" and settings["KEPT"] == "1"


def test_not_twice(started, monkeypatch):
    launch.on_huge_pages()
    for name, value in started[0][2].items():
        monkeypatch.setenv(name, value)
    launch.on_huge_pages()
    assert len(started) == 1


def test_not_against_the_user_nor_on_other_machines(started, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
        launch.on_huge_pages()
    with monkeypatch.context() as patch:
        patch.setattr(platform, "libc_ver", lambda: ("", ""))
        launch.on_huge_pages()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "glob", lambda self, pattern: iter([self / pattern]))
        launch.on_huge_pages()
    assert started == []
