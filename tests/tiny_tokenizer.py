"""A tokenizer for tests: byte-level pairs learned from the package's own prose."""

from __future__ import annotations

import functools

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lighttransfer.cli.prompts import prose

CHAT_TEMPLATE = (
    "{% for message in messages %}<u>{{ message['content'] }}</u>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


@functools.cache
def build(vocab_size: int = 600) -> PreTrainedTokenizerFast:
    """A tokenizer with a chat template, an end token and about three characters a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<end>", "<u>", "</u>", "<a>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(prose().split("\n\n"), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    fast.chat_template = CHAT_TEMPLATE
    return fast
