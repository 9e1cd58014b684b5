"""Hooks of MkDocs: parts of the site that are made from the sources, so that no fact has two homes.

The README, the changelog and every table of ``benchmarks/results``, with its plot, become pages.
Generated parts of other pages are in the repository too, for its readers. They follow a comment and
end with ``<!-- end -->``: after ``<!-- commands -->`` the reference of all commands, from the
parsers of ``--help``; after ``<!-- serve -->`` the plugin's options of vLLM's server; after
``<!-- MedusaConfig -->``, or another model of `vllm_medusa.config`, the table of its keys; after
``<!-- Score -->`` that part of `decode.py`.

    python scripts/docs_hooks.py    # writes them
"""

from __future__ import annotations

import argparse
import json
import posixpath
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

from vllm_medusa import config as models
from vllm_medusa.cli import COMMANDS, build_parser
from vllm_medusa.integration.startup.engine_args import _add_cli_args

ROOT = Path(__file__).resolve().parents[1]
GENERATED = [
    ROOT / "docs" / name
    for name in ("how/decode.md", "reference/commands.md", "reference/config.md")
]
DATA = "results/data"  # the tables' folder in the site
PAGES = {
    "README": "index",
    "CONTRIBUTING": "contributing",
    "CHANGELOG": "changelog",
    "demo/README": "demo",
}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages and pictures that are outside docs/."""
    from mkdocs.structure.files import File  # not needed to write the tables of keys

    for name, page in PAGES.items():
        text = (ROOT / f"{name}.md").read_text(encoding="utf-8").replace("](docs/", "](")
        for other, site in PAGES.items():
            text = text.replace(f"]({other}.md)", f"]({site}.md)")
        files.append(File.generated(config, f"{page}.md", content=text))
    for file in sorted((ROOT / "benchmarks" / "results").iterdir()):
        path = f"{DATA}/{file.name}"
        if file.suffix == ".md":
            files.append(File.generated(config, path, content=_result(file)))
        else:
            files.append(File.generated(config, path, abs_src_path=str(file)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in the generated parts; point links to files outside docs/ into the site."""
    folder = posixpath.dirname(page.file.src_uri)
    data = posixpath.relpath(DATA, folder or ".")
    markdown = re.sub(r"\]\((\.\./)*benchmarks/results/", f"]({data}/", markdown)
    for name, site in PAGES.items():
        own = posixpath.relpath(site, folder or ".")
        markdown = re.sub(rf"\]\((\.\./)+{name}\.md", f"]({own}.md", markdown)
    return markdown.replace("](../../docs/", "](../../") if folder == DATA else markdown


def on_post_build(config: Any) -> None:
    """Check that every picture exists: ``--strict`` checks only links."""
    site = Path(config["site_dir"])
    for page in sorted(site.rglob("*.html")):
        for picture in re.findall(r'<img [^>]*src="([^":]+)"', page.read_text(encoding="utf-8")):
            if not (page.parent / picture).is_file():
                raise SystemExit(
                    f"{page.relative_to(site)}: there is no picture {picture}. Correct its link in "
                    "the source, or the rewriting in on_page_markdown."
                )


def filled(page: str) -> str:
    """The page with its generated parts written again."""

    def part(found: re.Match[str]) -> str:
        text = "\n".join(_part(found[2])).rstrip("\n")
        return f"{found[1]}\n{text}\n\n{found[3]}"

    return re.sub(r"(<!-- (\w+) -->\n).*?(<!-- end -->)", part, page, flags=re.DOTALL)


def _result(page: Path) -> str:
    """A table of results with its plot and a link to its figures."""
    text, name = page.read_text(encoding="utf-8"), page.stem
    if page.with_suffix(".png").is_file():
        text += f"\n## Plot\n\n![{name}]({name}.png)\n"
    return f"# {name}\n\n{text}\nAll figures: [{name}.json]({name}.json)\n"


def _part(name: str) -> Iterator[str]:
    if name == "commands":
        yield from _commands()
    elif name == "serve":
        parser = argparse.ArgumentParser(add_help=False)
        yield from _options(_add_cli_args(lambda it: it, parser)._actions)
    elif hasattr(models, name):
        yield from _keys(getattr(models, name))
    else:  # a commented part of decode.py, up to the next one
        source = (ROOT / "vllm_medusa" / "decode.py").read_text(encoding="utf-8")
        parts = re.split(r"^        # (?=[A-Z]\w+[.:,])|^    end", source, flags=re.MULTILINE)
        (code,) = [part for part in parts if part.startswith(name)]
        yield "<!-- not run: a part of decode.py, which the tests run -->\n```python"
        yield f"{dedent('        # ' + code)}```"


def _commands() -> Iterator[str]:
    """All commands but `serve`, whose options are vLLM's."""
    (every,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    for name in COMMANDS:
        own = every.choices[name]
        actions = sorted(own._actions, key=lambda action: bool(action.option_strings))
        needed = [
            " ".join([*a.option_strings[:1], _value(a)]) if a.required else f"[{_value(a)}]"
            for a in actions
            if a.required or not a.option_strings
        ]
        usage = " ".join(["vllm-medusa", name, *needed, "..."])
        yield f"## {name}\n\n`{usage}`\n\n{own.description}\n"
        for group in own._action_groups:
            if shown := [a for a in group._group_actions if a.dest != "help"]:
                yield f"*{str(group.title).capitalize()}*\n"
                yield from _options(shown)
        if own.epilog:
            yield f"<!-- not run: a part of --help -->\n```text\n{own.epilog.strip()}\n```\n"


def _options(actions: Iterable[argparse.Action]) -> Iterator[str]:
    yield from ("| option | meaning |", "|---|---|")
    for each in actions:
        names = [", ".join(each.option_strings), _value(each) if each.nargs != 0 else ""]
        yield f"| `{' '.join(names).strip()}` | {_cell((each.help or '').replace('%%', '%'))} |"
    yield ""


def _value(action: argparse.Action) -> str:
    return action.metavar if isinstance(action.metavar, str) else action.dest.upper()


def _keys(model: type[models._Options]) -> Iterator[str]:
    yield from ("| key | default | value |", "|---|---|---|")
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True, validated_data={})
        default = default.mode if isinstance(default, models.AcceptanceConfig) else default
        if field.is_required():
            shown = "required"
        else:
            shown = "" if default is None else f"`{json.dumps(default)}`"
        yield f"| `{model.names.get(name, name)}` | {shown} | {_cell(field.description or '')} |"
    yield ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    for path in GENERATED:
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
