"""The command line: what reaches the spec, and how everything else is refused."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags
from ml_collections import ConfigDict

from transformer import cli, spec
from transformer.spec import Choice, Count, Positive, Spec, SpecError

ROOT = Path(__file__).parents[1]


def plain():
    """An entry without options."""


def rope(theta: Positive = 1e4):
    """An entry with one option."""


POSITIONS = {"none": plain, "rope": rope}


@dataclasses.dataclass(frozen=True)
class Model(Spec):
    depth: Count = 2
    rate: float = 0.5
    tie: bool = True
    title: str = "toy"
    best: str | None = "loss"
    clip: float | None = None
    sizes: tuple[int, ...] = (1, 2)
    position: Choice = spec.choice(POSITIONS, "none")


@dataclasses.dataclass(frozen=True)
class Run(Spec):
    model: Model = dataclasses.field(default_factory=Model)
    steps: Count = 10


def toy() -> ConfigDict:
    return ConfigDict(spec.defaults(Run), type_safe=False).lock()


HEAD = "from tests_toy import toy\n\ndef get_config():\n    c = toy()\n"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Config files of these tests import this module under a short name."""
    monkeypatch.setitem(sys.modules, "tests_toy", sys.modules[__name__])


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes `c.py` in the current directory from the lines that follow `c = toy()`."""
    monkeypatch.chdir(tmp_path)

    def write(*lines: str, text: str | None = None) -> str:
        body = HEAD + "".join(f"    {line}\n" for line in (*lines, "return c"))
        Path("c.py").write_text(body if text is None else text)
        return "c.py"

    return write


def read(*argv: str, base=None) -> tuple[cli.Config, list[str]]:
    values = flags.FlagValues()
    values.set_gnu_getopt(True)
    config = cli.define_config(Run, base, flag_values=values)
    return config, config.read(values(["program", *argv], known_only=True))


def refused(*argv: str, **more) -> str:
    with pytest.raises(SpecError) as e:
        read(*argv, **more)
    return str(e.value)


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("--config.model.depth=12", "depth", 12),
        ("--config.model.depth=1e1", "depth", 10),
        ("-config.model.depth=12", "depth", 12),
        ("--config.model.rate=3", "rate", 3.0),
        ("--config.model.rate=1e-3", "rate", 0.001),
        ("--config.model.tie=false", "tie", False),
        ("--config.model.tie=no", "tie", False),
        ("--noconfig.model.tie", "tie", False),
        ("--config.model.tie", "tie", True),
        ("--config.model.title=no", "title", "no"),
        ("--config.model.title=12", "title", "12"),
        ("--config.model.title=a=b.c", "title", "a=b.c"),
        ("--config.model.title=", "title", ""),
        ("--config.model.best=None", "best", None),
        ("--config.model.best=none", "best", None),
        ("--config.model.clip=1", "clip", 1.0),
        ("--config.model.clip=None", "clip", None),
        ("--config.model.sizes=(3,4,5)", "sizes", (3, 4, 5)),
        ("--config.model.sizes=3,4", "sizes", (3, 4)),
        ("--config.model.sizes=[7]", "sizes", (7,)),
    ],
)
def test_an_override_reaches_the_spec(write, override, path, value):
    config, rest = read(f"--config={write('c.model.clip = 2')}", override)
    got = getattr(config.spec.model, path)
    assert got == value
    assert type(got) is type(value)
    assert rest == ["program"]


def test_a_choice_is_overridden_as_one_string(write):
    config, _ = read(f"--config={write()}", "--config.model.position=rope(theta=5e5)")
    assert str(config.spec.model.position) == "rope(theta=500000.0)"
    assert config.value.model.position == "rope(theta=5e5)"


def test_the_value_may_follow_and_the_order_does_not_matter(write):
    file = write("c.steps = 3")
    config, rest = read("--config.model.depth", "7", "more", "--config", file)
    assert (config.spec.model.depth, config.spec.steps) == (7, 3)
    assert rest == ["program", "more"]


def test_the_config_is_locked_and_complete(write):
    config, _ = read(f"--config={write('c.model = {}', 'c.model.depth = 4')}")
    assert config.value.is_locked
    assert config.value.model.rate == 0.5
    assert config.spec == Run(model=Model(depth=4))


def test_a_reference_follows_the_override(write):
    file = write("c.model.depth = c.get_ref('steps')")
    config, _ = read(f"--config={file}", "--config.steps=5")
    assert config.spec.model.depth == 5


def test_overrides_on_top_of_a_stored_config():
    stored = {"model": {"depth": 4, "sizes": [5, 6]}}
    config, rest = read("--config.model.depth=5", "--other=1", base=lambda: stored)
    assert (config.spec.model.depth, config.spec.model.sizes) == (5, (5, 6))
    assert rest == ["program", "--other=1"]


def test_an_argument_of_the_config(write):
    head = HEAD.replace("get_config()", "get_config(size)")
    write(text=head + "    c.model.title = size\n    return c\n")
    config, _ = read("--config=c.py:small:er")
    assert config.spec.model.title == "small:er"


KNOWN = "(known: best, clip, depth, position, rate, sizes, tie, title)"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["--config.model.depht=3"],
            f"config.model.depht: unknown option 'depht'; did you mean 'depth'? {KNOWN}",
        ),
        (
            ["--config.model.Depth=3"],
            f"config.model.Depth: unknown option 'Depth'; did you mean 'depth'? {KNOWN}",
        ),
        (
            ["--config.modl.depth=3"],
            "config.modl: unknown option 'modl'; did you mean 'model'? (known: model, steps)",
        ),
        (["--noconfig.x"], "config.x: unknown option 'x' (known: model, steps)"),
        (
            ["--config.depth=3"],
            "config.depth: unknown option 'depth' (known: model, steps)",
        ),
        (["--config.model=3"], "config.model: expected a section with options, got '3'"),
        (
            ["--config.model={'depth': 3}"],
            "config.model: expected a section with options, got \"{'depth': 3}\"",
        ),
        (
            ["--config.model.position.theta=3"],
            "config.model.position: expected a name such as 'none', got {'theta': '3'}",
        ),
        (
            ["--config.steps.keys=3"],
            "config.steps: expected a whole number, got {'keys': '3'}",
        ),
        (["--config.keys=3"], "config.keys: unknown option 'keys' (known: model, steps)"),
        (
            ["--config.=3"],
            "config.: unknown option '' (known: model, steps)",
        ),
        (["--config.steps="], "config.steps: expected a whole number, got ''"),
        (["--config.steps=1e-4"], "config.steps: expected a whole number, got 0.0001"),
        (["--config.steps=0"], "config.steps: must be at least 1, got 0"),
        (
            ["--config.steps=3", "--config.steps=4"],
            "config.steps: given twice, as '3' and as '4'",
        ),
        (
            ["--config.model.position=ropee(theta=3)"],
            "config.model.position: unknown name 'ropee'; did you mean 'rope'? (known: none, rope)",
        ),
    ],
)
def test_a_wrong_override_is_refused(write, overrides, message):
    assert refused(f"--config={write()}", *overrides) == message


def test_all_problems_are_listed_at_once(write):
    file = write("c.steps = 'many'", "c.model.tie = 'perhaps'")
    message = refused(f"--config={file}", "--config.model.depht=3", "--config.model.rate=fast")
    assert message.splitlines() == [
        f"config.model.depht: unknown option 'depht'; did you mean 'depth'? {KNOWN}",
        "config.model.rate: expected a number, got 'fast'",
        "config.model.tie: expected true or false, got 'perhaps'",
        "config.steps: expected a whole number, got 'many'",
    ]


def test_a_section_that_the_file_replaced_by_a_value(write):
    message = refused(f"--config={write('c.model = 3')}", "--config.model.depth=3")
    assert message == "config.model: expected a section with options, got 3"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["c.model.depht = 3"], f"c.py:5: unknown option 'depht'; did you mean 'depth'? {KNOWN}"),
        (["", "c['stesp'] = 3"], "c.py:6: unknown option 'stesp'; did you mean 'steps'? "),
        (["c.modl.depth = 3"], "c.py:5: unknown option 'modl'; did you mean 'model'? "),
        (["c.update(step=3)"], "c.py:5: unknown option 'step'; did you mean 'steps'? "),
        (["raise ValueError('seven')"], "c.py:5: ValueError: seven"),
        (["import nowhere_at_all"], "c.py:5: ModuleNotFoundError: No module named 'nowhere_at"),
        (["c = None"], "c.py: get_config() must return a config, got None"),
        (["c = = 3"], "c.py:5: not Python, invalid syntax"),
        (["{}['steps']"], "c.py:5: KeyError: 'steps'"),
    ],
)
def test_a_broken_file_is_refused_with_its_line(write, lines, message):
    got = refused(f"--config={write(*lines)}")
    assert got.startswith(message)
    assert "\n" not in got


@pytest.mark.parametrize(
    ("argument", "text", "message"),
    [
        ("d.py", "", "--config=d.py: there is no file 'd.py'"),
        ("", "", "--config=: there is no file ''"),
        (".", "", "--config=.: there is no file '.'"),
        ("c.py", "config = 3", "c.py: has no function get_config()"),
        ("c.py:big", "def get_config(): pass", "c.py: get_config() takes no argument, got 'big'"),
        ("c.py", "def get_config(x): pass", "c.py: get_config() wants one, c.py:ARGUMENT"),
        ("c.py", "raise SystemError", "c.py:1: SystemError: "),
        ("c.py", "\0", "c.py"),
    ],
)
def test_a_file_that_is_none_is_refused(write, argument, text, message):
    write(text=text)
    assert refused(f"--config={argument}").startswith(message)


PROGRAM = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]
import test_cli
sys.modules["tests_toy"] = test_cli
from absl import flags
from transformer import cli
from transformer.spec import SpecError
config = cli.define_config(test_cli.Run)
workdir = flags.DEFINE_string("workdir", None, "where", required=True)
def main(code="0"):
    if code == "spec":
        raise SpecError("refused by the program")
    if code == "fault":
        raise ValueError("a fault of the program")
    print(config.spec.steps, workdir.value)
    return int(code)
if __name__ == "__main__":
    cli.main(main, config)
"""


@pytest.mark.parametrize(
    ("argv", "code", "out", "err"),
    [
        (["--config=c.py", "--workdir=w", "--config.steps=7"], 0, "7 w\n", ""),
        (["--config=c.py", "--workdir=w", "3"], 3, "10 w\n", ""),
        (["--config=c.py"], 2, "", "flag --workdir=None: Flag --workdir must have a value other"),
        (["--workdir=w"], 2, "", "flag --config=None: Flag --config must have a value other"),
        (["--config=c.py", "--workdir=w", "--workdri=v"], 2, "", "Unknown command line flag 'work"),
        (["--config=c.py", "--workdir=w", "3", "4"], 2, "", "3 4: unexpected, flags are --name=va"),
        (["--config=c.py", "--workdir=w", "--config.stesp=3"], 2, "", "config.stesp: unknown opti"),
        (["--config=c.py", "--workdir=w", "spec"], 2, "", "refused by the program\n"),
        (["--config=c.py", "--workdir=w", "fault"], 1, "", "Traceback"),
    ],
)
def test_exit_codes(write, argv, code, out, err):
    write()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *argv],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONWARNINGS": "error"},
    )
    assert (done.returncode, done.stdout) == (code, out), done.stderr
    assert done.stderr.startswith(err)
    assert ("Traceback" in done.stderr) == (code == 1)
    assert bool(done.stderr) == (code in (1, 2))
