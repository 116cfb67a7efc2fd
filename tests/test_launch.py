"""When a script starts itself once more, and with what."""

import json
import os
import platform
import subprocess
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


@pytest.mark.skipif(not launch._helps(), reason="an accelerator, or no glibc")
def test_a_script_goes_on_with_its_arguments_and_its_exit_code(tmp_path):
    script = tmp_path / "a script.py"
    script.write_text(
        "import json, os, sys\n"
        "from transformer.launch import on_huge_pages\n"
        "print('begun', flush=True)\n"
        "on_huge_pages()\n"
        "print(json.dumps([sys.argv, os.environ['GLIBC_TUNABLES']]))\n"
        "sys.exit(3)\n"
    )
    names = {"GLIBC_TUNABLES", *launch._KEEP}
    plain = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-W", "error", script, "--a=b c", ""]
    done = subprocess.run(command, env=plain, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "")
    *begun, last = done.stdout.splitlines()
    assert begun == ["begun"] * 2
    assert json.loads(last) == [[str(script), "--a=b c", ""], launch._HUGE_PAGES]
