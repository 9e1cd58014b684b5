"""Whether heads or a drafter fit a target and are consistent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from vllm_medusa.heads.formats import TOKEN_MAP
from vllm_medusa.heads.model import HeadsError

if TYPE_CHECKING:
    from vllm_medusa.heads.checkpoint import HeadsInfo

Verdict = Literal["fits", "does not fit", "unknown"]
NO: Verdict = "does not fit"


@dataclass(frozen=True)
class Check:
    """One check, with its result."""

    name: str
    verdict: Verdict
    text: str


@dataclass(frozen=True)
class Inspected:
    """The state of a checkpoint."""

    source: str
    checks: list[Check]
    damage: list[str]  # a damaged checkpoint can't be loaded

    @property
    def fits(self) -> bool:
        """Whether no problem is known."""
        return not self.damage and all(check.verdict != NO for check in self.checks)


def compare(name: str, found: int, needed: int | None) -> Check:
    """Check a size against the target's; None: unknown."""
    verdict: Verdict = "unknown" if needed is None else "fits" if found == needed else NO
    return Check(name, verdict, f"{found}; the target has {needed}")


def fits(info: HeadsInfo, hidden_size: int | None, vocab_size: int | None) -> list[Check]:
    """Check heads against a target of these sizes; None: unknown. Reads the token map."""
    return [
        compare("hidden size", info.hidden_size, hidden_size),
        Check("vocabulary", *_vocabulary(info, vocab_size)),
    ]


def require_fit(info: HeadsInfo, hidden_size: int | None, vocab_size: int | None) -> None:
    """Raise `HeadsError` for heads that can't be used with a target of these sizes."""
    for check in fits(info, hidden_size, vocab_size):
        if check.verdict == NO:
            raise HeadsError(
                f"The heads in {info.files.label} do not fit the target: {check.name} "
                f"{check.text}. Use the target that they were trained on, or heads trained for "
                "this one."
            )


def _vocabulary(info: HeadsInfo, vocab: int | None) -> tuple[Verdict, str]:
    if vocab is None:
        return "unknown", "the target's config does not have its size"
    rows, mapped = info.lm_head_rows, info.read_token_map()
    if info.vocab_size not in (None, vocab):
        hint = f' (padding rows need a "vocab_size" of {vocab} in config.json)' if rows else ""
        return NO, f"{info.vocab_size} tokens; the target has {vocab}{hint}"
    if mapped is None:
        padding = f" and {rows - vocab} padding rows" if rows and rows > vocab else ""
        return "fits", f"{vocab} tokens, as in the target{padding}"
    bad = mapped[(mapped < 0) | (mapped >= vocab)]
    name = info.names[TOKEN_MAP]
    if bad.numel():
        return NO, f"{name!r} holds token id {int(bad[0])}; the target's ids are 0 to {vocab - 1}"
    if mapped.unique().numel() != mapped.numel():
        return NO, f"{name!r} has a duplicate token"
    if rows not in (None, len(mapped), vocab) and not (rows > vocab == info.vocab_size):
        return NO, f"{name!r} has {len(mapped)} tokens, but the LM heads score {rows}"
    return "fits", f"{len(mapped)} of the target's {vocab} tokens"
