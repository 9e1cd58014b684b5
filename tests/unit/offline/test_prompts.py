import json
from pathlib import Path

import pytest

from vllm_medusa.offline.prompts import Prompt, PromptError, read_prompts


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_text_lines_are_completions_and_blank_lines_only_count_as_lines(tmp_path):
    path = write(tmp_path / "p.txt", "first\n\n   \n  second \r\nlast")
    assert read_prompts(path)[0] == [
        Prompt(0, 1, "0", text="first"),
        Prompt(1, 4, "1", text="  second "),
        Prompt(2, 5, "2", text="last"),
    ]


def test_json_lines_of_all_three_kinds(tmp_path):
    system = {"role": "system", "content": "Be brief."}
    rows = [
        {"prompt": "def f(", "id": "a"},
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."]},
        {"messages": [system, {"role": "user", "content": "Hi"}], "request_id": "r"},
    ]
    path = write(tmp_path / "p.jsonl", "".join(json.dumps(r) + "\n" for r in rows))
    assert read_prompts(path)[0] == [
        Prompt(0, 1, "a", text="def f("),
        Prompt(1, 2, "81", turns=("Write.", "Rewrite.")),
        Prompt(2, 3, "r", history=(system,), turns=("Hi",)),
    ]


BAD = [
    ("{", "not JSON"),
    ("[1]", "a list instead of an object"),
    ('{"text": "x"}', "no key 'prompt' or 'messages' or 'turns'; the keys are 'text'"),
    ('{"prompt": ""}', "prompt is '': String should have at least 1 character"),
    ('{"turns": ["a", ""]}', "turns[1] is '': String should have at least 1 character"),
    ('{"messages": [{"role": "assistant", "content": "x"}]}', "must be 'user'"),
    (r'{"prompt": "a\ud800"}', "unable to parse raw data"),
    (r'{"messages": [{"role": "user", "content": "\ud800"}]}', "unable to parse raw data"),
]


@pytest.mark.parametrize(("line", "reason"), BAD)
def test_an_invalid_line_is_reported_and_the_rest_is_read(tmp_path, line, reason):
    path = write(tmp_path / "p.jsonl", f'{{"prompt": "a"}}\n\n{line}\n{{"prompt": "b"}}\n')
    prompts, bad = read_prompts(path)
    assert list(bad) == [3]
    assert reason in bad[3]
    assert prompts == [Prompt(0, 1, "0", text="a"), Prompt(2, 4, "2", text="b")]


@pytest.fixture
def parquet(tmp_path):
    arrow, tables = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def written(rows):
        tables.write_table(arrow.Table.from_pylist(rows), tmp_path / "p.parquet")
        return tmp_path / "p.parquet"

    return written


def test_parquet_reads_as_json_lines_do(tmp_path, parquet):
    rows = [{"id": f"r{i}", "turns": [f"q{i}", "and?"], "note": "x"} for i in range(3)]
    jsonl = write(tmp_path / "p.jsonl", "".join(json.dumps(r) + "\n" for r in rows))
    assert read_prompts(parquet(rows)) == read_prompts(jsonl)


def test_a_column_is_chosen_by_name(parquet):
    path = parquet([{"prompt": "no", "body": "yes"}, {"prompt": "no", "body": None}])
    (good,), bad = read_prompts(path, column="body")
    assert good.text == "yes" and list(bad) == [2]
    _, bad = read_prompts(path, column="nope")
    assert "no key 'nope'; the keys are 'prompt', 'body'" in bad[1]


def test_unreadable_files_name_the_remedy(tmp_path):
    text, table = write(tmp_path / "a.txt", "x"), write(tmp_path / "b.parquet", "this is no table")
    for path, options, words in (
        (tmp_path / "missing.txt", {}, "no such file"),
        (tmp_path, {}, "a folder, not a file"),
        (write(tmp_path / "prompts", "x"), {}, "rename the file"),
        (text, {"column": "c"}, "is a text file"),
        (table, {}, "not a Parquet file"),
    ):
        with pytest.raises(PromptError, match=words):
            read_prompts(path, **options)
