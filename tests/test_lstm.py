"""The LSTM against PyTorch's own, and games that begin inside a sequence."""

import torch

from reincarnate.networks.lstm import Lstm

from muesli_networks import close, torch_lstm
from random_tensors import generator


def test_the_lstm_is_pytorchs_with_its_gradients() -> None:
    lstm = Lstm(3, 6)
    lstm.initialise(generator())
    x, state = torch.randn(4, 11, 3, generator=generator()), torch.randn(4, 2, 6, generator=generator(1))
    other = torch_lstm(lstm)
    expected, (hidden, cell) = other(x, (state[:, 0][None].contiguous(), state[:, 1][None].contiguous()))
    found, last = lstm.sequence(x, state, torch.zeros(4, 11, dtype=torch.bool))
    close(found, expected)
    close(last, torch.stack((hidden[0], cell[0]), dim=1))
    found.square().sum().backward()
    expected.square().sum().backward()
    for ours, theirs in ((lstm.weight_ih, other.weight_ih_l0), (lstm.weight_hh, other.weight_hh_l0)):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_a_game_that_begins_inside_a_sequence_begins_with_an_empty_state() -> None:
    lstm = Lstm(3, 6)
    lstm.initialise(generator())
    x, state = torch.randn(1, 9, 3, generator=generator()), torch.randn(1, 2, 6, generator=generator(1))
    first = torch.zeros(1, 9, dtype=torch.bool)
    first[0, 4] = True
    whole, last = lstm.sequence(x, state, first)
    before, _ = lstm.sequence(x[:, :4], state, first[:, :4])
    after, end = lstm.sequence(x[:, 4:], lstm.initial_state(1), torch.zeros(1, 5, dtype=torch.bool))
    close(whole, torch.cat([before, after], dim=1))
    close(last, end)


def test_the_lstms_weights_are_pytorchs_and_its_forget_gate_starts_open() -> None:
    lstm = Lstm(20, 30)
    lstm.initialise(generator())
    bound = 30**-0.5
    for value in (lstm.weight_ih, lstm.weight_hh):
        assert 0.99 * bound < value.abs().max() <= bound
    assert (lstm.bias[30:60] == 1).all()
    assert lstm.bias[:30].abs().max() <= bound
