"""The documentation is right: its code blocks run, and what it names exists.

A block runs in a folder with the test model as TARGET and its drafters as HEADS and DRAFTER.
"""

import ast
import importlib.util
import json
import re
import runpy
import shlex
import tomllib
from functools import cache
from pathlib import Path

import pytest
import torch
from support.assets import ASSETS, HIDDEN, VOCAB
from support.commands import run

from benchmarks.runner import CASES
from vllm_medusa.cli import COMMANDS, build_parser, options_of
from vllm_medusa.config import DRAFTER_METHODS, MedusaConfig
from vllm_medusa.options import from_flags

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "demo/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
EVERY = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MARK = re.compile(r"<!-- not run: ([^>]+) -->\n\Z")  # before a block
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
OTHERS = {  # flags of programs that are neither ours nor vLLM's
    *("--extra-index-url", "--target", "--no-deps"),  # pip
    *("--dist", "--num-processes"),  # pytest, accelerate
}
FORMER = ("demo/target", "demo/heads")  # named in commands of old results


def commands_of(page):
    """Lines of a page's code blocks, continuation lines joined."""
    for _, code in FENCE.findall(page.read_text()):
        for line in code.replace("\\\n", " ").splitlines():
            yield line.strip().removeprefix(".venv/bin/")


def blocks_of(page):
    """(line, reason not to run it or None, language, code) of each of a page's code blocks."""
    text = page.read_text()
    for found in FENCE.finditer(text):
        before = text[: found.start()]
        reason = MARK.search(before)
        yield before.count("\n") + 1, reason and reason[1], *found.groups()


BLOCKS = {
    f"{page.relative_to(ROOT)}:{line}": (reason, language, code)
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    for line, reason, language, code in blocks_of(page)
}


def speculative_configs(text):
    """The dicts with a "method" in a page, as JSON or as Python with comments."""
    for start in (found.start() for found in re.finditer(r'\{\s*"method"', text)):
        depth, end = 0, start
        while depth or end == start:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        found = re.sub(r"\s#.*", "", text[start:end])
        if "..." in found:  # abbreviated
            continue
        try:
            yield json.loads(found)
        except ValueError:
            yield ast.literal_eval(found)


@cache
def make_targets():
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@EVERY
def test_commands_are_accepted(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for line in commands_of(page):
        if re.match(r"make\b", line):
            words = shlex.split(line, comments=True)[1:]
            assert {word for word in words if "=" not in word} <= make_targets(), line
        if not line.startswith("vllm-medusa ") or "..." in line:
            continue
        command, *words = ("7" if word == "N" else word for word in shlex.split(line)[1:])
        if command == "serve":  # all other options are vLLM's
            assert set(FLAG.findall(line)) & {"--speculative-model", "--speculative-config"}
            continue
        args = build_parser().parse_args([command, *words])
        from_flags(options_of(COMMANDS[args.command][0]), args)


@EVERY
def test_named_commands_exist(page):
    text = page.read_text()
    for name in re.findall(r"`(?:\.venv/bin/)?vllm-medusa\s+([a-z]\w*)", text):
        assert name in (*COMMANDS, "serve")
    for name in re.findall(r"python -m benchmarks\s+([a-z]+)", text):
        assert name in CASES
    assert set(re.findall(r"`make\s([a-z-]+)", text)) <= make_targets()


@cache
def known_flags():
    """Flags of the commands, the benchmarks, the demo and the example for Ray."""
    (commands,) = (action for action in build_parser()._actions if action.choices)
    found = {flag for own in commands.choices.values() for flag in own._option_string_actions}
    folders = [ROOT / "benchmarks", ROOT / "demo", ROOT / "examples"]
    for text in (file.read_text() for folder in folders for file in folder.glob("*.py")):
        names = re.findall(r"^    (\w+): .*option\(", text, re.MULTILINE)
        found |= {*FLAG.findall(text), *(f"--{name.replace('_', '-')}" for name in names)}
    return found


@cache
def vllm_options():
    """Names of fields and flags in vLLM's sources of its arguments, without importing it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None:
        pytest.skip("vLLM is not installed")
    folder = Path(spec.submodule_search_locations[0])
    files = [folder / "engine" / "arg_utils.py", *folder.glob("entrypoints/**/cli_args.py")]
    return "\n".join(file.read_text() for file in files)


@EVERY
def test_named_flags_exist(page):
    text = page.read_text()
    for flag in sorted(set(FLAG.findall(text)) - known_flags() - OTHERS):
        option = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
        assert flag in ("--help", "--speculative-model") or option in vllm_options(), flag


@EVERY
def test_speculative_configs_are_valid(page):
    text = re.sub("<!-- commands -->.*", "", page.read_text(), flags=re.DOTALL)  # of --help
    for config in speculative_configs(text):
        DRAFTER_METHODS.get(config["method"], MedusaConfig).from_speculative_config(config)


@EVERY
def test_named_files_exist(page):
    text = page.read_text()
    folders = r"examples|tests|scripts|docs|benchmarks|demo|vllm_medusa"
    for name in re.findall(rf"`((?:{folders})/[\w./-]+)[`\s]", text):
        assert name in FORMER or (ROOT / name).exists(), name
    parts = "|".join(p.name for p in (ROOT / "vllm_medusa").iterdir() if p.is_dir())
    for name in re.findall(rf"`((?:{parts})/[\w./-]*)`", text):
        assert (ROOT / "vllm_medusa" / name).exists(), name


@cache
def messages():
    """All string constants of the package; each value that is filled in is a NUL."""
    found = []
    for file in (ROOT / "vllm_medusa").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (
                    part.value if isinstance(part, ast.Constant) else "\0" for part in node.values
                )
                found.append("".join(parts))
    return "\n".join(found)


def quoted_messages(text):
    """Messages in the first column of the tables, split at the values that are filled in."""
    for line in re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE):
        yield [part for part in (part.strip() for part in line.split("...")) if len(part) > 3]


def test_quoted_error_messages_are_those_of_the_package():
    text = (ROOT / "docs" / "guides" / "troubleshooting.md").read_text()
    quoted = list(quoted_messages(text))
    assert len(quoted) >= 15
    missing = [part for parts in quoted for part in parts if part not in messages()]
    assert not missing
    assert all(max(map(len, parts)) > 12 for parts in quoted)


def test_a_wrong_message_is_found():
    (parts,) = quoted_messages("| `The heads in ... do not match the target` | |")
    assert parts[0] in messages() and parts[1] not in messages()


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    generated = {f"results/data/{p.name}" for p in (ROOT / "benchmarks" / "results").glob("*.md")}
    generated |= {"index.md", "contributing.md", "changelog.md", "demo.md"}
    written = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert listed == written | generated


def test_the_table_of_extras_is_that_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {
        extra: {re.match(r"[\w-]+", each)[0] for each in needed}
        for extra, needed in project["optional-dependencies"].items()
    }
    text = (ROOT / "docs" / "start" / "install.md").read_text()
    rows = {
        extra: set(re.findall(r"`([\w-]+)`", brings))
        for extra, brings in re.findall(r"^\| `(\w+)` \| (.*?) \|", text, re.MULTILINE)
    }
    assert rows.pop("dev") < extras.keys() and extras.pop("dev")
    assert rows == extras


@pytest.mark.parametrize(
    "page",
    [*PAGES, ROOT / "CHANGELOG.md", *sorted((ROOT / "benchmarks" / "results").glob("*.md"))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_links_lead_to_files_of_the_repository(page):
    """`scripts/docs_hooks.py` points them into the site, where `mkdocs build --strict` checks."""
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        file, _, anchor = link.partition("#")
        if not re.match(r"https?:", link) and file:
            assert (page.parent / file).exists(), link
        if anchor and file.endswith(".md"):
            titles = re.findall(r"^#+ (.*)$", (page.parent / file).read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in slugs, link


def test_generated_parts_are_current():
    """Otherwise run `python scripts/docs_hooks.py`."""
    hooks = runpy.run_path(str(ROOT / "scripts" / "docs_hooks.py"))
    parts = 0
    for path in hooks["GENERATED"]:
        page = path.read_text(encoding="utf-8")
        parts += page.count("<!-- end -->")
        assert hooks["filled"](page) == page, path
    assert parts == 12  # five tables of keys, five parts of decode.py, the commands, serve


def kind_of(reason, language, code):
    """How a block is tested: "python", "yaml", "commands", "marked" or "text"; None: not at all."""
    commands = re.findall(r"^(\S+).*?(?<!\\)\n", code, re.MULTILINE | re.DOTALL)
    if reason is not None:
        return "marked"
    if language == "":
        return "commands" if set(commands) == {".venv/bin/vllm-medusa"} else None
    if language == "text":  # a drawing or formula
        return None if re.search(r"^\s*(\S*vllm|make|pip|curl)\b", code, re.MULTILINE) else "text"
    return language if language in ("python", "yaml") else None


def runnable(*kinds):
    names = [name for name, block in BLOCKS.items() if kind_of(*block) in kinds]
    return pytest.mark.parametrize("name", names)


def test_every_block_runs_or_says_why_not():
    assert [name for name, block in BLOCKS.items() if kind_of(*block) is None] == []
    for reason in filter(None, (reason for reason, _, _ in BLOCKS.values())):
        assert all((ROOT / file).exists() for file in re.findall(r"tests/[\w./]+", reason)), reason
    for page in PAGES[:1] + PAGES[3:]:
        rest = FENCE.sub("", page.read_text())
        assert not re.search(r"\n\n    (?![-*] )\S", rest), f"an indented block in {page}"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("```\nmake demo\n```\n", None),
        ("```\n.venv/bin/vllm-medusa inspect A\ncurl B\n```\n", None),
        ("```\n.venv/bin/vllm-medusa inspect A \\\n    --json\n```\n", "commands"),
        ("```sh\nmake demo\n```\n", None),
        ("```text\nmake demo\n```\n", None),
        ("<!-- not run: minutes -->\n```\nmake demo\n```\n", "marked"),
        ("<!-- not run: minutes -->\n\nOther words.\n\n```\nmake demo\n```\n", None),
    ],
)
def test_blocks_that_are_not_tested_are_found(text, kind, tmp_path):
    (tmp_path / "page.md").write_text(text)
    ((_, *block),) = blocks_of(tmp_path / "page.md")
    assert kind_of(*block) == kind


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder: what blocks name."""
    from support.eagle import Eagle3

    (tmp_path / "TARGET").symlink_to(ASSETS / "target")
    (tmp_path / "HEADS").symlink_to(ASSETS / "heads")
    Eagle3(torch.zeros(VOCAB, HIDDEN), torch.arange(512), (1, 2, 3)).save(tmp_path / "DRAFTER")
    lines = (ASSETS / "prompts.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "prompts.jsonl").write_text("".join(lines[:2]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.engine
@runnable("commands")
def test_commands_run(name, folder):
    """As they stand, but `generate` has a small engine and short answers."""
    small = {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
    for words in map(shlex.split, BLOCKS[name][2].replace("\\\n", " ").splitlines()):
        if words[1] == "generate":
            words += ["--max-tokens", "8", "--engine-args", json.dumps(small)]
        assert run(*words[1:]) == 0, words
        if "--output" in words:
            assert Path(words[words.index("--output") + 1]).exists()


@pytest.mark.engine
@runnable("python")
def test_python_runs(name, folder, monkeypatch):
    """Engines are small, in this process, and have trees."""
    vllm = pytest.importorskip("vllm")
    from support import engines

    started = []

    def small(**arguments):
        own = {"enforce_eager": True, "max_model_len": 256, "kv_cache_memory_bytes": 64 << 20}
        started.append(engines.LLM(**arguments, **own))
        return started[-1]

    monkeypatch.setattr(vllm, "LLM", small)
    exec(compile(BLOCKS[name][2], name, "exec"), {"__name__": "__main__"})
    assert len(started) == BLOCKS[name][2].count("LLM(")
    for llm in started:
        assert engines.has_trees(llm.llm_engine.vllm_config.speculative_config)
        engines.stop(llm)


@runnable("yaml")
def test_yaml_is_valid(name):
    assert isinstance(pytest.importorskip("yaml").safe_load(BLOCKS[name][2]), dict)
