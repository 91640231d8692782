"""How much the tests notice: change the code in one place at a time, and run the tests that mirror it.

make mutants ARGS="--seeds 1 2 --number 30 data ropewalk/evaluation"

A file or folder of the source is held by the tests of the same name: tests/data, tests/ropewalk/evaluation. Places are
drawn with the seed; all happens in a copy. Printed are the changes that no test noticed, and how many of each folder
were noticed. A change that leaves every result as it is, such as another size of a batch, cannot be noticed: whoever
reads the list decides.
"""

import argparse
import ast
import copy
import importlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
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
LIMIT = 600  # seconds after which tests count as failed


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


def passes(tests: str) -> bool:
    """Run tests in a fork, which begins with the heavy libraries imported."""
    child = os.fork()
    if not child:
        signal.alarm(LIMIT)  # ends the process, also within a library
        output = os.open("output.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os._exit(pytest.main(["-x", "-p", "no:cacheprovider", "-p", "no:xdist", tests]))
    return os.waitpid(child, 0)[1] == 0


def is_noticed(file: Path, tree: ast.Module, node: ast.AST, tests: str) -> bool:
    """Whether the tests fail once `node`, of the `tree` of a file, is changed."""
    original = file.read_text()
    mutant = Replace(node, changed(node)).visit(copy.deepcopy(tree, {id(node): node}))
    file.write_text(ast.unparse(ast.fix_missing_locations(mutant)))
    try:
        return not passes(tests)
    finally:
        file.write_text(original)


def copy_project(folder: str) -> None:
    """Copy what git knows to `folder`, and go on there."""
    files = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.splitlines()
    for name in files:
        target = Path(folder, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(name, target)
    os.chdir(folder)
    sys.path[:0] = [folder, f"{folder}/tests"]
    sys.dont_write_bytecode = True  # two changes within a second would be taken for each other
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--number", type=int, default=30, help="of each seed and folder")
    parser.add_argument("folders", nargs="*", default=["data", "ropewalk/evaluation"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as project:
        copy_project(project)
        for module in HEAVY:
            importlib.import_module(module)
        for folder in args.folders:
            tests = f"tests/{folder}"
            if not passes(tests):
                sys.exit(f"the tests fail as they are: {Path('output.log').read_text()}")
            trees = {file: ast.parse(file.read_text()) for file in sorted(Path(folder).rglob("*.py"))}
            everywhere = [(file, node) for file, tree in trees.items() for node in places(tree)]
            for seed in args.seeds:
                drawn = random.Random(seed).sample(everywhere, min(args.number, len(everywhere)))
                missed = [(file, node) for file, node in drawn if not is_noticed(file, trees[file], node, tests)]
                for file, node in missed:
                    change = f"{ast.unparse(node)[:100]!r} -> {ast.unparse(changed(node))[:100]!r}"
                    print(f"{file}:{getattr(node, 'lineno', 0)}: {change}")
                noticed = len(drawn) - len(missed)
                print(f"{folder}: {noticed} of {len(drawn)} changes noticed with seed {seed}", flush=True)


if __name__ == "__main__":
    main()
