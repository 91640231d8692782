"""How much the tests notice: change the code in one place at a time, and run the tests that mirror it.

make mutants ARGS="--seeds 1 2 --number 30 data ropewalk/evaluation"

A folder of the source is held by the tests of the same name: tests/data, tests/ropewalk/evaluation. Places are drawn
with the seed; all happens in a copy. Printed are the changes that no test noticed, and how many of each folder
were noticed. A change that leaves every result as it is, such as another size of a batch, cannot be noticed: whoever
reads the list decides.
"""

import argparse
import ast
import copy
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

SWAPS = {
    ast.Lt: ast.LtE,
    ast.Gt: ast.GtE,
    ast.Eq: ast.NotEq,
    ast.Is: ast.IsNot,
    ast.In: ast.NotIn,
    ast.And: ast.Or,
    ast.Add: ast.Sub,
    ast.Mult: ast.Div,
}
SWAPS |= {new: old for old, new in SWAPS.items()}
SWAPS |= {ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult}
# Messages and types: their wording is held by no test.
SKIPPED = (
    ast.Raise,
    ast.Assert,
    ast.JoinedStr,
    ast.Import,
    ast.ImportFrom,
    ast.arg,
    ast.AnnAssign,
)
PYTEST = (sys.executable, "-m", "pytest", "-x", "-pno:cacheprovider", "-pno:xdist")
SECONDS = 600  # after which tests count as failed
MEMORY = 2**33  # bytes: a change may ask for any number of them


def change(node: ast.AST) -> bool:
    """Change one thing of the node; False if it has nothing to change."""
    match node:
        case ast.Constant(value=bool()):
            node.value = not node.value
        case ast.Constant(value=int() | float()):
            node.value += 1
        case ast.Compare(ops=[op]) if type(op) in SWAPS:
            node.ops = [SWAPS[type(op)]()]
        case ast.BinOp(op=op) | ast.BoolOp(op=op) | ast.AugAssign(op=op) if type(op) in SWAPS:
            node.op = SWAPS[type(op)]()
        case ast.UnaryOp(op=ast.Not()):
            node.operand = ast.UnaryOp(ast.Not(), node.operand)
        case ast.If() | ast.IfExp():
            node.test = ast.UnaryOp(ast.Not(), node.test)
        case ast.Expr(value=ast.Call(func=func)) if ast.unparse(func) != "print":
            node.value = ast.Constant(None)
        case ast.Return(value=ast.Call()):
            node.value = ast.Constant(None)
        case _:
            return False
    return True


def places(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes beneath `node` that can be changed."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, SKIPPED):
            continue
        if change(copy.copy(child)):
            yield child
        yield from places(child)


def passes(tests: str) -> bool:
    """Run tests in a process of their own."""
    limit = partial(resource.setrlimit, resource.RLIMIT_DATA, (MEMORY, MEMORY))
    with open("output.log", "w") as output:
        try:
            ended = subprocess.run([*PYTEST, tests], stdout=output, stderr=output, preexec_fn=limit, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return False
    return ended.returncode == 0


def report(folder: str, seed: int, number: int) -> None:
    """Change the files of a folder in places drawn with the seed; print what no test noticed."""
    everywhere = []
    for file in sorted(Path(folder).rglob("*.py")):
        original = file.read_text()
        count = len([*places(ast.parse(original))])
        everywhere += [(file, original, place) for place in range(count)]
    drawn = random.Random(seed).sample(everywhere, min(number, len(everywhere)))
    missed = 0
    for file, original, place in drawn:
        tree = ast.parse(original)
        node = [*places(tree)][place]
        before = ast.unparse(node)
        change(node)
        file.write_text(ast.unparse(ast.fix_missing_locations(tree)))
        if passes(f"tests/{folder}"):
            missed += 1
            print(f"{file}:{getattr(node, 'lineno', 0)}: {before[:100]!r} -> {ast.unparse(node)[:100]!r}")
        file.write_text(original)
    print(f"{folder}: {len(drawn) - missed} of {len(drawn)} changes noticed with seed {seed}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--number", type=int, default=30, help="of each seed and folder")
    parser.add_argument("folders", nargs="*", default=["data", "ropewalk/evaluation"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        project = f"{folder}/project"
        shutil.copytree(".", project, ignore=shutil.ignore_patterns(".*", "runs", "prepared", "corpus", "build"))
        os.chdir(project)
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # two changes within a second would be taken for each other
        for room in args.folders:
            if not passes(f"tests/{room}"):
                sys.exit(f"the tests fail as they are: {Path('output.log').read_text()}")
            for seed in args.seeds:
                report(room, seed, args.number)


if __name__ == "__main__":
    main()
