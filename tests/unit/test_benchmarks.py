"""`python -m benchmarks`: rows are written immediately, only with a right result; --base."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import peers_setup, runner
from benchmarks.case import Row, attempt
from vllm_medusa.job import JobFailed

ROOT = Path(__file__).parents[2]
FAKE = """
from pathlib import Path

import vllm_medusa
from benchmarks.case import Case, Plot, Row, attempt
from vllm_medusa.options import Options, Positive, option


class FakeOptions(Options):
    count: Positive = option("rows", default=3)


def run(options, progress):
    for number in range(options.count):
        def measure():
            if number == 1:
                raise ValueError("config.json has no | hidden_size")
            return Row(what, {"ms": 1.5, "file": vllm_medusa.__file__}, right=True)
        what = {"name": f"arm {number}"}
        yield attempt(what, measure)


CASE = Case(
    FakeOptions, run, {"name": ("arm", ""), "ms": ("ms", ".2f")}, {"count": 1}, Plot("ms", ("ms",))
)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    (tmp_path / "fake_case.py").write_text(FAKE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield "fake_case"
    sys.modules.pop("fake_case", None)


def test_help_lists_the_cases_without_loading_them():
    code = """
import sys
from benchmarks.runner import main
try:
    main(["--help"])
finally:
    print(sorted({"torch", "vllm", "transformers"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.strip().endswith("[]"), done.stdout + done.stderr
    for name in runner.CASES:
        assert f"\n  {name} " in done.stdout


@pytest.mark.parametrize("name", runner.CASES)
def test_every_case_is_registered_and_has_a_quick_form(name, capsys):
    case = runner.load(name)
    assert case.quick.keys() <= case.options.__dataclass_fields__.keys()
    with pytest.raises(SystemExit) as ended:
        runner.main([name, "--help"])
    assert ended.value.code == 0 and f"options of {name}:" in capsys.readouterr().out


def test_a_number_requires_a_correct_result():
    """Negative control: measurements without a right result are not reported."""
    for row in (
        Row({"name": "a"}, {"ratio": 2.0}),
        Row({"name": "a"}, {"ratio": 2.0}, failed="3 answers differ"),
        Row({"name": "a"}, {"ratio": 2.0}, right=True, failed="3 answers differ"),
        Row({"name": "a"}, {"ratio": 2.0}, right=True, note="no baseline"),
    ):
        assert "ratio" not in row.to_dict()
    assert Row({"name": "a"}, {"ratio": 2.0}, right=True).to_dict() == {"name": "a", "ratio": 2.0}
    failed = attempt({"name": "a"}, lambda: Row({}, {"x": 1 / 0}))
    assert failed.to_dict() == {"name": "a", "failed": "ZeroDivisionError: division by zero"}


def test_a_failed_arm_is_reported_and_the_others_continue(fake, tmp_path, capsys):
    file = tmp_path / "results" / "found.json"
    assert runner.main([fake, "--json", str(file)]) == 1
    document = json.loads(file.read_text())
    assert [row["name"] for row in document["cases"][fake]["rows"]] == ["arm 0", "arm 1", "arm 2"]
    assert document["cases"][fake]["options"] == {"count": 3}
    assert document["machine"]["commit"] and document["command"].startswith("python -m benchmarks ")
    text = capsys.readouterr().out
    assert "| arm 0 | 1.50 |  |" in text and "| arm 2 | 1.50 |  |" in text
    assert "| arm 1 | - | FAILED: ValueError: config.json has no / hidden_size |" in text
    assert file.with_suffix(".md").read_text() == text
    assert file.with_suffix(".png").stat().st_size > 1000


def test_rows_are_written_immediately(fake, tmp_path, monkeypatch):
    file, seen = tmp_path / "found.json", []
    written = runner.write_json
    monkeypatch.setattr(
        runner, "write_json", lambda *a: (written(*a), seen.append(json.loads(file.read_text())))
    )
    runner.main([fake, "--json", str(file)])
    assert [len(document["cases"][fake]["rows"]) for document in seen] == [1, 2, 3]


def test_earlier_rows_are_kept(fake, tmp_path, capsys):
    path = tmp_path / "rows.json"
    runner.main([fake, "--json", str(path)])
    kept = json.loads(path.read_text())
    rows = kept["cases"][fake]["rows"]
    rows[2]["ms"] = 2.5
    failed = {"name": "arm 0, batch 4", "arm": "arm 0", "failed": "out of memory"}
    rows.insert(0, failed)  # replaced by any new row of its arm
    path.write_text(json.dumps(kept))
    assert runner.main([fake, "--count", "1", "--json", str(path), "--add"]) == 1
    document = json.loads(path.read_text())
    rows = {row["name"]: row for row in document["cases"][fake]["rows"]}
    assert list(rows) == ["arm 1", "arm 2", "arm 0"] and rows["arm 2"]["ms"] == 2.5
    assert "hidden_size" in rows["arm 1"]["failed"]
    assert document["command"].count("python -m benchmarks") == 2
    document["machine"]["commit"] = "another"
    path.write_text(json.dumps(document))
    with pytest.raises(SystemExit):
        runner.main([fake, "--json", str(path), "--add"])
    assert "was measured with commit another" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [(["nothing"], "use one of speed"), ([], "is required"), (["fake_case", "--count", "0"], "0")],
)
def test_invalid_arguments_are_refused(fake, words, reason, capsys):
    try:
        status = runner.main(words)
    except SystemExit as ended:
        status = ended.code
    assert status == 2 and reason in capsys.readouterr().err


def test_two_commits_are_measured_alternately(fake, tmp_path, capsys):
    file = tmp_path / "found.json"
    assert runner.main([fake, "--quick", "--base", "HEAD", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["cases"][fake]["rows"]
    turns = [("HEAD", 1), ("this", 1), ("HEAD", 2), ("this", 2)]
    assert [(row["of_commit"], row["turn"]) for row in rows] == turns
    ours = str(ROOT / "vllm_medusa")
    assert [row["file"].startswith(ours) for row in rows] == [False, True, False, True]
    assert "| HEAD | 1 | arm 0 | 1.50 |" in capsys.readouterr().out
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "worktree", "list"], capture_output=True, text=True, check=True
    )
    assert os.path.dirname(os.path.dirname(rows[0]["file"])) not in listed.stdout


def test_a_peer_that_hangs_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(peers_setup, "_MAX_SECONDS", 0.2)
    (tmp_path / "log").write_text("loading")
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with (
        subprocess.Popen(command, text=True, **pipes) as process,
        pytest.raises(JobFailed, match=r"no answer within 0.2 s; the end of its log:\nloading"),
    ):
        peers_setup.Worker(process, tmp_path / "log", {"eos": []})
