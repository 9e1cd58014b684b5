import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import vllm_medusa
from vllm_medusa.integration.overrides import OVERRIDES, override

PACKAGE = Path(vllm_medusa.__file__).parent


def twice(original: Callable[..., Any], *args: Any) -> Any:
    return 2 * original(*args)


def make_owner() -> type:
    class Owner:
        """Stands for a class of vLLM."""

        def method(self, x: int) -> int:
            """Return x."""
            return x

        @staticmethod
        def static(x: int) -> int:
            return x

        @classmethod
        def of(cls, x: int) -> tuple[str, int]:
            return (cls.__name__, x)

    return Owner


def test_methods_keep_their_kind():
    owner = make_owner()
    for name in ("method", "static", "of"):
        override(owner, name, twice)
    assert owner().method(3) == 6
    assert owner.static(3) == owner().static(3) == 6
    assert owner.of(3) == ("Owner", 3, "Owner", 3)
    assert owner.method.__doc__ == "Return x."
    assert isinstance(inspect.getattr_static(owner, "static"), staticmethod)
    assert isinstance(inspect.getattr_static(owner, "of"), classmethod)


def test_a_second_application_changes_nothing():
    owner = make_owner()
    for name in ("method", "static", "of"):
        override(owner, name, twice)
        first = inspect.getattr_static(owner, name)
        override(owner, name, twice)
        assert inspect.getattr_static(owner, name) is first
    assert owner().method(3) == 6


def test_subclasses_are_not_affected():
    """Only the owner's own attribute is replaced; a class without one is an error."""
    with pytest.raises(KeyError):
        override(type("Child", (make_owner(),), {}), "method", twice)


def patches(tree: ast.Module) -> set[str]:
    """Attributes that the code replaces on objects of other modules.

    These are attributes of imports from vLLM, attributes that are set to a function or
    deleted, and names passed to `override`, `setattr` or `patch.object`.
    """
    found: set[str] = set()
    nodes = list(ast.walk(tree))
    ours = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    imports = [node for node in nodes if isinstance(node, ast.Import)]
    imports += [
        node for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
    ]  # fmt: skip
    names = [(alias.name, alias.asname) for node in imports for alias in node.names]
    stock = {given or name.split(".")[0] for name, given in names} - {"torch", "np"}
    for node in nodes:
        match node:
            case ast.Call(func=ast.Name("override" | "setattr"), args=[_, ast.Constant(name), *_]):
                found.add(name)
            case ast.Call(func=ast.Attribute(attr="object"), args=[_, ast.Constant(name), *_]):
                found.add(name)
            case ast.Assign(targets=targets, value=value):
                code = isinstance(value, ast.Lambda)
                code |= isinstance(value, ast.Name) and value.id in ours
                for target in (part for each in targets for part in ast.walk(each)):
                    match target:
                        case ast.Attribute(value=ast.Name("self" | "cls")):
                            pass
                        case ast.Attribute(value=owner, attr=name, ctx=ast.Store()):
                            if code or ast.unparse(owner).split(".")[0] in stock:
                                found.add(name)
            case ast.Delete(targets=targets):
                found |= {each.attr for each in targets if isinstance(each, ast.Attribute)}
    return found


def test_every_patch_is_listed():
    listed = {entry.target.rpartition(".")[2] for entry in OVERRIDES}
    found = {
        name: file.name
        for file in sorted((PACKAGE / "integration").rglob("*.py"))
        if file.name != "overrides.py"
        for name in patches(ast.parse(file.read_text()))
    }
    assert {name: file for name, file in found.items() if name not in listed} == {}
    assert listed - set(found) == {"all_token_ids", "soft_cap"}  # data, not code
    for entry in OVERRIDES:
        assert entry.why.strip() and entry.gone_when.strip()


@pytest.mark.parametrize(
    "planted",
    [
        "from vllm.a import B\nB.x = 3",
        "import vllm.a\nvllm.a.B.x = 3",
        "from vllm import a\na.B.x, other = 3, 4",
        "from vllm import a\nsetattr(a.B, 'x', 3)",
        "from vllm import a\nwith patch.object(a.B, 'x', 3): ...",
        "def f(): ...\ndef g(model):\n    model.x = f",
        "def g(model):\n    model.x = lambda: 3",
        "def g(model):\n    del model.x",
        "override(Model, 'x', make)",
    ],
)
def test_control_a_patch_is_found(planted: str):
    assert patches(ast.parse(planted)) == {"x"}
