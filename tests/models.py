"""A small model and tokenizer for tests, made in milliseconds and never trained."""

from functools import cache

import torch

from envs.base import function_tool
from eppo.policy import build_micro_model, train_micro_tokenizer

TOOLS = [function_tool("look", "Number of a word.", word="the word"), function_tool("answer", "End.", value="the number")]
TEXT = ("look then answer even or odd apple brick cedar delta ember flint grape hazel number none word value "
        '{"name": "look", "arguments": {"word": "apple"}} {"name": "answer", "arguments": {"value": "odd"}} Error: ').split(" ")


@cache
def tiny_tokenizer():
    return train_micro_tokenizer([" ".join(TEXT)] * 4, TOOLS, vocab=380)


def tiny_model(seed: int = 0, vocab: int | None = None, scale: float = 3.0):
    """Two layers, 32 wide; weights scaled up so that its distributions are far from uniform."""
    model = build_micro_model(vocab or len(tiny_tokenizer()), hidden=32, layers=2, heads=2, kv_heads=1, mlp=64, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    return model
