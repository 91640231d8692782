"""The house: the core imports nothing of the lab, files import in one direction, rooms keep their budgets."""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CORE = ("train.py", "conf", "data", "model", "ropewalk")
# Statements without docstrings, with a little slack above what they have. What outgrows them leaves something out, or
# moves it to the lab.
BUDGETS = {
    ("train.py",): 210,
    ("model/gpt.py",): 200,
    ("model/attention.py",): 170,
    (*CORE, "hydra_plugins", "scripts", "docs"): 8_584,
    ("lab",): 3_375,
    ("tests",): 8_339,
}


def files_of(root: Path, *rooms: str) -> list[Path]:
    found = []
    for room in rooms:
        path = root / room
        found += [path] if path.is_file() else sorted(path.rglob("*.py"))
    return found


def statements(path: Path) -> int:
    count = 0
    for node in ast.walk(ast.parse(path.read_text())):
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        count += isinstance(node, ast.stmt) and not is_docstring
    return count


def imported(node: ast.AST) -> list[str]:
    """What a part of a file imports: modules, and names that may be modules."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def named(node: ast.AST) -> list[str]:
    """What may be a module in a string, as in import_module("lab.kernels") and schema="conf.schema:Config"."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
        return [node.value.partition(":")[0]]
    return []


def at_run_time(tree: ast.AST) -> Iterator[ast.AST]:
    """All parts of a file, those within functions too, but for what only type checkers read."""
    yield tree
    for part in ast.iter_child_nodes(tree):
        if not (isinstance(part, ast.If) and "TYPE_CHECKING" in ast.dump(part.test)):
            yield from at_run_time(part)


def graph(root: Path, parts=ast.walk) -> dict[str, set[str]]:
    """{module: the modules that these parts of it import}."""
    modules = {}
    for path in files_of(root, *CORE, "hydra_plugins", "lab", "scripts"):
        name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        modules[name] = path
    imports = {}
    for name, path in modules.items():
        imports[name] = set()
        for node in parts(ast.parse(path.read_text())):
            for target in imported(node):
                imports[name].add(target if target in modules else target.rpartition(".")[0])
            imports[name].update(named(node))
        imports[name] &= modules.keys() - {name}
    return imports


def circle(root: Path) -> list[str]:
    """Modules that import each other in a circle; none: []."""
    try:
        TopologicalSorter(graph(root, at_run_time)).prepare()
    except CycleError as error:
        return error.args[1]
    return []


# Each room imports only what lies on its own floor or below.
FLOORS = (
    "conf", "model", "data", "ropewalk.run", "ropewalk.training", "ropewalk.evaluation", "ropewalk.report",
    "ropewalk.hf", "ropewalk.app", "train", "ropewalk", "hydra_plugins", "lab", "scripts",
)  # fmt: skip


def floor(module: str) -> int:
    """The number of a module's floor. `ropewalk` itself, the interface for Python, lies above train.py."""
    rooms = [room for room in FLOORS if f"{module}.".startswith(f"{room}.")]
    return FLOORS.index(max(rooms, key=len))


def arrows_up(root: Path) -> list[str]:
    """Where a file imports from a room above its own."""
    return [
        f"{name} -> {target}"
        for name, targets in graph(root).items()
        for target in sorted(targets)
        if floor(target) > floor(name)
    ]


def over_budget(root: Path) -> dict[str, int]:
    """The statements of those rooms that have more than their budget."""
    counts = {rooms: sum(map(statements, files_of(root, *rooms))) for rooms in BUDGETS}
    return {rooms: count for rooms, count in counts.items() if count > BUDGETS[rooms]}


def missing_from_map(root: Path) -> list[str]:
    """Rooms and files that CONTRIBUTING's map names and the tree lacks, and rooms that the map does not name."""
    text = (root / "CONTRIBUTING.md").read_text().split("## Map")[1]
    text = re.sub(r"\n {6,}", " ", text.split("```")[1])  # lines that go on
    wrong = []
    named = set()
    outer = root
    for indent, room, files in re.findall(r"^( *)([\w.]+)/? +(.*)$", text, re.MULTILINE):
        place = outer / room if indent else root / room
        outer = outer if indent else place
        named.add(place)
        if not place.exists():
            wrong.append(str(place.relative_to(root)))
        wrong += [f"{room}/{file}" for file in re.findall(r"\b\w+\.py\b", files) if not any(place.rglob(file))]
    rooms = {path.parent for path in files_of(root, *CORE, "lab", "scripts") if path.parent != root}
    rooms = {path for path in rooms if len(path.relative_to(root).parts) < 3}
    unnamed = [path for path in rooms if path not in named and f"{path.name}/" not in text]
    return wrong + [str(path.relative_to(root)) for path in sorted(unnamed)]


def test_the_map_of_contributing_is_the_tree():
    assert missing_from_map(ROOT) == []


def test_files_import_each_other_in_one_direction():
    """Within functions, for types and by strings, too. Of the lab the core names the kernels, once."""
    assert circle(ROOT) == []
    assert arrows_up(ROOT) == ["conf.plugins -> lab.kernels"]


def test_the_wholes_keep_their_budgets():
    assert over_budget(ROOT) == {}


@pytest.fixture
def house(tmp_path):
    """A small one without a breach."""
    for room in ("conf", "data", "model", "ropewalk", "lab", "scripts"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "a.py").write_text("x = 1\n")
    (tmp_path / "train.py").write_text("import model.a\n")
    assert arrows_up(tmp_path) + circle(tmp_path) == []
    return tmp_path


@pytest.mark.parametrize("line", ["from lab import a", "import lab.a", "def f():\n    from lab.a import x"])
def test_a_planted_import_of_the_lab_is_found(house, line):
    (house / "model" / "a.py").write_text(line)
    assert arrows_up(house) == ["model.a -> lab.a"]


@pytest.mark.parametrize("line", ["def f():\n    import data.a", "import_module('data.a')", "x = 'data.a:f'"])
def test_a_planted_circle_is_found(house, line):
    (house / "data" / "a.py").write_text("from model import a")
    (house / "model" / "a.py").write_text(line)
    assert set(circle(house)) == {"data.a", "model.a"}
    assert arrows_up(house) == ["model.a -> data.a"]


def test_a_planted_statement_too_many_is_found(house):
    (house / "train.py").write_text("x = 1\n" * 211)
    assert over_budget(house) == {("train.py",): 211}


def test_differences_of_map_and_tree_are_found(tmp_path):
    for room in ("model", "lab"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "a.py").touch()
    (tmp_path / "CONTRIBUTING.md").write_text("## Map\n\n```\nmodel/    a.py one; b.py two\ndata/     c.py\n```\n")
    assert missing_from_map(tmp_path) == ["model/b.py", "data", "data/c.py", "lab"]
