"""PCGrad and CAGrad on Gram matrices, against the vectors themselves and against an independent solver."""

import numpy as np
import pytest
import torch
from method_batches import NAMES, begun

from eppo.algorithms import get_algorithm
from eppo.gradients import (apply, cagrad_coefficients, cagrad_weights, cosine_metrics, gram_matrix, pcgrad_coefficients,
                            surgery_metrics)

ORDER = [[0, 1, 2]] * 3


def named(*vectors):
    return {f"t{i}": torch.tensor(vector, dtype=torch.float64) for i, vector in enumerate(vectors)}


def random_gradients(seed, tasks=4, size=30, scale=True):
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(size, generator=generator, dtype=torch.float64)
    return {f"t{i}": ((0.3 * common + torch.randn(size, generator=generator, dtype=torch.float64)) * (10.0 ** (i - 1)
                                                                                                      if scale else 1))
            for i in range(tasks)}


def project_vectors(gradients, orders):
    """PCGrad as the paper writes it, on the vectors."""
    flat, total = list(gradients.values()), 0
    for i, own in enumerate(flat):
        v = own.clone()
        for j in orders[i]:
            if j != i and v @ flat[j] < 0:
                v -= (v @ flat[j]) / (flat[j] @ flat[j]) * flat[j]
        total = total + v
    return total


def test_pcgrad_golden():
    gradients = named([1., 0.], [-1., 1.], [.5, .5])
    coefficients_K = pcgrad_coefficients(gram_matrix(gradients), ORDER)
    assert apply(coefficients_K, gradients).tolist() == pytest.approx([1.0, 2.0])
    single = [pcgrad_coefficients(gram_matrix(gradients), [ORDER[0] if i == k else [] for i in range(3)]) for k in range(3)]
    others = torch.ones(3, dtype=torch.float64)
    parts = [apply(one - others, gradients) + gradients[f"t{k}"] for k, one in enumerate(single)]
    assert [part.tolist() for part in parts] == [pytest.approx([.5, .5]), pytest.approx([0, 1]), pytest.approx([.5, .5])]


@pytest.mark.parametrize("seed", range(6))
def test_pcgrad_on_the_gram_matrix_is_pcgrad_on_the_vectors(seed):
    gradients = random_gradients(seed)
    orders = [torch.randperm(4, generator=torch.Generator().manual_seed(10 * seed + i)).tolist() for i in range(4)]
    update = apply(pcgrad_coefficients(gram_matrix(gradients), orders), gradients)
    assert torch.allclose(update, project_vectors(gradients, orders), rtol=1e-10, atol=1e-10)


def test_without_conflict_it_is_the_joint_gradient():
    gradients = named([1., .2], [.5, 1.], [0., 0.])
    assert pcgrad_coefficients(gram_matrix(gradients), ORDER).tolist() == [1, 1, 1]


def test_a_task_with_zero_gradient_changes_nothing():
    two, three = named([1., 0.], [-1., 1.]), named([1., 0.], [-1., 1.], [0., 0.])
    updates = [apply(pcgrad_coefficients(gram_matrix(one), [range(len(one))] * len(one)), one) for one in (two, three)]
    assert torch.equal(updates[0], updates[1])


@pytest.mark.parametrize("seed", range(5))
def test_cagrad_weights_against_slsqp(seed):
    optimize = pytest.importorskip("scipy.optimize", reason="scipy is in the notebooks extra")
    gram_KK = gram_matrix(random_gradients(seed, scale=bool(seed % 2))).numpy()
    target_K, radius = gram_KK.mean(1), 0.5 * np.sqrt(gram_KK.mean())

    def value(w):
        return w @ target_K + radius * np.sqrt(w @ gram_KK @ w + 1e-16)

    solved = optimize.minimize(value, np.full(4, 0.25), bounds=[(0, 1)] * 4, tol=1e-14, method="SLSQP",
                               constraints={"type": "eq", "fun": lambda w: w.sum() - 1}, options={"maxiter": 1000})
    ours = cagrad_weights(gram_KK, 0.5).numpy()
    assert ours.min() >= 0 and ours.sum() == pytest.approx(1)
    assert value(ours) <= solved.fun * (1 + 1e-7) + 1e-10 * gram_KK.max()


@pytest.mark.parametrize("seed", range(4))
def test_cagrad_lies_in_the_ball_and_serves_the_worst_task(seed):
    gradients = random_gradients(seed, tasks=3, scale=False)
    gram_KK = gram_matrix(gradients)
    joint = sum(gradients.values())
    coefficients_K, weights_K = cagrad_coefficients(gram_KK, 0.5)
    direction = apply(coefficients_K, gradients) * 1.25                 # before the division by 1 + c^2
    assert (direction - joint).norm() == pytest.approx(0.5 * joint.norm().item(), rel=1e-6)
    worst = min(float(direction @ one) for one in gradients.values())
    assert worst > min(float(joint @ one) for one in gradients.values())
    for other in torch.randn(200, 30, generator=torch.Generator().manual_seed(seed), dtype=torch.float64):
        point = joint + other / other.norm() * 0.5 * joint.norm()
        assert min(float(point @ one) for one in gradients.values()) <= worst + 1e-6


def test_cagrad_degenerate_cases():
    gradients = random_gradients(1)
    assert cagrad_coefficients(gram_matrix(gradients), 0.0)[0].tolist() == [1, 1, 1, 1]
    one = cagrad_coefficients(gram_matrix(named([3., 4.])), 0.5)[0]
    assert one.tolist() == pytest.approx([1.5 / 1.25])
    zero = cagrad_coefficients(torch.zeros(2, 2), 0.5)[0]
    assert torch.isfinite(zero).all()
    opposite = cagrad_coefficients(gram_matrix(named([1., 0.], [-1., 0.])), 0.5)[0]
    assert torch.isfinite(opposite).all()
    with pytest.raises(ValueError, match=r"c must lie in \[0, 1\)"):
        cagrad_coefficients(torch.eye(2), 1.5)


def test_metrics():
    gradients = named([1., 0.], [-1., 1.], [0., 0.])
    metrics = cosine_metrics(gradients)
    assert metrics == pytest.approx({"gradient/t0/norm": 1, "gradient/t1/norm": 2**.5, "gradient/t2/norm": 0,
                                     "gradient/conflict_frac": 1, "gradient/t0/t1/cosine": -(0.5**.5)})
    gram_KK = gram_matrix(gradients)
    assert surgery_metrics(torch.ones(3, dtype=torch.float64), gram_KK) == pytest.approx(
        {"gradient/update_ratio": 1, "gradient/update_cosine": 1})
    assert surgery_metrics(torch.ones(3, dtype=torch.float64), torch.zeros(3, 3, dtype=torch.float64)) == {}


def test_hooks_log_and_draw_orders_of_their_own():
    gradients = {name: value.float() for name, value in random_gradients(3).items()}
    method = get_algorithm("pcgrad")
    assert "per_task_grad" in method.needs
    torch_state = torch.random.get_rng_state()
    first = method.combine(gradients)
    assert torch.equal(torch.random.get_rng_state(), torch_state)
    again = get_algorithm("pcgrad")
    assert torch.equal(again.combine(gradients), first)
    resumed = get_algorithm("pcgrad")
    resumed.load_state_dict(method.state_dict())
    assert torch.equal(resumed.combine(gradients), method.combine(gradients))
    assert {"gradient/t0/t1/cosine", "gradient/conflict_frac", "gradient/update_ratio",
            "gradient/update_cosine"} <= set(method.metrics())
    cagrad = get_algorithm("cagrad")
    update = cagrad.combine(gradients)
    assert update.dtype == torch.float32
    assert sum(cagrad.metrics()[f"gradient/t{i}/weight"] for i in range(4)) == pytest.approx(1)
    assert torch.allclose(get_algorithm("cagrad", c=0.0).combine(gradients), sum(gradients.values()))
    with pytest.raises(ValueError, match="c must lie"):
        get_algorithm("cagrad", c=1.0)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("pcgrad", "cagrad")])
def test_cosines_on_request_for_any_method(name):
    gradients = random_gradients(2)
    method = begun(name, gradient_cosines=True)
    assert "per_task_grad" in method.needs and "per_task_grad" not in begun(name).needs
    assert torch.equal(method.combine(gradients), sum(gradients.values()))
    assert method.metrics()["gradient/t0/t1/cosine"] == pytest.approx(
        float(torch.nn.functional.cosine_similarity(gradients["t0"], gradients["t1"], dim=0)))
