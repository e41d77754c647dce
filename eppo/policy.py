"""The policy: a Hugging Face causal model, its tokenizer, and the scores that training needs from it.

`micro` is a Qwen2 of about one million parameters with its own byte-level BPE, built here from nothing; any other path is a
local folder or a hub id. Log-probabilities and entropies are of softmax(logits / temperature): the distribution that the
generator samples from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterable, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from eppo.prefixes import can_share, shared_states

CHATML = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.role == 'tool' %}<tool_response>{{ message.content }}</tool_response>
{%- else %}{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{ '\n' }}{% endif -%}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}
{%- endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# What a template always writes the same way is one token: it carries no information and would be half of an episode.
LAYOUT = ("<|im_start|>system\n", "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>\n<|im_start|>user\n",
          "<|im_end|>\n<|im_start|>assistant\n", "<|im_start|>tool\n<tool_response>",
          "</tool_response><|im_end|>\n<|im_start|>assistant\n", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
INIT_STD = 0.05                                             # of all matrices; narrow models learn faster than with the usual 0.02
SPLIT = r"[A-Za-z]+|[0-9]|[^A-Za-z0-9]+"                    # words, single digits, runs of everything else: copying stays easy


class Scores(NamedTuple):
    """Per-token scores, 0 outside the mask: `logp_BT` of the given ids, `entropy_BT` in nats, `hidden_BTD` or None."""

    logp_BT: Tensor
    entropy_BT: Tensor
    hidden_BTD: Tensor | None


def train_micro_tokenizer(texts: Iterable[str], tools: Iterable[dict[str, Any]] = (), vocab: int = 1536) -> Any:
    """A byte-level BPE trained on `texts`, with ChatML tags and a short chat template, as a `SavedTokenizer`.

    Args:
        tools: OpenAI-format tools; what surrounds the arguments of a call to them becomes single tokens.
        vocab: largest size, all tokens included.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    from eppo.saved_tokenizer import SavedTokenizer

    fixed = list(dict.fromkeys([*LAYOUT, *(piece for tool in tools for piece in _call_pieces(tool["function"]))]))
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"),
                                                  pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab - len(fixed), special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = SavedTokenizer(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>",
                               chat_template=CHATML, clean_up_tokenization_spaces=False)
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in fixed])      # matched with the tags: longest first
    return tokenizer


def _call_pieces(function: dict[str, Any]) -> list[str]:
    """Text of a Hermes call around its arguments: from the tag to the first value, between values, and after the last."""
    properties = function["parameters"]["properties"]
    quotes = {name: ('["', '"]') if schema.get("type") == "array" else ('"', '"') for name, schema in properties.items()}
    pieces, before = [], '<tool_call>\n{"name": "' + function["name"] + '", "arguments": {'
    for name, (opening, closing) in quotes.items():
        pieces.append(f'{before}"{name}": {opening}')
        before = f"{closing}, "
        pieces.append(closing + "}}\n</tool_call>")
    return pieces


def build_micro_model(vocab: int, *, hidden: int = 128, layers: int = 4, heads: int = 4, kv_heads: int = 2, mlp: int = 384,
                      max_tokens: int = 512, seed: int = 0) -> nn.Module:
    """A randomly initialised Qwen2 with tied embeddings; the same seed gives the same weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(vocab_size=vocab, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
                         num_key_value_heads=kv_heads, intermediate_size=mlp, max_position_embeddings=max_tokens,
                         tie_word_embeddings=True, initializer_range=INIT_STD, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config)
    torch.random.set_rng_state(state)
    return model


def load_policy(path: str, dtype: str = "float32", device: str = "cpu") -> tuple[nn.Module, Any]:
    """Model and tokenizer of a local folder or a hub id.

    Raises:
        ValueError: in one line: no such folder, a folder without model, weights or tokenizer, a hub id that cannot be had here, a
            file that cannot be read, or a tokenizer without a chat template.
    """
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(path)
    folder = Path(path)
    weights = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*")
    if folder.is_dir() and not any(file for pattern in weights for file in folder.glob(pattern)):
        raise ValueError(f"model.path {path!r}: the folder has no weights (model.safetensors); save them there with "
                         "model.save_pretrained(folder)")
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    except Exception as error:                              # noqa: BLE001  whatever the library says of a broken file
        raise ValueError(_unreadable(path, "model", error)) from error
    if not tokenizer.chat_template:
        raise ValueError(f"model.path {path!r}: its tokenizer has no chat template; instruction-tuned models have one")
    return model.to(device), tokenizer


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a folder or hub id, as it was saved.

    AutoTokenizer goes by the model's architecture: for a Qwen2 it would put Qwen2's own pre-tokenizer in place of the saved one, and
    the same text would become other tokens. A folder that says it holds a plain fast tokenizer is therefore read as one.

    Raises:
        ValueError: in one line: no such folder, or no tokenizer that can be had and read here.
    """
    folder = Path(path)
    if folder.is_dir():
        names = {file.name for file in folder.iterdir()}
        if "config.json" not in names:
            raise ValueError(f"model.path {path!r}: the folder has no config.json, so it is no model; a run's is in its folder model/")
        if not names & {"tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json"}:
            raise ValueError(f"model.path {path!r}: the folder has no tokenizer (tokenizer.json); save the model's own there with "
                             "tokenizer.save_pretrained(folder)")
    elif folder.exists() or path.startswith(("/", ".", "~")) or path.count("/") > 1:
        raise ValueError(f"model.path {path!r}: there is no such folder; give a model's folder, a hub id such as "
                         "Qwen/Qwen2.5-0.5B-Instruct, or micro")
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    from eppo.saved_tokenizer import SavedTokenizer

    try:
        name = get_tokenizer_config(path).get("tokenizer_class")
        plain = {"SavedTokenizer": SavedTokenizer, "PreTrainedTokenizerFast": PreTrainedTokenizerFast,
                 "TokenizersBackend": PreTrainedTokenizerFast}
        return plain.get(name, AutoTokenizer).from_pretrained(path)
    except Exception as error:                              # noqa: BLE001  whatever the library says of a broken file
        raise ValueError(_unreadable(path, "tokenizer", error)) from error


def _unreadable(path: str, what: str, error: Exception) -> str:
    reason = f"{type(error).__name__}: " + " ".join(str(error).split())[:160]
    if Path(path).is_dir():
        return f"model.path {path!r}: the {what} in this folder cannot be read ({reason}); save or download it again"
    return (f"model.path {path!r}: no such folder here, and as a hub id its {what} cannot be had: misspelt, gated, or offline "
            f"(HF_HUB_OFFLINE=1 keeps to what is downloaded); hf download {path} fetches it where there is a network ({reason})")


def splits_cleanly(model: nn.Module) -> bool:
    """Whether logits are exactly `output_embeddings(base_model(...))`: true but for models that scale or cap their logits."""
    config = model.config.get_text_config()
    scaled = any(getattr(config, name, None) not in (None, 1, 1.0) for name in ("logit_scale", "logits_scaling"))
    return not scaled and getattr(config, "final_logit_softcapping", None) is None


def token_scores(model: nn.Module, ids_BT: Tensor, mask_BT: Tensor, temperature: float = 1.0, *, entropy: bool = True,
                 entropy_grad: bool = False, hidden: bool = False, share: bool = False, chunk: int = 4096) -> Scores:
    """Log-probabilities and full-vocabulary entropies at the masked positions; only these pass through the LM head.

    Args:
        ids_BT: right-padded token ids. A pad to the right of a causal model changes nothing to its left.
        mask_BT: bool; position t is scored from the hidden state at t - 1. `mask_BT[:, 0]` must be False.
        temperature: > 0; the softmax is of logits / temperature.
        entropy_grad: keep the graph of the entropies (entropy bonuses); otherwise they are detached.
        share: compute what rows have in common at their start once (`eppo.prefixes`), where the model allows it and `hidden` is
            not asked for; the same values up to rounding.
        chunk: labelled positions per pass through the LM head; logits are recomputed in the backward, never kept.
    """
    ids_BT, mask_BT = ids_BT.to(model.device), mask_BT.to(model.device)
    positions = mask_BT[:, 1:].nonzero(as_tuple=True)
    targets_N = ids_BT[:, 1:][positions]
    logp_BT = torch.zeros(ids_BT.shape, dtype=torch.float32, device=model.device)
    entropy_BT = torch.zeros_like(logp_BT)
    hidden_BTD = None
    if share and not hidden and splits_cleanly(model) and can_share(model):
        steps_T = torch.arange(1, ids_BT.shape[1], device=model.device)
        states_RND, packed = shared_states(model, ids_BT, (mask_BT[:, 1:] * steps_T).amax(1))
        states_ND = states_RND[packed.row_B[positions[0]], packed.place_BT[positions]]
        head = model.get_output_embeddings()
    elif splits_cleanly(model):
        hidden_BTD = model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
        states_ND, head = hidden_BTD[:, :-1][positions], model.get_output_embeddings()
    else:
        states_ND, head = model(input_ids=ids_BT, use_cache=False).logits[:, :-1][positions], nn.Identity()
    pieces = []
    for start in range(0, len(targets_N), chunk):
        args = (states_ND[start:start + chunk], targets_N[start:start + chunk], head, temperature, entropy, entropy_grad)
        many = len(targets_N) > chunk and torch.is_grad_enabled()
        pieces.append(checkpoint(_score_chunk, *args, use_reentrant=False) if many else _score_chunk(*args))
    if pieces:
        where = (positions[0], positions[1] + 1)
        logp_BT = logp_BT.index_put(where, torch.cat([piece[0] for piece in pieces]))
        entropy_BT = entropy_BT.index_put(where, torch.cat([piece[1] for piece in pieces]))
    return Scores(logp_BT, entropy_BT, hidden_BTD if hidden else None)


def _score_chunk(states_ND: Tensor, targets_N: Tensor, head: nn.Module, temperature: float, entropy: bool,
                 entropy_grad: bool) -> tuple[Tensor, Tensor]:
    logits_NV = head(states_ND).float() / temperature
    logps_NV = torch.log_softmax(logits_NV, dim=-1)
    logp_N = logps_NV.gather(1, targets_N[:, None])[:, 0]
    if not entropy:
        return logp_N, torch.zeros_like(logp_N)
    source_NV = logps_NV if entropy_grad else logps_NV.detach()
    return logp_N, -(source_NV.exp() * source_NV).sum(-1)
