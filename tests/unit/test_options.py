"""One field defines name, default, bounds and help for Python callers and command lines."""

import argparse
import json
import re
from pathlib import Path
from typing import Any, Literal

import pytest

from vllm_medusa.options import (
    Above,
    AtLeastZero,
    FromZero,
    Options,
    Parser,
    Positive,
    Seed,
    Share,
    Source,
    add_flags,
    command_line,
    from_flags,
    group,
    option,
    values_of,
)


class Texts(Options):
    title = "texts"
    samples: Positive = option("texts per prompt", default=1)
    temperatures: tuple[AtLeastZero, ...] = option(default=(0.7,))
    stop: tuple[str, ...] = option(default=())
    budgets: tuple[Positive, ...] = option("draft nodes", default=(4, 8))
    limit: Positive | None = option(default=None, metavar="N")


class More(Options):
    rounds: Positive = option(default=3)


class Job(Texts):
    model: str = option("the target", positional=True)
    output: Path = option("results", "-o")
    kind: Literal["soft", "tokens"] = option("100 % soft", default="soft")
    draft_count: FromZero = option("", "--num-draft-tokens", "-n", default=3)
    rate: Above | None = option(default=None)
    draft: Source | None = option(default=None)
    share: Share = option(default=1.0)
    seed: Seed = option(default=0)
    overwrite: bool = option("discard", default=False)
    engine_args: dict[str, Any] = option(default={}, metavar="JSON")
    more: More = group("more", factory=More)

    def check(self) -> None:
        if self.kind == "tokens" and self.rate:
            raise ValueError("--rate is for --kind soft; omit one of them.")


def parse(*words: str) -> Job:
    parser = Parser()
    add_flags(parser, Job)
    return from_flags(Job, parser.parse_args(["m", "-o", "x", *words]))


def test_defaults_are_defined_in_the_fields_only():
    assert parse() == Job(model="m", output=Path("x"))
    assert parse().engine_args is not parse().engine_args


@pytest.mark.parametrize(
    ("words", "read"),
    [
        ("--samples 3", lambda job: job.samples == 3),
        ("--temperatures 0.1 0", lambda job: job.temperatures == (0.1, 0.0)),
        ("--stop a b", lambda job: job.stop == ("a", "b")),
        ("--budgets 1 2 3", lambda job: job.budgets == (1, 2, 3)),
        ("--num-draft-tokens 0", lambda job: job.draft_count == 0),
        ("-n 7", lambda job: job.draft_count == 7),
        ("--overwrite", lambda job: job.overwrite),
        ("--rate 1e-3", lambda job: job.rate == 1e-3),
        ('--engine-args {"a":[1]}', lambda job: job.engine_args == {"a": [1]}),
    ],
)
def test_arguments_to_options_and_back(words, read):
    job = parse(*words.split())
    assert read(job)
    assert command_line(parse()) == ["m", "--output", "x"]
    assert parse(*(word for word in command_line(job) if word != "m")) == job


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--samples 0", "'0' is not allowed; input should be greater than or equal to 1"),
        ("--samples 1.5", "'1.5' is not allowed; input should be a valid integer"),
        ("--rate inf", "'inf' is not allowed; input should be a finite number"),
        ("--temperatures 1 -1", "'-1' is not allowed; input should be greater"),
        ("--engine-args [1]", "input should be an object"),
        ("--engine-args {", "invalid JSON:"),
        ("--output=", "the name is empty"),
        (
            "--draft /nowhere",
            "'/nowhere' is not allowed; it does not exist; use an existing folder",
        ),
        ("--kind hard", "'hard' is not allowed; input should be 'soft' or 'tokens'"),
    ],
)
def test_errors_name_value_bounds_and_option(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(*words.split())
    assert ended.value.code == 2
    assert f"error: argument --{words[2:].split()[0].strip('=')}" in (
        text := capsys.readouterr().err
    )
    assert message in text
    assert "usage" not in text


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seed": -1}, "seed is -1: input should be greater than or equal to 0"),
        ({"draft": " "}, "draft is ' ': it does not exist; use an existing folder"),
        ({"budgets": (4, 0)}, "budgets is 0: input should be greater"),
        ({"kind": "hard"}, "kind is 'hard': input should be 'soft' or 'tokens'"),
        ({"kind": "tokens", "rate": 1.0}, "--rate is for --kind soft"),
    ],
)
def test_python_callers_get_the_same_errors(values, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        Job(model="m", output=Path("x"), **values)


def test_help_shows_each_default_once():
    parser = argparse.ArgumentParser()
    add_flags(parser, Job)
    text = parser.format_help()
    for words in (
        "texts per prompt (1)",
        "draft nodes (4 8)",
        "100 % soft (soft)",
        "texts:",
        "more:",
    ):
        assert words in text
    assert "{}" not in text
    assert json.dumps({}) not in text


def test_values_of_groups_are_merged_with_the_others():
    values = values_of(parse("--rounds", "2"))
    assert (values["rounds"], values["model"]) == (2, "m")
    assert "more" not in values
