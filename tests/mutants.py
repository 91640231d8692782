"""How much the tests notice: change the code in one place at a time, and run the tests that run this place.

make mutants ARGS="--seeds 1 2 --number 30 data ropewalk/evaluation"

A folder of the source is held by the folder of tests that mirrors it. Places are drawn with the seed; all happens in a
copy. Printed are the changes that no test noticed, and how many of each folder were noticed. A change that leaves every
result as it is, such as another size of a batch, cannot be noticed: whoever reads the list decides.
"""

import argparse
import ast
import copy
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

SWAPS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
}  # fmt: skip
# Messages and types: their wording is held by no test.
SKIPPED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.arg, ast.AnnAssign)
HEAVY = ("torch", "lightning.fabric", "transformers", "datasets", "pandas", "scipy.stats", "hypothesis", "hydra")
LIMIT = 120  # seconds after which tests count as failed
COLLECTED = "collected.json"


def places(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes beneath `node` that can be changed."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, SKIPPED):
            continue
        if changed(child) is not None:
            yield child
        yield from places(child)


def changed(node: ast.AST) -> ast.AST | None:
    """Return the node with one thing changed; None if it has nothing to change."""
    new = copy.copy(node)
    match node:
        case ast.Constant(value=bool()):
            new.value = not node.value
        case ast.Constant(value=int() | float()):
            new.value = node.value + 1
        case ast.Compare(ops=[op]) if type(op) in SWAPS:
            new.ops = [SWAPS[type(op)]()]
        case ast.BinOp(op=op) | ast.BoolOp(op=op) | ast.AugAssign(op=op) if type(op) in SWAPS:
            new.op = SWAPS[type(op)]()
        case ast.UnaryOp(op=ast.Not()):
            return node.operand
        case ast.If() | ast.IfExp():
            new.test = ast.UnaryOp(ast.Not(), node.test)
        case ast.Expr(value=ast.Call(func=func)) if ast.unparse(func) != "print":
            return ast.Pass()
        case ast.Return(value=ast.Call()):
            new.value = ast.Constant(None)
        case _:
            return None
    return new


class Replace(ast.NodeTransformer):
    """Puts one node in the place of another."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old = old
        self.new = new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


class Map:
    """A pytest plugin that writes which tests run each line of each file, and how long each takes."""

    def __init__(self, source: list[str]) -> None:
        import coverage  # after the fork: it traces

        self.recorder = coverage.Coverage(data_file=None, include=[f"{path}/*" for path in source], config_file=False)
        self.seconds: dict[str, float] = {}
        self.recorder.start()

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.recorder.switch_context(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        self.recorder.stop()
        data = self.recorder.get_data()
        lines = {}
        for path in data.measured_files():
            contexts = data.contexts_by_lineno(path).items()
            lines[os.path.relpath(path)] = {line: sorted(set(tests) - {""}) for line, tests in contexts}
        Path(COLLECTED).write_text(json.dumps({"seconds": self.seconds, "lines": lines}))


def passes(arguments: list[str], source: list[str] = (), limit: int = LIMIT) -> bool:
    """Run tests in a fork, which begins with the heavy libraries imported; of `source` it writes a map."""
    child = os.fork()
    if not child:
        signal.alarm(limit)  # ends the process, also within a library
        output = os.open(os.devnull if not source else "map.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        plugins = [Map(source)] if source else []
        os._exit(pytest.main(["-p", "no:cacheprovider", "-p", "no:xdist", *arguments], plugins=plugins))
    _, status = os.waitpid(child, 0)
    return status == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--number", type=int, default=30, help="of each seed")
    parser.add_argument("folders", nargs="*", default=["data", "ropewalk/evaluation"])
    args = parser.parse_args()
    files = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.splitlines()
    with tempfile.TemporaryDirectory() as folder:
        for name in files:
            target = Path(folder, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(name, target)
        os.chdir(folder)
        sys.path[:0] = [folder, f"{folder}/tests"]
        sys.dont_write_bytecode = True  # two changes within a second would be taken for each other
        os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        for module in HEAVY:
            importlib.import_module(module)
        tests = [f"tests/{path}" for path in args.folders]
        if not passes(tests, args.folders, limit=3600):
            sys.exit(f"the tests fail as they are: {Path('map.log').read_text()}")
        sources = [name for name in files if name.endswith(".py") and name.startswith(tuple(args.folders))]
        trees = {name: ast.parse(Path(name).read_text()) for name in sources}
        collected = json.loads(Path(COLLECTED).read_text())
        for seed in args.seeds:
            everywhere = [(name, node) for name, tree in trees.items() for node in places(tree)]
            drawn = random.Random(seed).sample(everywhere, min(args.number, len(everywhere)))
            for path, results in tried(drawn, trees, args.folders, **collected).items():
                print(f"{path}: {sum(results)} of {len(results)} changes noticed with seed {seed}", flush=True)


def tried(
    drawn: list[tuple[str, ast.AST]], trees: dict[str, ast.Module], folders: list[str], seconds: dict, lines: dict
) -> dict[str, list[bool]]:
    """Change one place at a time; return for each folder which changes were noticed, and print the others."""
    noticed = defaultdict(list)
    for name, node in drawn:
        of_lines = lines.get(name, {})
        of_file = {test for tests in of_lines.values() for test in tests}
        line = str(getattr(node, "lineno", 0))
        # What runs when it is imported has no test of its own; fixtures of a module count for its first test alone.
        first = sorted(of_lines.get(line, ()), key=seconds.get)[:20]
        others = sorted(of_file - {*first}, key=seconds.get)
        original = Path(name).read_text()
        new = changed(node)
        tree = Replace(node, new).visit(copy.deepcopy(trees[name], {id(node): node}))
        Path(name).write_text(ast.unparse(ast.fix_missing_locations(tree)))
        is_noticed = any(tests and not passes(["-x", *tests]) for tests in (first, others))
        Path(name).write_text(original)
        noticed[next(path for path in folders if name.startswith(path))].append(is_noticed)
        if not is_noticed:
            print(f"{name}:{line}: {ast.unparse(node)[:100]!r} -> {ast.unparse(new)[:100]!r}", flush=True)
    return noticed


if __name__ == "__main__":
    main()
