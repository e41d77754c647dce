"""SEAL's diagnostics of entropy eruption (arXiv 2605.27954, sections 3-4, appendix B), as functions on records and on tensors.

Rows are lines of trajectories.jsonl (`eppo.files.read_lines`), `episodes` is the frame of `records.read_run`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from eppo.policy import token_scores
from eppo.seal import mean_states
from eppo.types import Batch

if TYPE_CHECKING:
    import pandas as pd

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")
_LAYOUT = re.compile(r"</?tool_call>|<\|[^|<>]*\|>")         # what a chat template writes around a response
_CLICK = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.S)
BUTTONS = ("search", "back to search", "< prev", "next >", "description", "features", "reviews", "attributes", "buy now")


def sentence_duplication(text: str) -> float:
    """Share of a response's sentences that occur more than once in it; 0 for none. Sentences end at . ! ? or a line break;
    case, outer spaces and the template's tags do not count. Source: section 3.3 and appendix B.5 (Fig. 6, 11)."""
    sentences = [folded for part in _SENTENCE_END.split(_LAYOUT.sub("\n", text)) if (folded := part.strip().lower())]
    counts = Counter(sentences)
    return sum(counts[sentence] > 1 for sentence in sentences) / len(sentences) if sentences else 0.0


def duplication_over_time(rows: Iterable[Mapping[str, Any]], tokenizer: Any) -> "pd.DataFrame":
    """Sentence duplication within a response (a turn), averaged over an episode's, by step and task: columns step, task, duplication,
    episodes. Episodes without a turn are left out."""
    shares = [(row, [sentence_duplication(text) for _, text in turns_of(row, tokenizer)]) for row in rows]
    return _by_step([{"step": row["step"], "task": row["task"], "duplication": sum(found) / len(found)} for row, found in shares if found],
                    "duplication")


def format_errors(episodes: "pd.DataFrame") -> "pd.DataFrame":
    """By step and task: format_errors, the rejected calls per turn, and format_error_frac, the episodes with any."""
    return _by_step([{"step": row["step"], "task": row["task"], "format_errors": row["invalid_calls"] / max(row["turns"], 1),
                      "format_error_frac": float(row["invalid_calls"] > 0)} for row in episodes.to_dict("records")],
                    "format_errors", "format_error_frac")


def valid_log_probability(rows: Iterable[Mapping[str, Any]], episodes: "pd.DataFrame") -> "pd.DataFrame":
    """Log-probability of the valid episodes (no rejected call) under their sampler, in nats, by step and task: logp, the mean
    over episodes of the whole response's, and logp_per_token. Its fall is what drives entropy up (section 3.3)."""
    valid = {(row["step"], row["group"], row["seed"]) for row in episodes.to_dict("records") if not row["invalid_calls"]}
    found = []
    for row in rows:
        logps = [value for value, sampled in zip(row["sampler_logp"], row["mask"]) if sampled]
        if logps and (row["step"], row["group"], row["seed"]) in valid:
            found.append({"step": row["step"], "task": row["task"], "logp": sum(logps),
                          "logp_per_token": sum(logps) / len(logps)})
    return _by_step(found, "logp", "logp_per_token")


def off_page_clicks(rows: Iterable[Mapping[str, Any]], tokenizer: Any) -> "pd.DataFrame":
    """WebShop's hallucinated clicks, by step and task: off_page_frac, the share of an episode's clicks whose value stands
    neither on the page before the turn nor among the site's buttons. Episodes without a click are left out."""
    found = []
    for row in rows:
        clicks = [(page, value) for page, text in turns_of(row, tokenizer) for value in clicked_values(text)]
        if clicks:
            found.append({"step": row["step"], "task": row["task"],
                          "off_page_frac": sum(is_off_page(value, page) for page, value in clicks) / len(clicks)})
    return _by_step(found, "off_page_frac")


def is_off_page(value: str, page: str) -> bool:
    """Whether a clicked value is neither a button nor, as whole words, in the page's text; case and runs of spaces do not count."""
    value, page = (" ".join(text.lower().split()) for text in (value, page))
    return value not in BUTTONS and not (value and re.search(rf"(?<!\w){re.escape(value)}(?!\w)", page))


def clicked_values(text: str) -> list[str]:
    """The values of the click_action calls in a turn's text. Calls that are not JSON are format errors, and none of these."""
    values = []
    for body in _CLICK.findall(text):
        try:
            call = json.loads(body)
        except json.JSONDecodeError:
            continue
        arguments = call.get("arguments")
        if call.get("name") == "click_action" and isinstance(arguments, dict) and isinstance(arguments.get("value"), str):
            values.append(arguments["value"])
    return values


def turns_of(row: Mapping[str, Any], tokenizer: Any) -> Iterator[tuple[str, str]]:
    """(what the policy read since its last turn, what it wrote) for each turn of a recorded trajectory."""
    before = 0
    for start, stop, *_ in row["turns"]:
        yield tokenizer.decode(row["ids"][before:start]), tokenizer.decode(row["ids"][start:stop])
        before = stop


# ---- on models and tensors ------------------------------------------------------------------------------------------
@torch.no_grad()
def trajectory_states(model: nn.Module, batch: Batch) -> Tensor:
    """states_BD: each episode's mean last hidden state over its sampled tokens."""
    scores = token_scores(model, batch.ids_BT, batch.mask_BT, entropy=False, hidden=True)
    if scores.hidden_BTD is None:
        raise ValueError("this model scales or caps its logits, so its hidden states are not at hand")
    return mean_states(scores.hidden_BTD, batch.mask_BT.to(scores.hidden_BTD.device))


def state_similarity(states_BD: Any, correct_B: Any) -> dict[str, float]:
    """Mean pairwise cosines of episode states: `correct` among correct ones, `wrong` among wrong ones, `between` the two; NaN
    where there is no pair. High `between` is what the paper holds responsible for interference (section 3.3, Fig. 3)."""
    states_BD = torch.nn.functional.normalize(torch.as_tensor(states_BD).double(), dim=1)
    correct_B = torch.as_tensor(correct_B, dtype=torch.bool, device=states_BD.device)
    cosine_BB = states_BD @ states_BD.T
    other_BB = ~torch.eye(len(states_BD), dtype=torch.bool, device=states_BD.device)
    pairs = {"correct": correct_B[:, None] & correct_B & other_BB, "wrong": ~correct_B[:, None] & ~correct_B & other_BB,
             "between": correct_B[:, None] & ~correct_B}
    return {name: float(cosine_BB[where_BB].mean()) for name, where_BB in pairs.items()}


def trajectory_gradients(model: nn.Module, batch: Batch, temperature: float = 1.0) -> Tensor:
    """gradients_BP: for each episode the gradient of its summed log-probability. B x parameters in memory: for small models, or
    a handful of episodes."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for row in range(len(batch.mask_BT)):
        one = batch.select([row])
        logp = token_scores(model, one.ids_BT, one.mask_BT, temperature, entropy=False).logp_BT.sum()
        found = torch.autograd.grad(logp, parameters, allow_unused=True)
        rows.append(torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, found)]))
    return torch.stack(rows)


def gradient_interference(gradients_GP: Any, normalise: bool = False) -> Tensor:
    """c_G of one group: the mean inner product of each episode's gradient with all of the group's; with `normalise`, cosines.
    Source: section 3.3: the group's mean log-likelihood moves at sum_j A_j c_j."""
    gradients_GP = torch.as_tensor(gradients_GP).double()
    if normalise:
        gradients_GP = torch.nn.functional.normalize(gradients_GP, dim=1)
    return gradients_GP @ gradients_GP.mean(0)


def interference_slope(interference_N: Any, advantages_N: Any) -> dict[str, float]:
    """Least-squares `slope` of interference on advantage and their `correlation` (Fig. 4: negative before an eruption, flat
    after it); NaN for fewer than two different advantages."""
    x, y = (np.asarray(values, dtype=float) for values in (advantages_N, interference_N))
    if len(np.unique(x)) < 2:
        return {"slope": float("nan"), "correlation": float("nan")}
    x, y = x - x.mean(), y - y.mean()
    correlation = float(x @ y / np.sqrt((x @ x) * (y @ y))) if y.any() else float("nan")
    return {"slope": float(x @ y / (x @ x)), "correlation": correlation}


def _by_step(rows: Sequence[Mapping[str, Any]], *columns: str) -> "pd.DataFrame":
    """Means of `columns` by step and task, with the number of episodes."""
    import pandas as pd

    if not rows:
        return pd.DataFrame(columns=["step", "task", *columns, "episodes"])
    groups = pd.DataFrame(rows).groupby(["step", "task"], sort=True)
    return groups.mean().assign(episodes=groups.size()).reset_index()
