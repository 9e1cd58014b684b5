"""The compare job: heads against plain vLLM, for several tree sizes and dynamic trees.

The result is a JSON document; its wording is also here, because reports use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from vllm_medusa.config import OWN_TREE, EagleConfig, resolve_tree
from vllm_medusa.files import refuse_to_replace, write_json
from vllm_medusa.heads import HeadsError, peek_heads
from vllm_medusa.heads.eagle import drafter_method, inspect_eagle
from vllm_medusa.heads.files import read_json
from vllm_medusa.heads.fingerprint import config_sizes
from vllm_medusa.heads.provenance import provenance
from vllm_medusa.job import SILENT, Progress, plural
from vllm_medusa.offline.defaults import Length, measure, plan_engine
from vllm_medusa.offline.engine import EngineSettings, Sampling, medusa_config
from vllm_medusa.offline.in_turn import run_in_turn
from vllm_medusa.offline.machine import describe_machine, format_machine
from vllm_medusa.offline.options import CompareOptions
from vllm_medusa.offline.process import EngineProcess
from vllm_medusa.offline.prompts import Prompt, load_prompts

AUTOMATIC = "automatic"  # dynamic trees of automatic size
COLUMNS = ("draft nodes", "tau", "steps", "ratio", "min-max", "tokens identical")
_MIN_PROMPTS = 6  # min prompts to measure on


@dataclass(frozen=True)
class Comparison:
    """Measurements; ``document`` is the output as plain JSON."""

    document: dict[str, Any]

    @property
    def passed(self) -> bool:
        """Whether no token differs in float32; in other dtypes near-ties may differ."""
        identical = all(row["identical"] for row in all_rows(self.document))
        return identical or self.document["dtype"] != "float32"


def compare(
    options: CompareOptions, progress: Progress = SILENT, command: Sequence[str] = ()
) -> Comparison:
    """Measure each budget of the heads' tree, and dynamic trees, against plain vLLM.

    All are compared with the same plain engine; the figures are written.

    Raises:
        PromptError: no usable prompts, or bad lines without ``skip``.
        HeadsError: the heads are unreadable, or their width is not the target's.
        MedusaConfigError: the tree doesn't fit the heads.
        FileRefused: the output has other contents than figures.
        EngineRefused: vLLM or the plugin refuses to start.
        JobFailed: an engine died.

    """
    output = options.output
    if output is not None:
        refuse_to_replace(output, "figures", is_document)
    drafter = drafter_method(options.heads) is not None
    tree, budgets = (None, drafter_budgets(options)) if drafter else budgets_of(options)
    refuse_misfit(options.heads, options.target)
    prompts = prompts_of(options, progress)
    arms = len(budgets) + (not options.no_automatic)
    engine_args = plan_engine(
        options.target,
        positions(options, prompts),
        options.batch,
        options.max_model_len,
        dtype=options.dtype,
        engines=2,
    ).arguments
    engine_args |= options.engine_args
    names = ("target", "heads", "max_tokens", "temperature", "seed", "batch")
    document = {name: getattr(options, name) for name in names} | {
        "data": options.prompts.name,
        "budgets": budgets,
        "engine_args": engine_args,
        "machine": describe_machine(),
        "provenance": provenance(command, [options.prompts]),
    }
    sampling = Sampling(max_tokens=options.max_tokens, temperature=options.temperature)

    def start(name: str, speculation: dict[str, Any] | None) -> EngineProcess:
        progress.note(f"starting {name}")
        settings = EngineSettings(
            options.target, speculation, options.dtype, options.max_model_len, engine_args
        )
        return EngineProcess(settings, sampling)

    def beside(plain: EngineProcess, budget: int | None) -> dict[str, Any]:
        if drafter:  # it builds its own trees, up to the budget
            size = None if budget is None else str(budget)
            config = medusa_config(options.heads, options.tree, budget=size)
        else:
            config = medusa_config(options.heads, None, None, budget)
            if budget is not None:
                config["tree"] = tree or OWN_TREE
        done, groups = count(1), rounds * -(-len(prompts) // options.batch)
        name = "automatic trees" if budget is None else plural(budget, "draft node")
        what = f"plain and {name}, alternating"
        with start(f"vLLM with {name}", config) as medusa:
            measured = run_in_turn(
                plain,
                medusa,
                prompts,
                concurrency=options.batch,
                seed=options.seed,
                rounds=rounds,
                warm_up=True,
                progress=lambda: progress.at(what, next(done), groups),
            )
        row = {"num_draft_tokens": budget, **measured.figures()}
        progress.note(f"{name}: {row['ratio']:.2f} times plain vLLM's speed")
        return row

    with start("plain vLLM", None) as plain:
        rounds = options.rounds
        if options.seconds is not None:
            first = prompts[: options.batch]
            for _ in range(2):  # the first warms up
                results, seconds = plain.run(first, options.batch, options.seed)
            token = seconds / max(1, sum(result.num_tokens for result in results))
            turn = 2 * arms * options.max_tokens * token  # of both engines, in all arms
            number, rounds = affordable(options.seconds, turn, len(prompts), rounds)
            if (number, rounds) != (len(prompts), options.rounds):
                progress.note(
                    f"measuring {plural(rounds, 'round')} of {number} prompts, not "
                    f"{options.rounds} of {len(prompts)}, to take about {options.seconds:.0f} s"
                )
            prompts = prompts[:number]
        document |= {"prompts": len(prompts), "rounds": rounds}
        rows = [beside(plain, budget) for budget in budgets]
        automatic = None if options.no_automatic else beside(plain, None)
        document["dtype"] = plain.dtype
    best = max(rows, key=lambda row: (row["ratio"], -row["num_draft_tokens"]))
    document |= {"rows": rows, "fastest": best["num_draft_tokens"], AUTOMATIC: automatic}
    if output is not None:
        write_json(output, document)
    return Comparison(document)


def affordable(seconds: float, turn: float, prompts: int, rounds: int) -> tuple[int, int]:
    """Prompts and rounds that fit into a time limit, if a prompt takes ``turn`` seconds per round.

    Rounds are reduced first, to 2, then prompts, to `_MIN_PROMPTS`, and finally rounds.
    """
    turns = int(seconds / turn)
    rounds = min(rounds, max(2, turns // prompts))
    if turns // rounds < _MIN_PROMPTS:
        rounds = min(rounds, max(1, turns // _MIN_PROMPTS))
    return min(prompts, max(_MIN_PROMPTS, turns // rounds)), rounds


def refuse_misfit(heads: str, target: str) -> None:
    """Refuse heads of another hidden size before plain vLLM is started.

    Raises HeadsError: the target is a folder whose hidden size differs from that of the heads or
    drafter.
    """
    config = Path(target) / "config.json"
    if not config.is_file():
        return  # on the hub: downloaded by vLLM
    needed = config_sizes(read_json(config))["hidden_size"]
    if drafter_method(heads) is not None:
        found = inspect_eagle(heads).target_hidden_size
    else:
        found = peek_heads(heads).hidden_size
    if needed not in (None, found):
        raise HeadsError(
            f"{heads} is for targets of hidden size {found}, but {target} has {needed}. Use the "
            "target that it was trained with, or heads trained for this target"
        )


def budgets_of(options: CompareOptions) -> tuple[list[list[int]] | None, list[int]]:
    """The requested tree (None: the heads' own) and its possible budgets, ascending."""
    info = peek_heads(options.heads)
    wanted = medusa_config(None, options.tree).get("tree")
    tree = resolve_tree(wanted, info.tree, info.num_heads, info.draft_vocab_size)
    budgets = sorted({min(budget, tree.num_draft_tokens) for budget in options.budgets})
    return (None if wanted is None else tree.to_lists()), budgets


def drafter_budgets(options: CompareOptions) -> list[int]:
    """The budgets that an EAGLE drafter's trees allow, ascending."""
    config = medusa_config(options.heads, options.tree)
    del config["method"]
    maximum = EagleConfig.from_speculative_config(config).grown.num_draft_tokens
    return sorted({min(budget, maximum) for budget in options.budgets})


def positions(options: CompareOptions, prompts: Sequence[Prompt]) -> list[int]:
    """Number of positions of each prompt with its answers; refused prompts are omitted."""
    from transformers import AutoTokenizer

    measured = measure(prompts, AutoTokenizer.from_pretrained(options.target))
    return [each.positions(options.max_tokens) for each in measured if isinstance(each, Length)]


def prompts_of(options: CompareOptions, progress: Progress = SILENT) -> list[Prompt]:
    """The first prompts of the file, or the first distinct prompts of records."""
    prompts = load_prompts(options.prompts, on_bad_line=options.on_bad_line, progress=progress)
    distinct = {prompt.token_ids or prompt.index: prompt for prompt in reversed(prompts)}
    return sorted(distinct.values(), key=lambda prompt: prompt.index)[: options.limit]


def is_document(document: Mapping[str, Any]) -> bool:
    """Whether this is a document of this command."""
    keys = ("target", "heads", "budgets", "rows", "fastest")
    return all(key in document for key in keys)


def all_rows(document: dict[str, Any]) -> list[dict[str, Any]]:
    """All budgets, ascending, then automatic if it was measured."""
    automatic = document.get(AUTOMATIC)
    return [*document["rows"], *([automatic] if automatic else [])]


def setting(document: dict[str, Any]) -> str:
    """Describe the measurement."""
    mode = (
        f"temperature {document['temperature']:g}, seeded" if document["temperature"] else "greedy"
    )
    prompts, rounds = plural(document["prompts"], "prompt"), plural(document["rounds"], "round")
    return (
        f"{prompts} of {document['data']}, up to {document['max_tokens']} new tokens each, {mode}, "
        f"batch {document['batch']}; {rounds}, plain vLLM and vLLM with the heads alternating; "
        f"{format_machine(document['machine'])}."
    )


def cells(row: dict[str, Any]) -> list[str]:
    """A row's figures, in the order of `COLUMNS`."""
    budget = row["num_draft_tokens"]
    same = row["requests"] - row["differing_requests"]
    return [
        AUTOMATIC if budget is None else str(budget),
        "-" if row["tau"] is None else f"{row['tau']:.2f}",
        f"{row['plain_steps']} -> {row['steps']}",
        f"{row['ratio']:.2f}x",
        f"{min(row['ratios']):.2f}-{max(row['ratios']):.2f}",
        f"{same}/{row['requests']}",
    ]


def markdown(document: dict[str, Any]) -> list[str]:
    """The rows as lines of Markdown."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for row in all_rows(document):
        values = cells(row)
        if row["num_draft_tokens"] == document["fastest"]:
            values = [f"**{value}**" for value in values]
        lines.append(f"| {' | '.join(values)} |")
    return lines


def conclusion(document: dict[str, Any]) -> str:
    """Summarize token equality and the fastest budget, if any is faster."""
    rows = all_rows(document)
    different = sum(row["differing_requests"] for row in rows)
    requests = sum(row["requests"] for row in rows)
    if not different:
        said = [f"All tokens of {requests} requests equal plain vLLM's."]
    else:
        first = next(d for row in rows for d in row["differences"])
        said = [
            f"{different} of {requests} requests differ from plain vLLM's, the first "
            f"({first['request_id']}) at token {first['position']}."
        ]
        said.append(
            "This must not happen in float32: please report it."
            if document["dtype"] == "float32"
            else f"In {document['dtype']} the rounding of a product depends on the number of "
            "rows, also in plain vLLM, so near-ties may differ; use float32 to exclude them."
        )
    best = next(r for r in document["rows"] if r["num_draft_tokens"] == document["fastest"])
    size = plural(best["num_draft_tokens"], "draft node")
    if best["ratio"] > 1:
        said.append(f"Fastest on this machine: {size}, {best['ratio']:.2f} times plain vLLM.")
        if min(best["ratios"]) <= 1:
            said.append("Not every round was faster, so the gain is within the noise.")
    else:
        said.append(
            f"No tree is faster than plain vLLM on this machine: the best, {size}, reaches "
            f"{best['ratio']:.2f} times its throughput. Heads help if a step's time is spent "
            "loading weights: with larger targets, smaller batches, or more cores."
        )
    if automatic := document.get(AUTOMATIC):
        said.append(f"With automatic trees it is {automatic['ratio']:.2f} times plain vLLM.")
    return " ".join(said)
