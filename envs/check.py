"""`check_env`: does an environment keep the contract of `envs.base`? Five of ours do; yours should before it is trained on.

    pandas.DataFrame(check_env("db"))               # one row per size, split and kind: instances, lengths, turns of expert play
    check_env(MyEnv, sizes=("micro",), sample=3)    # a class of your own, fewer episodes

Every broken rule is collected, then one `CheckFailed` names size, split, rule, instance and what was expected.
"""

from __future__ import annotations

from statistics import mean
from typing import Any

import envs
from envs.base import SPLITS, Env, EnvFault
from envs.contract import Contract

MAX_LISTED = 40


class CheckFailed(AssertionError):
    """The environment breaks its contract; the message lists every broken rule."""


def check_env(task: str | type[Env], *, sizes: tuple[str, ...] | None = None, splits: tuple[str, ...] = SPLITS, sample: int = 6,
              noise: float = 0.3, noisy_share: float = 0.5, **settings: Any) -> list[dict[str, Any]]:
    """Play a sample of every size and split and hold the environment to its contract.

    Args:
        task: registered id or an `Env` subclass.
        sizes: default all of the class; without meaning for `source="official"`.
        sample: episodes per size and split (at least one of each kind).
        noise: probability that `mistake` speaks instead of the expert in the noisy episodes.
        noisy_share: share of all noisy episodes that the expert must still solve.
        settings: further arguments of the class (source, rules, backend, path).

    Returns:
        One row per size, split and kind: `instances`, `episodes`, `mean_chars` and `max_chars` of whole expert episodes
        (prompt, turns and observations), `mean_turns`, `max_turns`, `noisy_solved` (fraction); None where none was solved.

    Raises:
        CheckFailed: a rule is broken. EnvFault: the environment cannot run on this machine.
    """
    cls = envs.env_class(task) if isinstance(task, str) else task
    ok, reason = cls.available(settings.get("backend"))
    if not ok:
        raise EnvFault(f"{cls.task}: {reason}")
    official = settings.get("source") == "official"
    findings, rows, solved = [], [], []
    for size in ("official",) if official else sizes or cls.sizes:
        marks: dict[str, str] = {}
        for split in splits:
            check = Contract(cls, settings | {"split": split} | ({} if official else {"size": size}), f"{size}/{split}", noise)
            check.run(sample, marks, hostile=split == splits[0])
            findings += check.findings
            rows += [{"size": size, "split": split} | row for row in check.rows()]
            solved += [won for _, won in check.noisy]
    if solved and mean(solved) < noisy_share:
        findings.append(f"recovery: expert() solves {sum(solved)} of {len(solved)} episodes in which mistake() spoke at rate "
                        f"{noise}; it must recover in at least {noisy_share:.0%}")
    findings = list(dict.fromkeys(findings))
    if findings:
        listed = findings[:MAX_LISTED] + [f"and {len(findings) - MAX_LISTED} more"] * (len(findings) > MAX_LISTED)
        raise CheckFailed(f"{cls.task}: {len(findings)} broken rules\n" + "\n".join(f"- {finding}" for finding in listed))
    return rows
