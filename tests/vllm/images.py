# SPDX-License-Identifier: Apache-2.0
"""Tiny multimodal models, and what a Qwen2.5-VL needs to be shown images."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

#: Sides of the smallest and the largest image, in pixels.
SMALLEST, LARGEST = 56, 112
_PLACES = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


def write_model(name: str, config: Mapping[str, Any], folder: Path) -> None:
    """Write a model of the type ``name`` with random weights by which signals keep their size."""
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(name, **config))
    generator = torch.Generator().manual_seed(5)
    for values in model.parameters():
        if values.ndim > 1:
            values.data.normal_(0.0, values[0].numel() ** -0.5, generator=generator)
    model.save_pretrained(folder)


def write_processor(tokenizer: Path, folder: Path) -> dict[str, int]:
    """Write the tokenizer in ``tokenizer`` with places for images, and a processor; return what config.json adds."""
    texts = AutoTokenizer.from_pretrained(tokenizer)
    texts.add_special_tokens({"additional_special_tokens": list(_PLACES.values())})
    images = Qwen2VLImageProcessor(min_pixels=SMALLEST**2, max_pixels=LARGEST**2)
    Qwen2_5_VLProcessor(
        image_processor=images,
        tokenizer=texts,
        video_processor=Qwen2VLVideoProcessor(),
        chat_template=texts.chat_template,
    ).save_pretrained(folder)
    return {name: texts.convert_tokens_to_ids(token) for name, token in _PLACES.items()}


def asked_about(colour: str) -> list[dict[str, Any]]:
    """Return the content of a message with an image of that colour."""
    image = BytesIO()
    Image.new("RGB", (LARGEST, LARGEST), colour).save(image, "PNG")
    url = f"data:image/png;base64,{b64encode(image.getvalue()).decode()}"
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
