"""The house: which file may import which, where imports stand, and that a table's names are
compared nowhere but in the file of the table.

Read with `ast`, nothing is imported. The helpers take source text, so that each law is also shown
to fail on a house that breaks it.
"""

import ast
import graphlib
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# From the ground up: a file imports only from floors below its own.
FLOORS = (
    {"spec"},
    {"layers"},
    {"noise"},
    {"model"},
    {"data", "log", "mesh", "objective", "optim", "stop"},
    {"state"},
    {"step"},
    {"checkpoint", "evaluate", "generate"},
    {"beam"},
    {"meter", "result", "run"},
    {"quality", "transfer"},
    {"experiment"},
    {"choices", "cli", "compare", "inspection", "launch", "workdir"},
    {"cost", "interop", "report", "studies", "sweep"},
)
# These stand beside the model: they know how options are declared, and nothing else.
BESIDE = {"cli", "data", "launch", "log", "mesh", "optim", "stop"}

# Heavy or optional, so imported where they are used.
LATE = {"grain", "sacrebleu", "tensorboardX", "tensorflow_datasets", "tokenizers"}

TOP = {
    *(".ci", ".gitattributes", ".gitignore", "CHANGELOG.md", "LICENSE", "README.md"),
    *("configs", "constraints.txt", "docs", "eval.py", "pyproject.toml", "scripts", "tests"),
    *("train.py", "transformer"),
}

# Compared with, but there another thing than the name of a table.
OTHER_MEANING = {("transformer.layers.residual", "encoder")}  # the side of an encoder-decoder

Trees = Mapping[str, ast.Module]


def parsed(sources: Mapping[str, str]) -> Trees:
    return {name: ast.parse(text) for name, text in sources.items()}


def package() -> Trees:
    """Every module of the package by its dotted name, `transformer` itself left out."""
    found = {}
    for file in sorted(ROOT.glob("transformer/**/*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        name = ".".join(p for p in parts if p != "__init__")
        if name != "transformer":
            found[name] = file.read_text()
    return parsed(found)


def imports(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """The dotted names a module imports: for `from a import b` both `a` and `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or ""), node
            yield from ((f"{node.module}.{alias.name}", node) for alias in node.names)


def edges(trees: Trees) -> dict[str, set[str]]:
    """Which modules of the house each module imports."""
    return {
        name: {target for target, _ in imports(tree) if target in trees and target != name}
        for name, tree in trees.items()
    }


def unit(module: str) -> str:
    """A file of the package or one of its folders: what has a floor."""
    return module.split(".")[1]


def out_of_order(trees: Trees) -> list[str]:
    height = {u: floor for floor, units in enumerate(FLOORS) for u in units}
    found = [f"{name}: has no floor" for name in trees if unit(name) not in height]
    for name, targets in edges(trees).items():
        for target in sorted(targets):
            a, b = unit(name), unit(target)
            if a == b or a not in height or b not in height:
                continue
            if height[a] <= height[b] or (a in BESIDE and b != "spec"):
                found.append(f"{name} imports {target}")
    return found


def strangers(trees: Trees) -> list[str]:
    """Relative imports, the package as a whole, and files that stand on top of the package."""
    outside = {"configs", "scripts", "tests", "train", "eval"}
    return [
        f"{name} imports {target}"
        for name, tree in trees.items()
        for target, node in imports(tree)
        if target.startswith(".")
        or target.split(".")[0] in outside
        or (isinstance(node, ast.Import) and target == "transformer")
    ]


def late(trees: Trees) -> list[str]:
    """Imports inside a function, the heavy optional ones excepted."""
    return [
        f"{name}:{node.lineno} imports {target}"
        for name, tree in trees.items()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for target, node in imports(function)
        if target.split(".")[0] not in LATE and isinstance(node, ast.stmt)
    ]


def tables(trees: Trees) -> dict[str, dict[str, set[str]]]:
    """The tables of each module: its upper-case dicts from names to classes or functions."""
    found: dict[str, dict[str, set[str]]] = {}
    for name, tree in trees.items():
        for node in tree.body:
            if not isinstance(node, ast.Assign | ast.AnnAssign):
                continue
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name) and (keys := _keys(target.id, node.value)):
                    found.setdefault(name, {})[target.id] = keys
    return found


def _keys(name: str, value: ast.expr | None) -> set[str]:
    if not name.isupper() or name.startswith("_") or not isinstance(value, ast.Dict):
        return set()
    if any(isinstance(v, ast.Constant | ast.Tuple | ast.JoinedStr) for v in value.values):
        return set()
    return {k.value for k in value.keys if isinstance(k, ast.Constant) and isinstance(k.value, str)}


def dispatches(trees: Trees) -> list[str]:
    """Comparisons with a name of a table that stands in another file."""
    own = {module: set().union(*named.values()) for module, named in tables(trees).items()}
    found = []
    for name, tree in trees.items():
        if unit(name) == "spec":  # its words are the grammar's
            continue
        elsewhere = set().union(*(own[m] for m in own if m != name)) - own.get(name, set())
        for text, line in compared(tree):
            if text in elsewhere and (name, text) not in OTHER_MEANING:
                found.append(f"{name}:{line} compares with {text!r}")
    return found


def compared(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The strings that `==`, `!=`, `in`, `not in` and `case` compare with."""
    for node in ast.walk(tree):
        sides: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            sides = [node.value]
        for side in sides:
            members = side.elts if isinstance(side, ast.Tuple | ast.List | ast.Set) else [side]
            for member in members:
                if isinstance(member, ast.Constant) and isinstance(member.value, str):
                    yield member.value, member.lineno


def test_imports_run_one_way():
    assert out_of_order(package()) == []


def test_imports_name_the_module_they_want():
    assert strangers(package()) == []


def test_there_is_no_cycle():
    graphlib.TopologicalSorter(edges(package())).prepare()


def test_imports_stand_at_the_top():
    assert late(package()) == []


def test_nothing_is_imported_for_the_type_checker_alone():
    for name, tree in package().items():
        assert "TYPE_CHECKING" not in ast.dump(tree), name


def test_the_config_core_needs_nothing_but_python():
    (tree,) = [t for n, t in package().items() if n == "transformer.spec"]
    heads = {target.split(".")[0] for target, _ in imports(tree)}
    assert heads & {"jax", "flax", "numpy", "ml_collections", "absl", "transformer"} == set()


def test_no_name_of_a_table_is_compared_outside_its_file():
    assert dispatches(package()) == []


def test_the_tables_are_found():
    found = {table for named in tables(package()).values() for table in named}
    assert {"POSITIONS", "NORMS", "PLACEMENTS", "MASKS", "FFNS", "OBJECTIVES"} <= found


def test_the_top_of_the_repository():
    git = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(git, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    assert {line.strip('"').split("/")[0] for line in listed.stdout.splitlines()} <= TOP


@pytest.mark.parametrize(
    ("law", "source"),
    [
        (out_of_order, {"transformer.spec": "from transformer.layers import norm"}),
        (out_of_order, {"transformer.spec": "import transformer.layers.norm"}),
        (out_of_order, {"transformer.data.feed": "from transformer import model"}),
        (out_of_order, {"transformer.log": "from transformer.mesh import Mesh"}),
        (out_of_order, {"transformer.state": "def f():\n from transformer.step import train_step"}),
        (out_of_order, {"transformer.attic": ""}),
        (strangers, {"transformer.model": "from . import spec"}),
        (strangers, {"transformer.model": "import transformer"}),
        (strangers, {"transformer.model": "from configs import lm"}),
        (late, {"transformer.model": "def f():\n import json"}),
        (late, {"transformer.model": "class A:\n def f(self):\n  from transformer import spec"}),
        (dispatches, {"transformer.model": "if spec.position == 'rope':\n pass"}),
        (dispatches, {"transformer.model": "x = 'rope' != y"}),
        (dispatches, {"transformer.model": "x = y in ('alibi', 'rope')"}),
        (dispatches, {"transformer.model": "match x:\n case 'a' | 'rope':\n  pass"}),
    ],
)
def test_a_house_that_breaks_a_law_is_noticed(law, source):
    house = {
        "transformer.spec": "",
        "transformer.layers.norm": "",
        "transformer.layers.position": "POSITIONS = {'rope': Rope}\nx == 'rope'",
        "transformer.mesh": "from transformer.spec import Spec",
        "transformer.model": "from transformer.layers import norm\ndef f():\n import grain",
        "transformer.step": "from transformer import model, spec",
    }
    assert law(parsed(house)) == []
    assert law(parsed(house | source))


def test_a_cycle_is_noticed():
    two = {"transformer.layers.a": "import transformer.layers.b"}
    two["transformer.layers.b"] = "from transformer.layers import a"
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(edges(parsed(two))).prepare()
