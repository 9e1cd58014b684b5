"""vLLM's Python files read as syntax trees: also of a release that can not be imported here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Parameters:
    """Of a function, in the order of the source; the receiver is one of them."""

    positional: tuple[str, ...]
    keyword_only: tuple[str, ...] = ()
    more_positional: bool = False  # *args
    more_keywords: bool = False  # **kwargs

    @classmethod
    def of(cls, function: Function) -> Parameters:
        given = function.args
        return cls(
            tuple(arg.arg for arg in (*given.posonlyargs, *given.args)),
            tuple(arg.arg for arg in given.kwonlyargs),
            given.vararg is not None,
            given.kwarg is not None,
        )

    def stand_in_for(self, stock: Parameters) -> bool:
        """Whether who calls ``stock`` can call these; ``*args`` says that it is by position."""
        named = self.positional
        rest = stock.positional[len(named) :]
        if named != stock.positional[: len(named)] or (rest and not self.more_positional):
            return False
        return self.more_keywords or {*stock.keyword_only} <= {*self.keyword_only}


class Source:
    """The package that ``root`` holds a folder of: ``root/vllm``."""

    def __init__(self, root: Path):
        self.root = root
        self._tree = cache(self._parse)

    def has(self, module: str, name: str | None = None) -> bool:
        """Whether there is such a module, and such a name in it."""
        if not module.startswith("vllm"):
            return False
        tree = self._tree(module)
        if tree is None:
            return False
        if name is None or name in _defined(tree):
            return True
        if self._tree(f"{module}.{name}") is not None or name in _named_in_strings(tree):
            return True
        stars = (_imported(node, self._package(module), "*") for node in tree.body)
        return any(place is not None and self.has(place[0], name) for place in stars)

    def parameters(self, module: str, name: str) -> Parameters | None:
        """Of a function, or of a class's own or inherited method, given as ``Class.method``."""
        owner, _, method = name.rpartition(".")
        if owner:
            return self._method(module, owner, method)
        found = self._statement(module, name)
        return Parameters.of(found) if isinstance(found, Function) else None

    def _method(self, module: str, owner: str, method: str) -> Parameters | None:
        home = self.home(module, owner)
        if home is None:
            return None
        module, node = home
        for statement in _statements(node.body):
            if isinstance(statement, Function) and statement.name == method:
                return Parameters.of(statement)
        for base in node.bases:
            if (place := self.place(self._tree(module), module, base)) is not None:
                found = self._method(*place, method)
                if found is not None:
                    return found
        return None

    def home(self, module: str, name: str) -> tuple[str, ast.ClassDef] | None:
        """The module a class is written in, followed through imports, and the class."""
        found = self._statement(module, name)
        if isinstance(found, ast.ClassDef):
            return module, found
        if isinstance(found, ast.ImportFrom):
            place = _imported(found, self._package(module), name)
            return None if place is None else self.home(*place)
        return None

    def place(self, tree: ast.Module | None, module: str, base: ast.expr) -> tuple[str, str] | None:
        """(module, class) that an expression such as ``Base`` or ``module.Base`` stands for."""
        if isinstance(base, ast.Subscript):
            base = base.value
        imports = {} if tree is None else _imports(tree, self._package(module))
        if isinstance(base, ast.Name):
            return imports.get(base.id, (module, base.id))
        if isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name):
            where = imports.get(base.value.id)
            return None if where is None else (".".join(where), base.attr)
        return None

    def _statement(self, module: str, name: str) -> ast.stmt | None:
        tree = self._tree(module)
        found = None
        for statement in _statements(tree.body) if tree is not None else ():
            if isinstance(statement, ast.ImportFrom):
                if any((alias.asname or alias.name) == name for alias in statement.names):
                    found = statement
            elif getattr(statement, "name", None) == name:
                found = statement
        return found

    def _package(self, module: str) -> str:
        """What relative imports in a module start from."""
        is_package = self.root.joinpath(*module.split("."), "__init__.py").is_file()
        return module if is_package else module.rpartition(".")[0]

    def _parse(self, module: str) -> ast.Module | None:
        path = self.root.joinpath(*module.split("."))
        for file in (path / "__init__.py", path.with_name(f"{path.name}.py")):
            if file.is_file():
                return ast.parse(file.read_text())
        return None


def vllm_imports(tree: ast.Module) -> Iterator[tuple[str, str | None]]:
    """(module, name) of everything a file takes from vLLM, wherever the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "vllm":
                    yield alias.name, None
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            for alias in node.names:
                yield node.module or "", alias.name


def methods(node: ast.ClassDef) -> Iterator[Function]:
    """The methods that stand in a class's own body."""
    for statement in _statements(node.body):
        if isinstance(statement, Function):
            yield statement


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body, and those under ``if``, ``try`` and ``with`` in it."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            yield from _statements(statement.body)
            yield from _statements(getattr(statement, "orelse", []))
            for handler in getattr(statement, "handlers", []):
                yield from _statements(handler.body)


def _defined(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for statement in _statements(tree.body):
        if isinstance(statement, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.split(".")[0] for alias in statement.names}
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                names |= {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            names.add(statement.target.id)
        elif isinstance(name := getattr(statement, "name", None), str):
            names.add(name)
    return names


def _named_in_strings(tree: ast.Module) -> set[str]:
    """Names a module makes on demand: keys of a dictionary beside its ``__getattr__``."""
    if not any(isinstance(s, Function) and s.name == "__getattr__" for s in tree.body):
        return set()
    keys = [key for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys]
    return {key.value for key in keys if isinstance(key, ast.Constant)}


def _imports(tree: ast.Module, package: str) -> dict[str, tuple[str, str]]:
    """Name in a file of a package -> (module, name) it was imported from."""
    return {
        alias.asname or alias.name: place
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if (place := _imported(node, package, alias.asname or alias.name)) is not None
    }


def _imported(node: ast.AST, package: str, name: str) -> tuple[str, str] | None:
    """(module, name) that a statement takes ``name`` from, if it imports it at all."""
    for alias in node.names if isinstance(node, ast.ImportFrom) else ():
        if (alias.asname or alias.name) == name:
            parts = package.split(".")
            start = parts[: len(parts) + 1 - node.level] if node.level else []
            return ".".join([*start, *filter(None, [node.module])]), alias.name
    return None
