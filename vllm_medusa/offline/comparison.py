"""The compare job: a drafter against plain vLLM, for several tree sizes and dynamic trees.

The result is a JSON document. The text that describes it is also written here, because reports of
`adapt` use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from vllm_medusa.config import DRAFTER_METHODS, OWN_TREE, MedusaConfig, resolve_tree
from vllm_medusa.files import refuse_to_replace, write_json
from vllm_medusa.heads.checkpoint import peek_heads
from vllm_medusa.heads.provenance import provenance
from vllm_medusa.job import SILENT, Progress, plural
from vllm_medusa.offline.defaults import measure, plan_engine, read_limits
from vllm_medusa.offline.engine import Sampling, check_drafter, medusa_config
from vllm_medusa.offline.in_turn import run_in_turn
from vllm_medusa.offline.machine import describe_machine, format_machine
from vllm_medusa.offline.options import CompareOptions, check_speculation
from vllm_medusa.offline.process import EngineProcess
from vllm_medusa.offline.prompts import Prompt, PromptError, load_prompts
from vllm_medusa.tree.dynamic import MOST_DRAFTS

AUTOMATIC = "automatic"  # dynamic trees of automatic size
_MIN_PROMPTS = 6  # min prompts to measure on


def compare(
    options: CompareOptions, progress: Progress = SILENT, command: Sequence[str] = ()
) -> dict[str, Any]:
    """Measure each fixed number of draft nodes, and the automatic one, against plain vLLM.

    All are compared with the same plain engine. Returns the figures, plain JSON, which are also
    written to ``options.output``.
    """
    output = options.output
    if output is not None:
        names = {"target", "heads", "budgets", "rows", "fastest"}
        refuse_to_replace(output, "figures", lambda found: names <= found.keys())
    configs = speculation(options)
    largest = max(budget for budget in configs if budget is not None)
    if largest < max(options.budgets):
        progress.note(f"the tree has {plural(largest, 'draft node')}, so no more are measured")
    prompts, positions = answerable(options, prompts_of(options, progress), progress)
    if len(prompts) < options.batch:
        progress.warn(f"{plural(len(prompts), 'prompt')} can't fill a batch of {options.batch}")
    plan = plan_engine(
        options.target,
        positions,
        options.batch,
        options.max_model_len,
        dtype=options.dtype,
        engines=2,
    )
    engine_args = {
        "dtype": options.dtype,
        "max_model_len": options.max_model_len,
        **plan.arguments,
        **options.engine_args,
    }
    settings = ("target", "heads", "max_tokens", "temperature", "seed", "batch")
    document = {name: getattr(options, name) for name in settings} | {
        "data": options.prompts.name,
        "budgets": [budget for budget in configs if budget is not None],
        "engine_args": engine_args,
        "machine": describe_machine(),
        "provenance": provenance(command, [options.prompts]),
    }

    def start(name: str, config: dict[str, Any] | None) -> EngineProcess:
        progress.note(f"starting {name}")
        return EngineProcess(
            {"model": options.target, "speculative_config": config, **engine_args},
            Sampling(max_tokens=options.max_tokens, temperature=options.temperature),
        )

    rows = []
    with start("plain vLLM", None) as plain:
        rounds = options.rounds
        if options.seconds is not None:
            for _ in range(2):  # the first warms up
                results, seconds = plain.run(prompts[: options.batch], options.batch, options.seed)
            token = seconds / max(1, sum(result.num_tokens for result in results))
            turn = 2 * len(configs) * options.max_tokens * token  # both engines, all configs
            minimum = max(_MIN_PROMPTS, options.batch)
            number, rounds = affordable(options.seconds, turn, len(prompts), rounds, minimum)
            if (number, rounds) != (len(prompts), options.rounds):
                progress.note(
                    f"measuring {plural(rounds, 'round')} of {number} prompts instead of "
                    f"{options.rounds} of {len(prompts)}, to finish in about "
                    f"{options.seconds:.0f} s"
                )
            prompts = prompts[:number]
        for budget, config in configs.items():
            name = "automatic trees" if budget is None else plural(budget, "draft node")
            with start(f"vLLM with {name}", config) as medusa:
                _, measured = run_in_turn(
                    [plain, medusa],
                    prompts,
                    concurrency=options.batch,
                    seed=options.seed,
                    rounds=rounds,
                    warm_up=True,
                    progress=partial(progress.at, f"plain and {name} alternately"),
                )
            rows.append({"num_draft_tokens": budget, **measured.figures()})
            progress.note(f"{name}: {rows[-1]['ratio']:.2f}x plain vLLM's throughput")
        document |= {"prompts": len(prompts), "rounds": rounds, "dtype": plain.dtype}
    document[AUTOMATIC] = rows.pop()
    best = max(rows, key=lambda row: (row["ratio"], -row["num_draft_tokens"]))
    document |= {"rows": rows, "fastest": best["num_draft_tokens"]}
    if output is not None:
        write_json(output, document)
    return document


def affordable(
    seconds: float, turn: float, prompts: int, rounds: int, minimum: int
) -> tuple[int, int]:
    """Prompts and rounds that fit into a time limit, if a prompt takes ``turn`` seconds per round.

    Rounds are reduced first, to 2, then prompts, to ``minimum``, and finally rounds.
    """
    turns = int(seconds / turn)
    rounds = min(rounds, max(2, turns // prompts))
    if turns // rounds < minimum:
        rounds = min(rounds, max(1, turns // minimum))
    return min(prompts, max(minimum, turns // rounds)), rounds


def speculation(options: CompareOptions) -> dict[int | None, dict[str, Any]]:
    """The ``speculative_config`` of each possible budget, ascending; None: automatic."""
    config = medusa_config(options.heads, options.speculative_config)
    static, size = config, "budget"
    if "tree" in config and config["method"] in DRAFTER_METHODS:  # it builds its trees itself
        drafted = DRAFTER_METHODS[config["method"]].from_speculative_config(config).dynamic_tree
        maximum = drafted.num_draft_tokens
    elif config["method"] == "medusa" and options.heads is None and config.get("lookup"):
        given = MedusaConfig.from_speculative_config(config).num_speculative_tokens
        maximum = given or MOST_DRAFTS
    elif config["method"] != "medusa" or options.heads is None:
        raise ValueError(
            f"the speculative config is {config}, which can't be measured here. Pass HEADS, "
            'or --speculative-config \'{"method": "mtp", "tree": "dynamic"}\' or '
            "'{\"lookup\": true}' without HEADS."
        )
    else:
        info, wanted = peek_heads(options.heads), config.pop("tree", None)
        tree = resolve_tree(wanted, info.tree, info.num_heads, info.draft_vocab_size)
        maximum, size = tree.num_draft_tokens, "num_speculative_tokens"
        static = config | {"tree": OWN_TREE if wanted is None else tree.to_lists()}
    budgets = sorted({min(budget, maximum) for budget in options.budgets})
    found: dict[int | None, dict[str, Any]] = {n: static | {size: n} for n in budgets}
    found[None] = config
    for each in found.values():
        check_speculation(each)
    check_drafter({"model": options.target, "speculative_config": config, **options.engine_args})
    return found


def answerable(
    options: CompareOptions, prompts: Sequence[Prompt], progress: Progress
) -> tuple[list[Prompt], list[int]]:
    """Prompts that the target can answer, and the number of positions of each with its answers.

    The other prompts are bad lines.
    """
    given = {"max_model_len": options.max_model_len} | options.engine_args
    limits = read_limits(options.target, given)
    lengths = measure(options.prompts, prompts, *limits, options.on_bad_line, progress)
    if not lengths:
        raise PromptError(f"{options.prompts}: no prompts left; pass others.")
    kept = [prompt for prompt in prompts if prompt.line in lengths]
    return kept, [length.positions(options.max_tokens) for length in lengths.values()]


def prompts_of(options: CompareOptions, progress: Progress = SILENT) -> list[Prompt]:
    """The first prompts of the file, or the first distinct prompts of records."""
    prompts = load_prompts(options.prompts, on_bad_line=options.on_bad_line, progress=progress)
    distinct = {prompt.token_ids or prompt.index: prompt for prompt in reversed(prompts)}
    return sorted(distinct.values(), key=lambda prompt: prompt.index)[: options.limit]


def passed(document: dict[str, Any]) -> bool:
    """Whether no token differs in float32; in other dtypes near-ties may differ."""
    identical = all(row["identical"] for row in all_rows(document))
    return identical or document["dtype"] != "float32"


def all_rows(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of all budgets, ascending, then that of automatic trees."""
    return [*document["rows"], document[AUTOMATIC]]


def setting(document: dict[str, Any]) -> str:
    """Describe the measurement."""
    temperature = document["temperature"]
    mode = f"temperature {temperature:g}, seeded" if temperature else "greedy"
    prompts, rounds = plural(document["prompts"], "prompt"), plural(document["rounds"], "round")
    return (
        f"{prompts} of {document['data']}, up to {document['max_tokens']} new tokens each, {mode}, "
        f"batch {document['batch']}, {document['dtype']}; {rounds}, plain vLLM and vLLM with "
        f"drafts alternating; {format_machine(document['machine'])}."
    )


def markdown(document: dict[str, Any]) -> list[str]:
    """The rows as lines of Markdown; the fastest is bold."""
    columns = ("draft nodes", "tau", "steps", "ratio", "min-max", "tokens identical")
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    fastest = max(row["ratio"] for row in all_rows(document))
    for row in all_rows(document):
        budget, mark = row["num_draft_tokens"], "**" if row["ratio"] == fastest else ""
        cells = (
            AUTOMATIC if budget is None else str(budget),
            "-" if row["tau"] is None else f"{row['tau']:.2f}",
            f"{row['plain_steps']} -> {row['steps']}",
            f"{row['ratio']:.2f}x",
            f"{min(row['ratios']):.2f}-{max(row['ratios']):.2f}",
            f"{row['requests'] - row['differing_requests']}/{row['requests']}",
        )
        lines.append(f"| {' | '.join(f'{mark}{cell}{mark}' for cell in cells)} |")
    return lines


def conclusion(document: dict[str, Any]) -> list[str]:
    """Sentences about token equality and the fastest budget, if any is faster."""
    rows, dtype = all_rows(document), document["dtype"]
    different, requests = (sum(row[n] for row in rows) for n in ("differing_requests", "requests"))
    said = [f"All tokens of {requests} requests equal plain vLLM's."]
    if different:
        first = next(each for row in rows for each in row["differences"])
        said = [
            f"{different} of {requests} requests differ from plain vLLM's, the first "
            f"({first['request_id']}) at token {first['position']}: "
        ]
        said[0] += (
            "this must not happen in float32, please report it."
            if dtype == "float32"
            else f"expected in {dtype}, whose rounding depends on the number of rows of a step, in "
            "plain vLLM too."
        )
    automatic, machine = document[AUTOMATIC], document["machine"]
    default = f"Automatic trees (the default) run at {automatic['ratio']:.2f}x plain vLLM's speed"
    best = next(r for r in document["rows"] if r["num_draft_tokens"] == document["fastest"])
    if automatic["ratio"] > 1:
        said.append(f"{default}: worth using.")
        if min(automatic["ratios"]) <= 1:
            said.append("Not every round was faster, so the gain is within the noise.")
    elif best["ratio"] > 1:
        said.append(f"{default}; a fixed number is faster.")
    else:
        said.append(
            f"{default}: not worth using on this machine. Drafts help if most of a step's time is "
            "spent loading weights: with larger targets, smaller batches or more cores."
        )
    size = plural(best["num_draft_tokens"], "draft node")
    said.append(f"The fastest fixed number, {size}, gives {best['ratio']:.2f}x.")
    if len(automatic["ratios"]) == 1 or (machine["load_average_at_start"] > machine["cores"]):
        said.append(
            f"This is {plural(len(automatic['ratios']), 'round')} on {machine['cores']} cores with "
            f"a load average of {machine['load_average_at_start']:.1f} at the start: repeat "
            "`vllm-medusa compare` with several rounds on an idle machine before you rely on it."
        )
    if document["engine_args"].get("enforce_eager"):
        said.append(
            "Both engines ran eagerly (enforce_eager); compiled, as by default, ratios may differ."
        )
    return said
