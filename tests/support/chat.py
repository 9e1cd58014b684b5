"""Chat templates in the styles of well-known models, over the test model's tokenizer."""

from __future__ import annotations

from typing import Any

from support.assets import TARGET

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_3 = (
    "<s>{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n{{ m.content | trim }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
GEMMA = (
    "<s>{% for m in messages %}<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}</turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>model\n{% endif %}"
)
VICUNA = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }} {% elif m.role == 'user' %}"
    "USER: {{ m.content }} {% else %}ASSISTANT: {{ m.content }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
PHI_3 = (  # ends a conversation, but not a prompt, with a special token
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}</s>{% endif %}"
)
GLM_4 = (  # no end token for the assistant's turn
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
FORGETFUL = (  # drops the reasoning of all answers except the last
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if loop.last %}{{ m.content }}{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TOKENS = (
    "<|im_start|> <|im_end|> <|start|> <|end|> <|eot|> <turn> </turn> <|user|> <|assistant|> "
    "<|system|>"
)


def tokenizer(template: str | None) -> Any:
    """The test model's tokenizer with a chat template and its tokens."""
    from transformers import PreTrainedTokenizerFast

    loaded = PreTrainedTokenizerFast.from_pretrained(TARGET)
    loaded.add_special_tokens({"additional_special_tokens": _TOKENS.split()})
    loaded.chat_template = template
    return loaded
