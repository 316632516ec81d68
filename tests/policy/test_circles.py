"""No module imports itself by way of others: imports for types and inside functions count."""

from __future__ import annotations

from policy.tree import Tree, assert_none


def imports_of(tree: Tree) -> dict[str, set[str]]:
    """Module -> the modules of this package that it imports. Package fronts re-export, and are not
    counted.
    """
    graph: dict[str, set[str]] = {}
    for file in tree.files:
        if not file.is_package:
            targets = {tree.target(imported) for imported in file.imports()}
            graph[file.module] = {target for target in targets if target in tree.modules} - {
                file.module
            }
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one module (Tarjan, 1972)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def explore(module: str) -> None:
        number[module] = lowest[module] = len(number)
        stack.append(module)
        for target in sorted(graph.get(module, ())):
            if target not in number:
                explore(target)
                lowest[module] = min(lowest[module], lowest[target])
            elif target in stack:
                lowest[module] = min(lowest[module], number[target])
        if lowest[module] == number[module]:
            component = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(component) > 1:
                components.append(sorted(component))

    for module in graph:
        if module not in number:
            explore(module)
    return components


def circle_violations(tree: Tree) -> list[str]:
    return [f"import circle: {', '.join(circle)}" for circle in circles(imports_of(tree))]


def test_no_module_imports_itself_by_way_of_others():
    assert_none(circle_violations(Tree.of_repository()))


def test_circle_policy_rejects_a_circle_closed_by_a_type_and_by_an_import_in_a_function():
    tree = Tree.of(
        {
            "a": (
                "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tutorec.b import B\n"
            ),
            "b": "def f():\n    from tutorec import c\n",
            "c": "import tutorec.a\n",
            "d": "from tutorec.a import x\n",
        }
    )
    assert circle_violations(tree) == ["import circle: tutorec.a, tutorec.b, tutorec.c"]
