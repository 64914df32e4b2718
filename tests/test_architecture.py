"""docs/architecture.md lists exactly the private torch interfaces that the source uses."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"


def dotted(node):
    """The text of an attribute chain on a name, such as torch.utils.data; else None."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def private(name):
    parts = name.split(".")
    hidden = any(p.startswith("_") and not p.startswith("__") for p in parts)
    return parts[0] == "torch" and (hidden or name.startswith("torch.fx.experimental."))


def used(path):
    """Private names that a file imports or spells out, the longest form of each."""
    tree, names = ast.parse(path.read_text()), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(dotted(node) or "")
    names = {n for n in names if private(n)}
    return {n for n in names if not any(other.startswith(n + ".") for other in names)}


def rows():
    """The table's rows, as they should be."""
    found = {path.relative_to(SRC).as_posix(): used(path) for path in sorted(SRC.rglob("*.py"))}
    for path, names in found.items():
        modules = {}
        for name in sorted(names):
            module, _, last = name.rpartition(".")
            modules.setdefault(module, []).append(last)
        if modules:
            yield f"| {path} | " + "; ".join(f"`{m}`: {', '.join(n)}" for m, n in modules.items()) + " |"


def test_the_table_of_private_interfaces_is_the_source_s():
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = re.findall(r"^\| \S+\.py \| .*$", page, re.M)
    wanted = list(rows())
    assert table == wanted, "docs/architecture.md should have these rows:\n" + "\n".join(wanted)
