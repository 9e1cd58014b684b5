from typing import Any

import pytest
from support import chat

from vllm_medusa.offline.conversations import encode_conversation, encode_text
from vllm_medusa.offline.prompts import PromptError

SYSTEM = {"role": "system", "content": "Be brief."}
TALK = [
    SYSTEM,
    {"role": "user", "content": "What is assistant?"},
    {"role": "assistant", "content": "A role.\n\n- the user's\n- the model's "},
    {"role": "user", "content": "assistant\nIs it? "},
    {"role": "assistant", "content": "Yes."},
]
KEPT, TRIMMED = TALK[2]["content"], TALK[2]["content"].strip()

STYLES = [  # template, the assistant's text
    (chat.CHATML, [KEPT + "<|im_end|>", "Yes.<|im_end|>"]),
    (chat.LLAMA_3, [TRIMMED + "<|eot|>", "Yes.<|eot|>"]),
    (chat.GEMMA, [TRIMMED + "</turn>", "Yes.</turn>"]),
    (chat.PHI_3, [KEPT + "<|end|>", "Yes.<|end|>"]),
    (chat.GLM_4, [KEPT, "Yes."]),
]


def encode(messages: Any, template: str | None, key: str = "messages") -> tuple[str, list[str]]:
    """The whole text, and the text of each span."""
    tokenizer = chat.tokenizer(template)
    ids, spans = encode_conversation(messages, key, tokenizer)
    return tokenizer.decode(ids), [tokenizer.decode(ids[start:end]) for start, end in spans]


@pytest.mark.parametrize(("template", "written"), STYLES)
def test_spans_are_exactly_the_assistants_text(template, written):
    text, spans = encode(TALK, template)
    assert spans == written
    tokenizer = chat.tokenizer(template)
    assert text == tokenizer.apply_chat_template(TALK, tokenize=False)
    ids, places = encode_conversation(TALK, "messages", tokenizer)
    for turn, (start, _) in zip((2, 4), places, strict=True):  # the prompt in serving
        served = tokenizer.apply_chat_template(
            TALK[:turn], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        assert list(ids[:start]) == served


def test_a_space_of_the_template_belongs_to_the_answer():
    talk = [SYSTEM, *({**m, "content": m["content"].strip()} for m in TALK[1:])]
    text, spans = encode(talk, chat.VICUNA)
    assert spans == [f" {TRIMMED}</s>", " Yes.</s>"]
    assert text.startswith("Be brief. USER: What is assistant? ASSISTANT: A role.")


def test_share_gpt():
    talk = [
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Hello!"},
        {"from": "human", "value": "Bye"},  # no answer follows
    ]
    text, spans = encode(talk, chat.CHATML, "conversations")
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
    assert spans == ["Hello!<|im_end|>"]


THOUGHT = {"role": "assistant", "content": "<think>hm</think>Yes."}
USER = {"role": "user", "content": "Is it?"}
UPPER = chat.CHATML.replace("{{ m.content }}", "{{ m.content | upper }}")
REASONING = chat.CHATML.replace("{% endif %}", "<think>\n{% endif %}")
RAISING = "{{ raise_exception('only two roles') }}"
LATE = chat.CHATML.replace("<|im_start|>{{ m.role }}\n", "<|im_start|>{{ m.role }}\nAnswer: ")
MOODY = chat.CHATML.replace(
    "m.content }}", "m.content | upper if messages | length == 2 else m.content }}"
)
CUT = chat.CHATML.replace("assistant\n{% endif", "assistant\nY{% endif").replace(
    "{{ m.content }}", "{{ 'Y' if m.role == 'assistant' }}{{ m.content }}"
)


@pytest.mark.parametrize(
    ("template", "talk", "reason"),
    [
        (chat.FORGETFUL, [USER, THOUGHT, USER, THOUGHT], "does not put the assistant's text"),
        (UPPER, [USER, THOUGHT], "does not put the assistant's text '<think>hm</think>Yes.'"),
        (REASONING, [USER, {"role": "assistant", "content": "Yes."}], "rewrites earlier turns"),
        (LATE, [USER, {"role": "assistant", "content": "Yes."}], "does not put"),
        (MOODY, [USER, THOUGHT, USER, THOUGHT], "changes it when more text follows"),
        (CUT, [USER, {"role": "assistant", "content": "ou"}], "extend into the next text"),
        (RAISING, TALK, "refuses the conversation: only two roles"),
        (None, TALK, "no chat template"),
        (chat.CHATML, [SYSTEM, USER], "no assistant turn"),
        (chat.CHATML, [SYSTEM, THOUGHT], "begins with an assistant turn"),
        (chat.CHATML, [USER, {"role": "assistant", "content": " "}], "message 2 of 'messages' is"),
        (chat.CHATML, [], "messages is []: List should have at least 1 item"),
        (chat.CHATML, [{"from": "narrator", "value": "x"}], "[0].from is 'narrator': Input"),
    ],
)
def test_conversations_that_cannot_be_masked_are_refused(template, talk, reason):
    share_gpt = talk and "from" in talk[0]
    with pytest.raises(PromptError) as error:
        encode(talk, template, "conversations" if share_gpt else "messages")
    assert reason in str(error.value)


def test_plain_text_is_trained_from_its_second_token():
    tokenizer = chat.tokenizer(None)
    ids, spans = encode_text("<s>import os\n", tokenizer)
    assert list(ids) == tokenizer("<s>import os\n")["input_ids"]
    assert spans == ((1, len(ids)),)
    for text, reason in (
        ("", "at least 1 character"),
        (3, "valid string"),
        ("<s>", "a single token"),
    ):
        with pytest.raises(PromptError, match=reason):
            encode_text(text, tokenizer)


def test_a_tokenizer_that_starts_every_text_with_a_space():
    """Parts of a text are tokenized differently than the whole text, as in Llama 2's tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted({c for m in TALK for c in m["content"]} | set("user assistant system▁\n"))
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, additional_special_tokens=["<|im_start|>", "<|im_end|>"]
    )
    tokenizer.chat_template = chat.CHATML
    whole = tokenizer("<|im_start|>Yes", add_special_tokens=False)["input_ids"]
    assert len(tokenizer("Yes", add_special_tokens=False)["input_ids"]) == len(whole) == 4
    ids, spans = encode_conversation(TALK, "messages", tokenizer)
    pieces = tokenizer.convert_ids_to_tokens(ids)
    written = ["".join(pieces[start:end]).replace("▁", " ") for start, end in spans]
    assert written == [KEPT + "<|im_end|>", "Yes.<|im_end|>"]
