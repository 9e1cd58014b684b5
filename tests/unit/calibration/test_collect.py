import numpy as np
import pytest
import torch

from vllm_medusa.calibration import CalibrationError
from vllm_medusa.calibration.collect import FOLDER, collect, find_spans
from vllm_medusa.calibration.observations import MISSED, NO_LABEL
from vllm_medusa.files import Run
from vllm_medusa.heads.hydra import HydraHeads
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.job import Progress
from vllm_medusa.offline.records import Record
from vllm_medusa.training.rows import IGNORED, Texts

VOCAB, HIDDEN, HEADS, END = 19, 8, 3, 1


def text(token_ids, generated, key=None):
    return Record(0, 1, "", tuple(token_ids), tuple(generated), 0.8, group=key)


def random_texts():
    rng = np.random.default_rng(0)
    texts = []
    for _ in range(9):
        ids = rng.integers(2, VOCAB, rng.integers(14, 40)).tolist()
        middle = len(ids) // 2
        texts.append(text(ids, [(2, middle - 1), (middle, len(ids))]))
    return sorted(texts, key=lambda text: -len(text.token_ids))  # the order of observations


class Causal:
    """Hidden states that depend on all previous tokens, and on no later ones."""

    hidden_size, state_names, end_tokens, device = HIDDEN, ("last",), {END}, "cpu"

    def __init__(self):
        torch.manual_seed(0)
        self.embedding = torch.randn(VOCAB, HIDDEN)
        self.lm_head = torch.nn.Linear(HIDDEN, VOCAB)
        self.calls = 0

    def hidden_states(self, ids, mask):
        assert bool((mask[:, 1:] <= mask[:, :-1]).all()), "padding is on the right"
        self.calls += 1
        return self.embedding[ids].cumsum(1)


def make_heads(kind="medusa"):
    torch.manual_seed(1)
    heads = MedusaHeads(HEADS, 1, HIDDEN, VOCAB, num_lm_heads=0)
    if kind == "hydra":
        known = torch.randperm(VOCAB)[: VOCAB * 3 // 4]
        heads = HydraHeads(HEADS, 1, HIDDEN, VOCAB, num_lm_heads=0, token_map=known)
        heads.use_target_embedding(torch.randn(VOCAB, HIDDEN))
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=0.3)
    return heads


def observed(texts, folder, model=None, kind="medusa", of="heads", **options):
    model = model or Causal()
    folder.mkdir(exist_ok=True)
    options = {"batch_tokens": 60} | options
    settings = [of, options["batch_tokens"]]
    with Run(folder / FOLDER, {"settings": settings}, of=folder, restart=True) as run:
        return collect(texts, make_heads(kind), model, run, **options)


def test_only_labeled_positions_are_collected(tmp_path):
    """The rule of training for positions where all heads have a label."""
    texts = Texts(random_texts())
    spans = list(find_spans(texts, HEADS, {END}))
    labels = texts.labels(torch.arange(len(texts.tokens)), HEADS)
    positions = [p for span in spans for p in range(span.start, span.stop)]
    assert positions == torch.nonzero((labels != IGNORED).all(1))[:, 0].tolist()
    observations, _ = observed(texts.records, tmp_path)
    assert (observations.ranks != NO_LABEL).all()
    assert observations.offsets[-1] == len(observations.ranks)
    assert observations.num_texts == len(spans)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_ranks_do_not_depend_on_the_batches(kind, tmp_path):
    texts = random_texts()
    model, heads = Causal(), make_heads(kind)
    observations, fitted = observed(texts, tmp_path, model, kind)
    alone, _ = observed(texts, tmp_path, model, kind, batch_tokens=1)
    assert np.array_equal(observations.ranks, alone.ranks)
    joined = Texts(texts)
    for rows, (first, stop, _) in zip(
        observations.texts(), find_spans(joined, HEADS, {END}), strict=True
    ):
        number = joined.record_of(first)
        ids = torch.tensor(texts[number].token_ids)
        first, stop = first - joined.first[number], stop - joined.first[number]
        states = model.embedding[ids].cumsum(0)[first:stop]
        path = torch.stack([ids[first + 1 + h : stop + 1 + h] for h in range(HEADS)], 1)
        with torch.no_grad():
            logits = heads.compute_logits(heads(states, HEADS, path), model.lm_head)
        for head in range(HEADS):
            label = ids[first + head + 2 : stop + head + 2]
            known = torch.arange(VOCAB) if heads.token_map is None else heads.token_map
            there, place = (label[:, None] == known).max(1)
            own = logits[torch.arange(len(label)), head, place]
            rank = (logits[:, head] > own[:, None]).sum(1).masked_fill(~there, MISSED)
            assert np.array_equal(rows[:, head], rank.numpy())
    assert (observations.ranks == MISSED).any() == (kind == "hydra")
    assert all(fitted)


def test_a_finished_text_is_used_to_its_end(tmp_path):
    ended = text([5, 6, 7, 8, END], [(2, 5)])
    cut = text([5, 6, 7, 8, 9], [(2, 5)])
    observations, _ = observed([ended, text(list(range(2, 14)), [(1, 12)])], tmp_path)
    assert list(find_spans(Texts([cut]), HEADS, {END})) == [], "three tokens, three heads"
    assert list(find_spans(Texts([ended]), HEADS, {END})) == [(1, 3, 3)]
    shorter = observations.texts()[1]
    assert (shorter == NO_LABEL).tolist() == [[False, False, True], [False, True, True]]


@pytest.mark.parametrize("short", [(0, 1), (1, 1)])
def test_labels_end_with_their_own_span(short, tmp_path):
    """Adjacent spans, the first of which has no position, may start at the same one."""
    ids = list(range(2, 16))
    alone, _ = observed([text(ids, [(1, 14)])], tmp_path / "alone")
    after, _ = observed([text(ids, [short, (1, 14)])], tmp_path / "after")
    assert (alone.ranks != NO_LABEL).all() and len(alone.ranks) == 10
    assert np.array_equal(after.ranks, alone.ranks)


def test_samples_of_a_prompt_are_in_the_same_half(tmp_path):
    ids = list(range(2, 16))
    texts = [text(ids, [(2, 14)], key=key) for key in ("a", "b", "a", "c", "b")]
    observations, _ = observed(texts, tmp_path)
    assert observations.halves() == ([0, 2, 3], [1, 4])
    assert observed(texts[:1], tmp_path)[0].halves() is None, "only one prompt"


def test_a_killed_run_resumes_to_the_same_result(tmp_path):
    texts = random_texts()
    whole, fits = observed(texts, tmp_path / "whole", model := Causal())
    passes = model.calls
    assert passes > 3

    class Killed(BaseException):
        pass

    class Kill(Progress):
        def at(self, what, done, total, text=""):
            if [*tmp_path.glob(f"{FOLDER}/*/*.bin")]:
                raise Killed

    first = Causal()
    with pytest.raises(Killed):
        observed(texts, tmp_path, first, progress=Kill())
    again = Causal()
    resumed, resumed_fits = observed(texts, tmp_path, again)
    assert 1 < first.calls < passes
    assert again.calls == passes - (first.calls - 1), "only states of the last pass were lost"
    assert np.array_equal(resumed.ranks, whole.ranks)
    assert resumed_fits == fits
    other = Causal()
    observed(texts, tmp_path, other, of="others")
    assert other.calls == passes, "states of other settings are not reused"


def test_texts_too_short_for_the_heads_are_refused(tmp_path):
    with pytest.raises(CalibrationError, match="more than 3 tokens"):
        observed([text([3, 4, 5, 6], [(1, 4)])], tmp_path)
