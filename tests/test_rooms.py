"""The rooms of harness, reports and the reference: how many layers they have, and that no imports go in a circle.

Read from the sources, so that imports inside functions and under TYPE_CHECKING count as any other. import-linter keeps
the order of the layers (tests/test_repository.py); here their number is counted, and circles of files are found.
"""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: The longest chain of rooms of which each imports the next. The layers in pyproject.toml are more: parity, which may
#: import planning, does not.
MOST_LAYERS = 7


def modules(package):
    """The files of a package, by the names under which they are imported: {name: path}."""
    found = {}
    for path in sorted((ROOT if package == "fsdp_impl" else ROOT / "shardproof").joinpath(package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imported_names(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ([alias.name] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports are not used here"
            for alias in node.names:
                # The module of that name, or the one that holds it.
                yield [f"{node.module}.{alias.name}", node.module]


def graph(sources):
    """{module: the modules that it imports}, for {name: source}."""
    edges = {}
    for name, source in sources.items():
        found = (next((one for one in names if one in sources), None) for names in imported_names(ast.parse(source)))
        edges[name] = {one for one in found if one is not None and one != name}
    return edges


def circles(edges):
    """Lists of modules that import each other, each once (strongly connected components of several modules)."""

    def reachable(start):
        seen, stack = set(), [start]
        while stack:
            for other in edges[stack.pop()] - seen:
                seen.add(other)
                stack.append(other)
        return seen

    reach = {name: reachable(name) for name in edges}
    found = {frozenset(other for other in edges if other in reach[name] and name in reach[other]) for name in edges}
    return sorted(sorted(group) for group in found if len(group) > 1)


def rooms(edges, *, depth=3):
    """The same graph between rooms: packages, or files, directly in `shardproof.harness` or `shardproof.reports`."""

    def room(name):
        return ".".join(name.split(".")[:depth])

    merged = {room(name): set() for name in edges}
    for name, others in edges.items():
        merged[room(name)] |= {room(other) for other in others} - {room(name)}
    return merged


def layers(edges):
    """The length of the longest chain of rooms that import each other; of a graph without circles."""

    @functools.cache
    def height(room):
        return 1 + max(map(height, edges[room]), default=0)

    return max(map(height, edges))


@pytest.mark.parametrize("package", ["harness", "reports"])
def test_no_circle_and_few_layers(package):
    edges = graph({name: path.read_text() for name, path in modules(package).items()})
    assert len(edges) > 6, "the folder has moved"
    between = rooms(edges)
    assert circles(edges) == []
    assert circles(between) == []
    print(f"{package}: {len(edges)} files in {len(between)} rooms, no circle, {layers(between)} layers")
    assert layers(between) <= MOST_LAYERS


@pytest.mark.parametrize("half", ["common", "per_parameter", "flat"])
def test_no_circle_in_the_reference(half):
    edges = graph({name: path.read_text() for name, path in modules("fsdp_impl").items()})
    package = f"fsdp_impl.{half}"
    assert sum(name.startswith(package) for name in edges) > 6, "the folder has moved"
    assert [circle for circle in circles(edges) if any(name.startswith(package) for name in circle)] == []


def test_the_halves_of_the_reference_share_common_alone():
    edges = rooms(graph({name: path.read_text() for name, path in modules("fsdp_impl").items()}), depth=2)
    found = [edges[f"fsdp_impl.{half}"] for half in ("common", "per_parameter", "flat")]
    assert found == [set(), {"fsdp_impl.common"}, {"fsdp_impl.common"}]


def test_each_note_of_the_reference_is_kept_in_one_place():
    kept, named = [], set()
    for path in modules("fsdp_impl").values():
        text = path.read_text()
        kept += re.findall(r"^# Note: ([a-z ]+)$", text, flags=re.MULTILINE)
        # A reference may be broken across the lines of a comment.
        named |= set(re.findall(r"\((?:see )?Note: ([a-z ]+)\)", re.sub(r"\s+#?\s*", " ", text)))
    listed = re.search(r"\| note \| kept in \|\n\|---\|---\|\n((?:\|.*\n)+)", (ROOT / "docs/reference.md").read_text())
    assert len(named) > 4
    assert named <= set(kept)
    assert sorted(kept) == sorted(line.split("|")[1].strip() for line in listed[1].splitlines())


def test_a_circle_is_found():
    sources = {
        "a.b.one": "from a.b import two",
        "a.b.two": "def late():\n    from a.c.three import thing",
        "a.c.three": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a.b.one",
        "a.c.four": "import a.c.three",
    }
    edges = graph(sources)
    assert circles(edges) == [["a.b.one", "a.b.two", "a.c.three"]]
    assert circles(rooms(edges, depth=2)) == [["a.b", "a.c"]]


def test_layers_are_counted():
    chain = {f"a.room{i}.file": f"import a.room{i + 1}.file" for i in range(7)} | {"a.room7.file": ""}
    assert layers(rooms(graph(chain), depth=2)) == 8
