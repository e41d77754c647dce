"""The entropy pacer of EPPO (arXiv 2607.07178, section 4.2): per-task entropy in, per-task clip range out.

    H_i       token-mean entropy of task i in this batch, in nats, before the batch's first gradient      eq. 5
    ema_i     beta * ema_i + (1 - beta) * H_i, from ema_i = H_i at first sight                            eq. 6
    R_i       ema_i / reference_i, the entropy collapse ratio                                             eq. 7
    z_i       (R_i - mean R) / (std R + 1e-8) over the tasks that have a reference                        eq. 8
    paced_i   eps0 * (1 + alpha * tanh z_i)                                                               eq. 9
    eps_i     clamp(paced_i / (1 + kappa * relu(ema_i - previous ema_i)), eps_min, eps_max)               eq. 10, 11

Where the paper leaves a choice open it is a setting, and the default is the reading that fits the paper's text best.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Mapping, Sequence, get_type_hints

import numpy as np

from eppo.checks import check_name, check_type
from eppo.types import TaskStats

if TYPE_CHECKING:
    import pandas as pd

TREND_MODES = ("absolute", "relative")
NAN = float("nan")
ROUNDING_NATS = 1e-4                                        # how far below 0 a collapsed policy's mean entropy may round


@dataclass(frozen=True, slots=True)
class Reading:
    """What the pacer says of one task after one batch.

    `eps` is the clip range. `entropy` (nats per token, NaN if not `observed`), `ema`, `reference` and `ratio` are the
    tracker's, NaN where there is none yet; `delta` is the EMA's change in nats, 0 if not observed; `z` and `paced_eps` are the
    pacer's, 0 and eps0 for a task outside the cohort; `trend_divisor` >= 1; `at_floor` and `at_ceiling` say that the final
    clamp moved the value.
    """

    eps: float
    entropy: float
    ema: float
    reference: float
    ratio: float
    z: float
    paced_eps: float
    trend_divisor: float
    at_floor: bool
    at_ceiling: bool
    observed: bool
    delta: float


@dataclass(slots=True)
class Track:
    """State of one task: measured batches, EMA, sums for the reference, the reference, whether that was floored."""

    batches: int = 0
    ema: float | None = None
    entropy_sum: float = 0.0
    tokens: float = 0.0
    reference: float | None = None
    floored: bool = False


@dataclass(eq=False)
class EntropyPacer:
    """Tracks each task's entropy and sets its clip range. One `observe` per rollout batch; see the module for the formulas.

    Args:
        eps0: base clip range, within [eps_min, eps_max].
        alpha: pacing strength in [0, 1).
        beta: EMA decay in [0, 1); 0.95 has a half-life of 13.5 batches.
        eps_min, eps_max: the final clamp, after pacing and trend (appendix A.2).
        kappa: gain of the trend constraint; the paper's formula is 1, 0 turns it off. At 1 it is nearly inert: a jump of
            0.1 nat in H moves the EMA by 0.005 and eps by 0.5 %.
        sigma_floor: z = 0 while the cohort's std of R is at most this. z is free of scale, so with 0 pacing works at full
            strength on the noise of near-equal ratios; 0.02-0.05 is the robust choice.
        ref_batches: measured batches whose token-weighted mean is the reference. 1 is the paper's H_i(0): a one-batch
            estimate that scales R_i for ever.
        warmup_steps: observed batches during which every task keeps eps0.
        ddof: 0 is the population std over tasks (as eq. 2 prints), 1 the sample std.
        h_floor: smallest reference, in nats per token; a task that needs it is out of the cohort and keeps eps0.
        n_min: fewest tokens with which a task counts as measured in a batch.
        trend_mode: "absolute" takes the EMA's rise in nats (eq. 10), "relative" as a share of the reference.
        claim_prop1: the run claims the lower bound of Prop. 1, (1 - alpha) eps0 <= eps (eq. 13): settings under which it can fail
            are refused. Otherwise they are a warning. The defaults keep it; alpha 0.2 of
            Table 5 does not.

    Guarantees: eps_min <= eps <= min(eps_max, eps0 (1 + alpha tanh sqrt(K - 1))); |eps' - eps| <= |paced' - paced| +
    (1 + alpha) eps0 kappa |rise' - rise| between any two steps. The paper's Prop. 1 rests on eps_min >= (1 - alpha) eps0, and
    its Prop. 2(iii) holds between steps of equal paced value only.

    Degenerate cases: one task has z = 0 and only the trend acts; of two tasks one is always at z = 1 and the other at -1,
    however small the gap; the lowest of three always has z <= -0.707, hence eps <= 0.1513. `warnings` names the first two.
    """

    eps0: float = 0.2
    alpha: float = 0.4
    beta: float = 0.95
    eps_min: float = 0.15
    eps_max: float = 0.30
    kappa: float = 1.0
    sigma_floor: float = 0.0
    ref_batches: int = 1
    warmup_steps: int = 0
    ddof: int = 0
    h_floor: float = 1e-3
    n_min: int = 1
    trend_mode: str = "absolute"
    claim_prop1: bool = False
    steps: int = field(default=0, init=False)
    tracks: dict[str, Track] = field(default_factory=dict, init=False, repr=False)
    readings: dict[str, Reading] = field(default_factory=dict, init=False, repr=False)
    ratio_mean: float = field(default=NAN, init=False, repr=False)
    ratio_std: float = field(default=NAN, init=False, repr=False)

    def __post_init__(self) -> None:
        hints = get_type_hints(EntropyPacer)
        for one in fields(self):
            if one.init:
                setattr(self, one.name, check_type(one.name, getattr(self, one.name), hints[one.name]))
        check_name("trend_mode", self.trend_mode, TREND_MODES)
        if not 0 < self.eps_min <= self.eps0 <= self.eps_max < 1:
            raise ValueError(f"clip ranges must be ordered 0 < eps_min <= eps0 <= eps_max < 1, got eps_min={self.eps_min}, "
                             f"eps0={self.eps0}, eps_max={self.eps_max}")
        for name in ("alpha", "beta"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in [0, 1), got {getattr(self, name)}")
        for name, least in (("kappa", 0), ("sigma_floor", 0), ("ref_batches", 1), ("warmup_steps", 0), ("n_min", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.ddof not in (0, 1):
            raise ValueError(f"ddof must be 0 (population std) or 1 (sample std), got {self.ddof}")
        if not self.h_floor > 0:
            raise ValueError(f"h_floor must be above 0 nats, got {self.h_floor}")
        if self.claim_prop1 and (problem := self._prop1_problem()):
            raise ValueError(f"claim_prop1 contradicts the other settings: {problem}; raise eps_min or leave the claim out")

    def _prop1_problem(self) -> str:
        """Why eq. 13 can fail, or "". Without the trend the paced value itself keeps the bound."""
        bound = (1 - self.alpha) * self.eps0
        if not self.kappa or self.eps_min >= bound or math.isclose(self.eps_min, bound):
            return ""
        return (f"eps_min = {self.eps_min:g} is below (1 - alpha) eps0 = {bound:g}, so the lower bound of Prop. 1 (eq. 13) does not "
                "hold while entropy rises")

    def set_references(self, references: Mapping[str, float]) -> None:
        """Reference entropies in nats per token from elsewhere, before the first batch; they take the place of H_i(0).

        Raises:
            ValueError: one that is not finite or is negative, or a task that has been observed already; nothing is changed.
        """
        for task, value in references.items():
            if not (math.isfinite(value) and value >= 0) or task in self.tracks:
                raise ValueError(f"task {task!r}: a reference must be finite and not negative, and come before the first batch, got "
                                 f"{value}")
        self.tracks |= {task: Track(reference=max(value, self.h_floor), floored=value < self.h_floor)
                        for task, value in references.items()}

    def observe(self, entropies: Mapping[str, tuple[float, float] | TaskStats]) -> dict[str, Reading]:
        """The readings of every task ever seen, by name in sorted order, after this batch.

        Args:
            entropies: task -> (entropy sum in nats, token count), reduced over ranks; or task -> TaskStats. A missing task, or
                one with fewer than n_min tokens, keeps its EMA and has no trend.

        Raises:
            ValueError: a sum or count that is not finite, or negative; names the task, and changes nothing.
        """
        sums = {task: _sum_and_count(task, value) for task, value in entropies.items()}
        deltas = {task: self._track(self.tracks.setdefault(task, Track()), *pair) for task, pair in sums.items()}
        self.steps += 1
        cohort = {} if self.steps <= self.warmup_steps else self._cohort()
        scores = standardise({task: self._ratio(self.tracks[task]) for task in cohort}, self.ddof, self.sigma_floor)
        self.readings = {task: self._reading(self.tracks[task], sums.get(task), deltas.get(task), scores.get(task))
                         for task in sorted(self.tracks)}
        self.ratio_mean, self.ratio_std = moments([self._ratio(track) for track in self._cohort().values()], self.ddof)
        return self.readings

    def _track(self, track: Track, entropy_sum: float, tokens: float) -> float | None:
        """Take in one task's batch; the EMA's change, None if the task was not measured."""
        if tokens < self.n_min:
            return None
        entropy, before = entropy_sum / tokens, track.ema
        track.batches += 1
        track.ema = entropy if before is None else self.beta * before + (1 - self.beta) * entropy
        if track.batches <= self.ref_batches:
            track.entropy_sum += entropy_sum
            track.tokens += tokens
        if track.batches == self.ref_batches and track.reference is None:
            mean = track.entropy_sum / track.tokens
            track.reference, track.floored = max(mean, self.h_floor), mean < self.h_floor
        return 0.0 if before is None else track.ema - before

    def _cohort(self) -> dict[str, Track]:
        """Tasks with a usable reference that have been measured, in this batch or not (eq. 8 runs over all of them)."""
        return {task: track for task, track in self.tracks.items()
                if track.reference is not None and track.ema is not None and not track.floored}

    @staticmethod
    def _ratio(track: Track) -> float:
        return NAN if track.reference is None or track.ema is None else track.ema / track.reference

    def _reading(self, track: Track, pair: tuple[float, float] | None, delta: float | None, z: float | None) -> Reading:
        """`z` is None outside the cohort: the task keeps eps0, without trend."""
        rise = max(delta or 0.0, 0.0)
        if self.trend_mode == "relative" and z is not None:
            rise /= track.reference
        divisor = 1.0 if z is None else 1 + self.kappa * rise
        paced = self.eps0 * (1 + self.alpha * math.tanh(z or 0.0))
        value = paced / divisor
        return Reading(eps=min(max(value, self.eps_min), self.eps_max), entropy=NAN if delta is None else pair[0] / pair[1],
                       ema=NAN if track.ema is None else track.ema,
                       reference=NAN if track.reference is None else track.reference, ratio=self._ratio(track),
                       z=z or 0.0, paced_eps=paced, trend_divisor=divisor, at_floor=value < self.eps_min,
                       at_ceiling=value > self.eps_max, observed=delta is not None, delta=delta or 0.0)

    @property
    def warnings(self) -> list[str]:
        """What a reader of the run must know, as constant texts."""
        texts = []
        cohort = self._cohort()
        if self.alpha and self.steps and len(self.tracks) == 1:
            texts.append("EPPO with one task: z is 0, only the trend constraint acts.")
        if self.alpha and len(cohort) == 2 and not self.sigma_floor:
            texts.append("EPPO with two tasks: z is +1 and -1 (+-0.71 with ddof 1) however small the gap, so apart from the "
                         "trend the two clip ranges are constants that swap; set sigma_floor or use three tasks or more.")
        for task in sorted(self.tracks):
            if self.tracks[task].floored:
                texts.append(f"EPPO: the reference entropy of task {task!r} is below h_floor = {self.h_floor:g} nats; the task "
                             f"keeps eps0 and is out of the cohort.")
        if self.alpha and (problem := self._prop1_problem()):   # without pacing the bound would be eps0 itself: nobody claims it
            texts.append(f"EPPO: {problem}.")
        return texts

    def metrics(self) -> dict[str, float]:
        """The last readings as pacer/<task>/<field>, with pacer/ratio_mean, pacer/ratio_std and pacer/eps_mean; values that
        do not exist (an absent task's entropy) are left out."""
        values = {f"pacer/{task}/{name}": float(value) for task, reading in self.readings.items()
                  for name, value in asdict(reading).items()}
        values |= {"pacer/ratio_mean": self.ratio_mean, "pacer/ratio_std": self.ratio_std}
        if self.readings:
            values["pacer/eps_mean"] = math.fsum(one.eps for one in self.readings.values()) / len(self.readings)
        return {key: value for key, value in values.items() if math.isfinite(value)}

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resume needs, as JSON values; floats survive JSON exactly."""
        return {"steps": self.steps, "tracks": {task: asdict(self.tracks[task]) for task in sorted(self.tracks)}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`. ValueError if it is not one."""
        names = {one.name for one in fields(Track)}
        if set(state) != {"steps", "tracks"} or any(set(track) != names for track in state["tracks"].values()):
            raise ValueError("not a pacer state: it needs steps, and tracks with " + ", ".join(sorted(names)))
        self.steps, self.readings = state["steps"], {}
        self.ratio_mean = self.ratio_std = NAN
        self.tracks = {task: Track(**track) for task, track in state["tracks"].items()}

    @classmethod
    def replay(cls, entropy_KT: Any, tasks: Sequence[str], **settings: Any) -> "pd.DataFrame":
        """A recorded run under these settings: one row per step (from 1) and task, with all fields of `Reading`.

        Args:
            entropy_KT: token-mean entropies in nats, one row per task; NaN where the task was absent. Every value counts with
                the same number of tokens.
            tasks: the K task ids.
            settings: those of the constructor.

        Raises:
            ValueError: shapes that do not match, an infinite or negative entropy, a setting out of range.
        """
        import pandas as pd

        pacer = cls(**settings)
        entropy_KT = np.asarray(entropy_KT, dtype=float)
        if entropy_KT.ndim != 2 or len(entropy_KT) != len(tasks):
            raise ValueError(f"entropy_KT must have one row for each of the {len(tasks)} tasks, got shape {entropy_KT.shape}")
        rows = []
        for step, entropy_K in enumerate(entropy_KT.T, start=1):
            known = {task: (value * pacer.n_min, pacer.n_min) for task, value in zip(tasks, entropy_K) if not np.isnan(value)}
            readings = pacer.observe(known)
            rows += [{"step": step, "task": task} | asdict(readings[task]) for task in tasks if task in readings]
        return pd.DataFrame(rows, columns=["step", "task", *(one.name for one in fields(Reading))])


def _sum_and_count(task: str, value: tuple[float, float] | TaskStats) -> tuple[float, float]:
    entropy_sum, tokens = (value.entropy_sum, value.tokens) if isinstance(value, TaskStats) else value
    entropy_sum, tokens = float(entropy_sum), float(tokens)
    if not (math.isfinite(entropy_sum) and math.isfinite(tokens)) or tokens < 0 or entropy_sum < -ROUNDING_NATS * tokens:
        raise ValueError(f"task {task!r}: entropy sum and token count must be finite and not negative, got {entropy_sum} nats "
                         f"over {tokens:g} tokens")
    return max(entropy_sum, 0.0), tokens


def moments(values: Sequence[float], ddof: int = 0) -> tuple[float, float]:
    """Mean and std, the same for every order of the values; NaN and 0 where there are too few."""
    if not values:
        return NAN, 0.0
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, 0.0
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - ddof))


def standardise(values: Mapping[str, float], ddof: int = 0, sigma_floor: float = 0.0) -> dict[str, float]:
    """z-scores over tasks (eq. 8): any per-task signal to a scale-free one. 0 for all if there are fewer than two tasks or
    their std is at most sigma_floor. With the population std, |z| <= sqrt(K - 1) and max z >= 1 / sqrt(K - 1)."""
    mean, std = moments(list(values.values()), ddof)
    if len(values) < 2 or std <= sigma_floor:
        return dict.fromkeys(values, 0.0)
    return {task: (value - mean) / (std + 1e-8) for task, value in values.items()}
