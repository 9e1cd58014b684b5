"""`vllm-medusa serve` as started by a user, with the official `openai` client."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from support.assets import HEADS, TARGET, code_texts, tokenizer
from support.engine_process import of_session
from support.engines import engine
from vllm import SamplingParams

from vllm_medusa.cli import serve

pytestmark = pytest.mark.engine

TEMPLATE = "<s>{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
CHATS = [
    [{"role": "user", "content": "A function that adds two numbers."}],
    [
        {"role": "system", "content": "Python code only."},
        {"role": "user", "content": "Read a file and count its lines."},
    ],
]
TOKENS = 48
NODES = 7
START_UP_S = 600
EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True)
class Answer:
    text: str
    finish_reason: str | None
    tokens: int


def prompts() -> list[str]:
    return code_texts(22, 26)


def rendered(chat: list[dict[str, str]]) -> str:
    return "<s>" + "".join(f"# {m['role']}: {m['content']}\n" for m in chat)


@pytest.fixture(scope="module")
def offline() -> dict[str, list[Answer]]:
    """Plain vLLM's answers, without server and heads."""

    def answers(llm: Any, texts: list[str], **options: Any) -> list[Answer]:
        ids = [{"prompt_token_ids": tokenizer().encode(text)} for text in texts]
        params = SamplingParams(max_tokens=TOKENS, **options)
        outputs = [output.outputs[0] for output in llm.generate(ids, params, use_tqdm=False)]
        return [Answer(o.text, o.finish_reason, len(o.token_ids)) for o in outputs]

    with engine(TARGET, skip_tokenizer_init=False) as llm:
        return {
            "chat": answers(llm, [rendered(chat) for chat in CHATS], temperature=0.0),
            "greedy": answers(llm, prompts(), temperature=0.0),
        }


@dataclass(frozen=True)
class Server:
    url: str
    client: Any
    process: psutil.Popen

    def metric(self, name: str) -> list[float]:
        """The values of a metric, one per label set."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as reply:
            text = reply.read().decode()
        found = re.findall(rf"^vllm:{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
        assert found, f"no metric {name}"
        return list(map(float, found))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def arguments(port: int, folder: Path) -> list[str]:
    (folder / "chat.jinja").write_text(TEMPLATE)
    return [
        TARGET, "--speculative-model", HEADS,
        "--speculative-config", json.dumps({"budget": NODES}),
        "--served-model-name", "demo", "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024",
        "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(64 << 20),
        "--chat-template", str(folder / "chat.jinja"),
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
        "--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}',
    ]  # fmt: skip


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    port = free_port()
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    # by default idle connections close after 5 s, even if a client is just about to reuse one
    environment["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] = "600"
    command = [sys.executable, "-m", "vllm_medusa.cli", "serve", *arguments(port, folder)]
    with (folder / "log").open("wb") as log:
        process = psutil.Popen(
            command, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_up(process, url, folder / "log")
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=600, max_retries=0)
        yield Server(url, client, process)
    finally:
        stop_group(process)


@pytest.fixture(scope="module")
def server(offline: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server")) as server:
        yield server


def wait_until_up(process: psutil.Popen, url: str, log: Path) -> None:
    end = time.monotonic() + START_UP_S
    while time.monotonic() < end:
        assert process.poll() is None, f"the server ended:\n{log.read_text()[-4000:]}"
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"not up after {START_UP_S} s:\n{log.read_text()[-4000:]}")


def stop_group(process: psutil.Popen) -> None:
    """End the server, then the remaining processes of its group."""
    with suppress(psutil.Error):
        process.terminate()
        process.wait(60)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # it is a session leader
    process.wait(60)


def test_streamed_chat(server: Server, offline: dict[str, list[Answer]]) -> None:
    for chat, expected in zip(CHATS, offline["chat"], strict=True):
        stream = server.client.chat.completions.create(
            model="demo", messages=chat, temperature=0, max_tokens=TOKENS, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        chunks = list(stream)
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
        text = "".join(choice.delta.content or "" for choice in choices)
        usage = chunks[-1].usage
        assert Answer(text, choices[-1].finish_reason, usage.completion_tokens) == expected
        # on a busy machine, vLLM merges the tokens of many steps in a chunk: not those of 700
        long = server.client.chat.completions.create(
            model="demo", messages=chat, temperature=0, max_tokens=700, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        parts = [chunk.choices[0].delta.content for chunk in long if chunk.choices]
        assert sum(map(bool, parts)) > 1 and "".join(filter(None, parts)).startswith(text[:40])


def test_completions(server: Server, offline: dict[str, list[Answer]]) -> None:
    """All prompts in one call."""
    reply = server.client.completions.create(
        model="demo", prompt=prompts(), temperature=0, max_tokens=TOKENS
    )
    expected = offline["greedy"]
    assert [(c.text, c.finish_reason) for c in sorted(reply.choices, key=lambda c: c.index)] == [
        (answer.text, answer.finish_reason) for answer in expected
    ]
    assert reply.usage.completion_tokens == sum(answer.tokens for answer in expected)


def test_a_bad_request_gets_a_400_and_the_server_continues(
    server: Server, offline: dict[str, list[Answer]]
) -> None:
    with pytest.raises(openai.BadRequestError, match="min_p"):
        server.client.completions.create(
            model="demo", prompt="def", temperature=1, extra_body={"min_p": 0.2}
        )
    test_completions(server, offline)


def test_request_options_as_text(server: Server) -> None:
    """Typical acceptance for one request; nested dicts are not possible here."""

    def ask(options: str) -> str:
        return (
            server.client.completions.create(
                model="demo",
                prompt=prompts()[0],
                temperature=0,
                max_tokens=TOKENS,
                extra_body={"vllm_xargs": {"medusa": options}},
            )
            .choices[0]
            .text
        )

    assert ask('{"acceptance": "typical", "epsilon": 0.2}') == ask("lossless")
    with pytest.raises(openai.BadRequestError, match="typcal"):
        ask("typcal")


def test_tool_calls(server: Server) -> None:
    """A forced tool call follows the schema, streamed or not, and is drafted."""
    fields = {
        "city": {"type": "string", "enum": ["Paris", "Berlin", "San Francisco"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    }
    schema = {"type": "object", "properties": fields, "required": list(fields)}
    parameters = schema | {"additionalProperties": False}
    function = {"name": "weather", "strict": True, "parameters": parameters}
    given = {
        "model": "demo", "messages": CHATS[0], "temperature": 0, "max_tokens": 120,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    }  # fmt: skip
    before = server.metric("spec_decode_num_accepted_tokens_total")[0]
    reply = server.client.chat.completions.create(**given)
    assert reply.choices[0].message.tool_calls, reply
    [call] = reply.choices[0].message.tool_calls
    chunks = server.client.chat.completions.create(**given, stream=True)
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or []]
    streamed = "".join(part.function.arguments or "" for part in parts)
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "weather" and arguments == json.loads(streamed)
    assert arguments["city"] in fields["city"]["enum"] and arguments["days"] in range(1, 8)
    tokens = reply.usage.completion_tokens
    accepted = server.metric("spec_decode_num_accepted_tokens_total")[0] - before
    assert accepted > tokens / 2  # of two answers; most tokens are forced by the schema


def test_examples(server: Server, tmp_path: Path) -> None:
    def example(name: str, *arguments: str) -> str:
        command = [sys.executable, str(EXAMPLES / name), "--base-url", f"{server.url}/v1"]
        given = [*command, "--max-tokens", "12", *arguments]
        return subprocess.run(given, check=True, capture_output=True, text=True, timeout=120).stdout

    lines = [*({"prompt": text} for text in prompts()[:2]), {"messages": CHATS[1]}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    names = ("spec_decode_num_drafts_total", "medusa_step_requests_total")
    before = [server.metric(name)[0] for name in names]
    said = example("server_gain.py", str(tmp_path / "prompts.jsonl"), "--rounds", "1")
    drafts, steps = (server.metric(name)[0] - old for name, old in zip(names, before, strict=True))
    assert 0 < drafts < steps / 2  # half of the tokens are decoded without drafts
    assert "round 1: " in said and "x with drafts (median of 1" in said
    assert "3 of 3 answers of the last round are the same text" in said
    assert "--- chat" in example("openai_client.py")


def test_metrics_count_drafts(server: Server) -> None:
    """All are recorded in a process other than the server's."""
    names = (
        *(f"spec_decode_num_{name}" for name in ("drafts", "draft_tokens", "accepted_tokens")),
        *("spec_decode_num_accepted_tokens_per_pos", "medusa_steps", "medusa_nodes"),
    )
    before = [server.metric(f"{name}_total") for name in names]
    server.client.completions.create(model="demo", prompt=prompts()[0], max_tokens=30, seed=1)
    [drafts], [tokens], [accepted], per_depth, [tree, prefill, heads, plain], [nodes] = (
        [new - old for new, old in zip(server.metric(f"{name}_total"), values, strict=True)]
        for name, values in zip(names, before, strict=True)
    )
    assert 0 < drafts < 30 and 0 < accepted <= 30
    assert len(per_depth) == 5  # the number of heads, and so of depths
    assert sum(per_depth) == accepted and per_depth == sorted(per_depth, reverse=True)
    assert 4 * drafts < tokens <= NODES * drafts and nodes == tokens
    assert (tree, prefill, plain) == (drafts, 1, 0) and heads <= 1  # whose drafts end the text
    assert server.metric("medusa_budget_nodes") == [0]  # no drafts are needed for the last tokens


def idle(server: Server) -> bool:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        if not sum(server.metric("num_requests_running") + server.metric("num_requests_waiting")):
            return True
        time.sleep(0.2)
    return False


def stream_of_many(server: Server, prompt: str) -> Any:
    return server.client.completions.create(
        model="demo", prompt=prompt, temperature=0, max_tokens=900, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip


def test_64_concurrent_clients(server: Server, offline: dict[str, list[Answer]]) -> None:
    """Some clients disconnect, some requests are invalid; the others get plain vLLM's answers."""
    texts, expected = prompts(), offline["greedy"]

    def ask(number: int) -> bool:
        at = number % len(texts)
        if number % 8 == 3:
            with stream_of_many(server, texts[at]) as stream:
                return bool(next(iter(stream)).choices)
        if number % 8 == 5:
            with pytest.raises(openai.BadRequestError):
                server.client.completions.create(model="demo", prompt="x", temperature=-1)
            return True
        reply = server.client.completions.create(
            model="demo", prompt=texts[at], temperature=0, max_tokens=12
        )
        return expected[at].text.startswith(reply.choices[0].text or "nothing")

    with ThreadPoolExecutor(64) as clients:
        assert all(clients.map(ask, range(64)))
    assert idle(server), "requests of disconnected clients are still running"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"budget": "x"}, "budget is 'x'; use \"auto\""),
        ({"tree": "x"}, "no preset or file 'x'"),
        ({"method": "ngram"}, "--speculative-config['method'] = 'ngram'"),
    ],
)
def test_refusals_have_no_traceback(
    given: dict[str, str], words: str, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        config = json.dumps(given)
        flags = ["--speculative-model", HEADS, "--speculative-config", config, "--port", "0"]
        assert serve.run([TARGET, *flags]) == 2
    finally:
        signal.signal(signal.SIGTERM, handler)
    said = capfd.readouterr().err
    assert "vllm-medusa serve: error: " in said and words in said
    assert "Traceback" not in said


def test_a_killed_engine_ends_all(tmp_path: Path) -> None:
    """During streams: open requests fail, the server exits with a status, no process remains."""
    with serving(tmp_path) as server:
        engine = max(server.process.children(), key=lambda child: child.memory_info().rss)
        streams = [iter(stream_of_many(server, prompts()[0]))]
        next(streams[0])
        engine.suspend()  # otherwise streams may end before the last starts, as the first may
        streams += [iter(stream_of_many(server, prompt)) for prompt in prompts()[1:]]
        # A worker that read a message within 1 s can hang on exit: two threads then send on one
        # ZeroMQ socket (vllm/distributed/device_communicators/shm_broadcast.py, SpinCondition).
        time.sleep(2)
        engine.kill()
        with suppress(openai.APIError):
            for _ in streams[0]:
                pass
        for stream in streams[1:]:
            with pytest.raises(openai.APIError, match="EngineCore encountered an issue"):
                for _ in stream:
                    pass
        with pytest.raises(openai.APIError, match=r"EngineCore|Connection"):  # ends immediately
            server.client.completions.create(model="demo", prompt="def")
        assert server.process.wait(120) == 1
        assert psutil.wait_procs(of_session(server.process.pid), timeout=120)[1] == []


def test_sigterm_amid_streams_ends_all(server: Server) -> None:
    """The last test: it ends the server and its engine."""
    family = [server.process, *server.process.children(recursive=True)]
    assert len(family) > 1
    streams = [iter(stream_of_many(server, prompt)) for prompt in prompts()]
    for stream in streams:
        next(stream)
    server.process.terminate()
    for stream in streams:  # a clean end or an error, without hanging
        with suppress(openai.APIError, httpx.HTTPError):
            for _ in stream:
                pass
    _, alive = psutil.wait_procs(family, timeout=120)
    assert [each for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{server.url}/health", timeout=5)
