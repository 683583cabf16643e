"""The running scale of advantages: plain numpy and rlax."""

import math

import numpy as np
import pytest
import torch

from reincarnate.losses import AdvantageMoment, advantage_centre, advantage_scale, update_moment

from random_tensors import normal
from rlax_oracle import float64


def test_the_moment_is_numpys_and_rlaxs() -> None:
    moment = AdvantageMoment.zero()
    variance, mean, product = 0.0, 0.0, 1.0
    with float64() as rlax:
        import jax.numpy as jnp

        init, update = rlax.create_ema(decay=0.9)
        state = init(jnp.zeros(()))
        for i in range(6):
            error, valid = normal(4, 5, seed=i, scale=1 + i), normal(4, 5, seed=100 + i) > 0
            update_moment(moment, error, valid, 0.9)
            kept = error[valid].numpy()
            variance, product = 0.9 * variance + 0.1 * np.mean(kept**2), product * 0.9
            mean = 0.9 * mean + 0.1 * np.mean(kept)
            np.testing.assert_allclose(advantage_centre(moment), mean / (1 - product), rtol=1e-5, atol=1e-6)
            sigma = advantage_scale(moment, 1e-6)
            np.testing.assert_allclose(sigma, math.sqrt(variance / (1 - product) + 1e-6), rtol=1e-6)
            np.testing.assert_allclose(moment.value, variance, rtol=1e-12)
            _, state = update(jnp.asarray(kept), state)
            # rlax's variance subtracts the squared mean; its second moment does not
            np.testing.assert_allclose(sigma**2 - 1e-6, state.nu / (1 - state.decay_product), rtol=1e-5)
            np.testing.assert_allclose(moment.mean, state.mu, rtol=1e-4, atol=1e-6)
    assert sigma.dtype == torch.float32


def test_the_first_batch_counts_in_full_and_its_mean_is_not_subtracted() -> None:
    moment = AdvantageMoment.zero()
    assert advantage_scale(moment) == 1.0  # before any data
    assert advantage_centre(moment) == 0.0
    update_moment(moment, torch.full((3, 2), 7.0), torch.ones(3, 2, dtype=torch.bool), 0.99)
    assert advantage_scale(moment).item() == pytest.approx(7.0)


def test_a_batch_without_valid_entries_changes_nothing() -> None:
    for filled in (False, True):
        moment = AdvantageMoment.zero()
        if filled:
            update_moment(moment, torch.ones(4), torch.ones(4, dtype=torch.bool), 0.9)
        before = {name: x.clone() for name, x in moment.state_dict().items()}
        update_moment(moment, torch.tensor([torch.nan, 5.0]), torch.zeros(2, dtype=torch.bool), 0.9)
        assert all(torch.equal(before[name], x) for name, x in moment.state_dict().items())
        assert torch.isfinite(advantage_scale(moment))


def test_the_state_stays_where_it_is_and_survives_a_round_trip() -> None:
    moment = AdvantageMoment.zero()
    places = [x.data_ptr() for x in moment.state_dict().values()]
    for i in range(3):
        update_moment(moment, normal(5, seed=i), torch.ones(5, dtype=torch.bool), 0.9)
    other = AdvantageMoment.zero()
    elsewhere = [x.data_ptr() for x in other.state_dict().values()]
    other.load_state_dict({name: x.clone() for name, x in moment.state_dict().items()})
    assert advantage_scale(other) == advantage_scale(moment)
    assert [x.data_ptr() for x in moment.state_dict().values()] == places
    assert [x.data_ptr() for x in other.state_dict().values()] == elsewhere
