"""Looking at episodes: one line per turn as text, or HTML with every token coloured by what it is."""

from __future__ import annotations

import html
from typing import Any

from eppo.types import Trajectory

_COLOURS = {"prompt": "#eeeeee", "sampled": "#cfe8ff", "observed": "#fff3c4"}


def _spans(trajectory: Trajectory) -> list[tuple[str, int, int]]:
    """(kind, start, stop) of the prompt, the sampled turns and what was observed between them."""
    spans, position = [], 0
    for number, turn in enumerate(trajectory.turns):
        spans.append(("observed" if number else "prompt", position, turn.start))
        spans.append(("sampled", turn.start, turn.stop))
        position = turn.stop
    if position < len(trajectory.ids_T):
        spans.append(("observed" if trajectory.turns else "prompt", position, len(trajectory.ids_T)))
    return spans


def episode_text(trajectory: Trajectory, tokenizer: Any) -> str:
    """The episode as text: a header, then prompt, turns and observations, each under its name and token count."""
    t = trajectory
    lines = [f"{t.task} {t.instance_id} ({t.kind}): {t.status}, reward {t.reward:g}, {len(t.turns)} turns, {len(t.ids_T)} tokens"]
    for kind, start, stop in _spans(t):
        text = tokenizer.decode(t.ids_T[start:stop]).strip()
        lines.append(f"[{kind}, {stop - start} tokens] {text}")
    return "\n".join(lines)


def episode_html(trajectory: Trajectory, tokenizer: Any) -> str:
    """The episode as HTML: blue tokens were sampled (darker: less likely), grey is the prompt, yellow was observed. Only blue
    tokens carry loss, entropy and KL; the log-probability is each one's tooltip."""
    t, parts = trajectory, []
    for kind, start, stop in _spans(t):
        for position in range(start, stop):
            text = html.escape(tokenizer.decode([t.ids_T[position]])).replace("\n", "&#9166;<br>")
            shade = f"border-bottom:{min(4, -t.sampler_logp_T[position]):.1f}px solid #1f77b4;" if kind == "sampled" else ""
            title = f' title="log p {t.sampler_logp_T[position]:.2f}"' if kind == "sampled" else ""
            parts.append(f'<span style="background:{_COLOURS[kind]};{shade}margin-right:1px"{title}>{text}</span>')
    header = html.escape(f"{t.task} {t.instance_id} ({t.kind}): {t.status}, reward {t.reward:g}")
    return (f'<div style="font-family:monospace;line-height:1.7;max-width:60em;color:#222"><b>{header}</b><br>{"".join(parts)}<br>'
            '<small>grey: prompt, blue: sampled, yellow: observed; a thick underline is an unlikely token</small></div>')
