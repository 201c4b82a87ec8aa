# SPDX-License-Identifier: Apache-2.0
"""A byte-level BPE tokenizer with a chat template, trained on a text that the repository has anyway."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 1024
#: Ids of the special tokens: the trainer puts them first.
END_OF_TEXT, START_OF_TURN, END_OF_TURN = range(3)
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(corpus: Path, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json; ValueError if the corpus is too short."""
    tokenizer = _train(corpus)
    size = tokenizer.get_vocab_size()
    if size != VOCABULARY:
        raise ValueError(f"{corpus} gives {size} tokens of {VOCABULARY}: take a longer text")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(_config(), indent=2) + "\n")


def _train(corpus: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=_SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train([str(corpus)], trainer)
    return tokenizer


def _config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        "pad_token": _SPECIAL[END_OF_TEXT],
        "eos_token": _SPECIAL[END_OF_TURN],
        "chat_template": _CHAT_TEMPLATE,
    }
