"""What each of the two processes of tests/test_distributed.py runs, started by torchrun: `two_processes.py FOLDER START METHOD ...`.

Into FOLDER: `<number>.pt`, the optimiser steps of every method and how errors end; with a model folder START also two runs, `whole`
and `cut`, a run that was stopped and resumed. START "-": no runs.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
import toy_env  # noqa: E402
from method_batches import TINY, episodes, learner_of, take_steps  # noqa: E402

from eppo import distributed  # noqa: E402
from eppo.config import load_recipe  # noqa: E402
from eppo.trainer import train  # noqa: E402

BATCHES = [episodes(seed, groups=1) for seed in range(2)]
RUN = TINY | {"steps": 2, "rollout.lag": 1, "rollout.stale_refresh": 1, "validation.instances": 3, "validate_every": 1,
              "checkpoint_every": 1, "trajectories": "all"}


def run_config(start, out):
    return load_recipe("micro", method="eppo", tasks=list(toy_env.GAMBLES), seed=0, out=str(out), **{"model.path": str(start)} | RUN)


def broken_learner():
    """A learner whose loss is NaN on the shortest episode alone, which only one of two processes has in its share."""
    learner = learner_of("grpo")
    shortest = min(BATCHES[0], key=lambda one: len(one.ids_T))
    whole = learner.algorithm.token_loss

    def token_loss(policy_logp_BT, minibatch, lo_BT, hi_BT):
        loss_BT = whole(policy_logp_BT, minibatch, lo_BT, hi_BT)
        spoilt_B = torch.tensor([one.seed == shortest.seed for one in minibatch.trajectories])
        return loss_BT.masked_fill(spoilt_B[:, None], float("nan"))

    learner.algorithm.token_loss = token_loss
    return learner


def text_of_error(work):
    try:
        work()
    except (FloatingPointError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def runs(folder, start):
    """A whole run; one that is stopped after step 1 and resumed; and what starting the first one again says."""
    list(train(run_config(start, folder / "whole")))
    running = train(run_config(start, folder / "cut"))
    while next(running).step < 1:
        pass
    running.close()
    list(train(run_config(start, folder / "cut"), resume=True))
    return text_of_error(lambda: next(train(run_config(start, folder / "whole"))))


def main(folder, start, *names):
    folder = Path(folder)
    with distributed.joined("cpu"):
        found = {"steps": {name: take_steps(learner_of(name), BATCHES) for name in names},
                 "not finite": text_of_error(lambda: take_steps(broken_learner(), BATCHES[:1])),
                 "not same": [text_of_error(lambda value=value: distributed.require_same("x", value)) for value in (7, distributed.rank())],
                 "run": runs(folder, start) if start != "-" else None}
        torch.save(found, folder / f"{distributed.rank()}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
