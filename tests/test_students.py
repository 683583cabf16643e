"""One contract for every registered student."""

import io

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from reincarnate.acting import ActRule
from reincarnate.errors import UserError
from reincarnate.losses import kl, log_policy
from reincarnate.students import dqn
from reincarnate.students.student import TRANSITIONS, get_student
from reincarnate.types import Batch

from student_cases import (
    CPU,
    META,
    SPECS,
    STUDENTS,
    VECTOR,
    advice,
    batch_of,
    build,
    cases,
    config,
    same,
    train,
    weights,
)


@cases
def test_what_a_student_says_of_itself(name: str, kind: str) -> None:
    entry, learner = get_student(name), build(name, kind)
    assert entry.name == name
    assert entry.summary
    assert entry.paper
    assert learner.batch_spec == TRANSITIONS
    assert learner.outputs in ("q_values", "policy_logits")
    assert learner.network_name == {"vector": "mlp", "atari": "nature"}[kind]  # quick's
    assert build(name, kind, network="auto").network_name == {"vector": "mlp", "atari": "impala"}[kind]
    assert "hidden" in learner.network_options
    assert learner.temperature == config().distill.student_temperature
    assert build(name, "atari", network="nature").network_name == "nature"
    with pytest.raises(UserError, match="nature network takes observations"):
        build(name, "vector", network="nature")


@cases
def test_actions_and_their_log_probabilities(name: str, kind: str) -> None:
    learner, spec = build(name, kind), SPECS[kind]
    state, obs = learner.initial_state(7), batch_of(spec, size=7).obs
    for rule in (ActRule("greedy"), ActRule("sample"), ActRule("epsilon", 0.3)):
        action, log_prob, state = learner.act(obs, state, rule)
        assert action.shape == log_prob.shape == (7,)
        assert action.dtype == torch.int64
        assert log_prob.dtype == torch.float32
        assert ((action >= 0) & (action < spec.num_actions)).all()
        assert (log_prob <= 0).all()


@cases
def test_an_update_returns_device_scalars_and_moves_every_parameter_but_the_targets(name, kind) -> None:
    learner, spec = build(name, kind), SPECS[kind]
    before, outputs = weights(learner.network), learner.network(batch_of(spec).obs)
    metrics = train(learner, spec, 2, name)
    expected = {"loss", "td_loss", "q_mean", "q_max"}
    if get_student(name).method.distill:
        expected |= {"distill_loss", "teacher_agreement"}
    assert expected <= set(metrics)
    for value in metrics.values():
        assert value.shape == ()
        assert value.dtype == torch.float32
        assert value.device == CPU
        assert not value.requires_grad
        assert torch.isfinite(value)
    assert not any(same(before, weights(learner.network)))
    assert not torch.equal(outputs, learner.network(batch_of(spec).obs))


@cases
def test_training_goes_on_bit_for_bit_after_a_round_trip(name: str, kind: str) -> None:
    spec = SPECS[kind]
    whole = build(name, kind)
    whole.set_learning_rate(3e-3)
    train(whole, spec, 3, name)
    whole.sync_target()
    train(whole, spec, 2, name, first=3)
    buffer = io.BytesIO()
    torch.save(whole.state_dict(), buffer)
    buffer.seek(0)
    resumed = build(name, kind, seed=99)
    resumed.load_state_dict(torch.load(buffer, weights_only=True))
    for learner in (whole, resumed):
        train(learner, spec, 3, name, first=5)
        learner.sync_target()
        train(learner, spec, 2, name, first=8)
    assert all(same(weights(whole.network), weights(resumed.network)))


@cases
def test_one_seed_gives_one_student(name: str, kind: str) -> None:
    spec, learners = SPECS[kind], [build(name, kind, seed=seed) for seed in (4, 4, 5)]
    first, twin, other = learners
    assert all(same(weights(first.network), weights(twin.network)))
    assert not any(same(weights(first.network), weights(other.network)))
    obs = batch_of(spec, size=50).obs
    actions = [learner.act(obs, None, ActRule("epsilon", 0.5))[0] for learner in learners]
    assert torch.equal(actions[0], actions[1])


@cases
def test_the_learning_rate_is_the_size_of_adams_first_steps(name: str, kind: str) -> None:
    for rate in (0.0, 1e-4, 1e-2):
        learner = build(name, kind, optimizer__adam_eps=1e-12)
        before = weights(learner.network)
        learner.set_learning_rate(rate)
        train(learner, SPECS[kind], 1, name)
        moved = [(value - before[key]).abs().max().item() for key, value in weights(learner.network).items()]
        assert max(moved) == pytest.approx(rate, rel=1e-2)


@cases
def test_nothing_moves_in_memory(name: str, kind: str) -> None:
    learner, spec = build(name, kind), SPECS[kind]
    train(learner, spec, 1, name)

    def addresses(tree) -> list[int]:
        if isinstance(tree, torch.Tensor):
            return [tree.data_ptr()]
        values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else []
        return [pointer for value in values for pointer in addresses(value)]

    before = addresses(learner.state_dict())
    assert len(before) > 3 * len(list(learner.network.parameters()))
    for i in range(20):
        train(learner, spec, 1, name, first=i)
        learner.set_learning_rate(1e-3 / (i + 1))
        if i % 7 == 0:
            learner.sync_target()
    assert addresses(learner.state_dict()) == before


class Census(TorchDispatchMode):
    """Every operator that runs, and the devices of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []
        self.devices: set[str] = set()
        self.boolean_index = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.append(func.overloadpacket.__name__)
        flat, _ = torch.utils._pytree.tree_flatten((args, kwargs))
        tensors = [value for value in flat if isinstance(value, torch.Tensor)]
        self.devices |= {value.device.type for value in tensors}
        if func.overloadpacket.__name__.startswith("index"):
            self.boolean_index |= any(value.dtype == torch.bool for value in tensors[1:])
        return func(*args, **(kwargs or {}))


READS = {"_local_scalar_dense", "nonzero", "lift_fresh", "masked_select", "_unique2", "item", "equal"}


@pytest.mark.parametrize("double_q", [False, True])
@cases
def test_an_update_never_asks_the_host(name: str, kind: str, double_q: bool) -> None:
    learner, batch, m = build(name, kind, td__double_q=double_q), batch_of(SPECS[kind]), torch.tensor(0.5)
    log_policy_ = advice(batch, name)
    learner.update(batch, log_policy_, m)
    with Census() as census:
        learner.update(batch, log_policy_, m)
        learner.sync_target()
        learner.set_learning_rate(1e-3)
    assert not READS & set(census.operators)
    assert not census.boolean_index
    assert "_fused_adam_" in census.operators
    assert len(census.operators) > 30


@cases
def test_an_update_runs_where_no_value_exists(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device any read of a value raises; so does an operand from another device."""
    monkeypatch.setattr(
        dqn, "make_adam", lambda parameters, *rest: torch.optim.SGD(parameters, 0.1, foreach=False)
    )
    spec = SPECS[kind]
    learner = get_student(name).factory(config(), spec, META, "fp32", None)
    real = batch_of(spec)
    batch = Batch(**{field: value.to(META) for field, value in vars(real).items()})
    with Census() as census:
        metrics = learner.update(batch, advice(batch, name), torch.ones((), device=META))
        learner.sync_target()
    assert census.devices == {"meta"}
    assert {value.device for value in metrics.values()} == {META}


@pytest.mark.parametrize("name", [name for name in STUDENTS if get_student(name).method.distill])
def test_distillation_alone_makes_the_student_the_teacher(name: str) -> None:
    learner = build(name, distill__coefficient=300.0, td__loss="mse")
    batch = batch_of(VECTOR, size=16)
    quiet = Batch(**(vars(batch) | {"reward": torch.zeros(16), "discount": torch.zeros(16)}))
    teacher = log_policy(batch.teacher_outputs, 1.0)
    first = learner.update(quiet, teacher, torch.tensor(1.0))["distill_loss"]
    for _ in range(300):
        metrics = learner.update(quiet, teacher, torch.tensor(1.0))
    assert first > 0.2
    assert metrics["distill_loss"] < 1e-3
    assert metrics["teacher_agreement"] == 1.0
    with torch.no_grad():
        student_policy = log_policy(learner.network(batch.obs), learner.temperature)
    assert kl(teacher, student_policy).max() < 0.01
    greedy, _, _ = learner.act(batch.obs, None, ActRule("greedy"))
    assert torch.equal(greedy, teacher.argmax(dim=1))


@pytest.mark.parametrize(("name", "double_q"), [*((name, False) for name in STUDENTS), ("dqn", True)])
def test_a_chain_is_solved_to_its_closed_form(name: str, double_q: bool) -> None:
    """States 0..4 in a row; action 2 goes right, 0 goes left, 1 stays. Leaving state 4 to the right pays 1.

    ``Q(s, right) = g^(4-s)``, ``Q(s, stay) = g^(5-s)``, ``Q(s, left) = g^(5-max(s-1,0))``.
    """
    g, states = 0.9, torch.arange(5)
    state, action = states.repeat_interleave(3), torch.arange(3).repeat(5)
    arrival = (state + action - 1).clamp(min=0)
    done = arrival == 5
    eye = torch.eye(5)
    batch = Batch(
        obs=eye[state],
        action=action,
        reward=done.float(),
        discount=g * (~done).float(),
        next_obs=eye[arrival.clamp(max=4)],
        teacher_outputs=torch.zeros(15, 3),
        behaviour_log_prob=torch.zeros(15),
    )
    learner = build(name, td__double_q=double_q)
    for i in range(1000):
        learner.update(batch, None, torch.tensor(0.0))
        if i % 10 == 0:
            learner.sync_target()
        if i == 700:
            learner.set_learning_rate(2e-4)
    value = g ** (4 - states.double())
    expected = torch.stack([g * value[(states - 1).clamp(min=0)], g * value, value], dim=1)
    with torch.no_grad():
        found = learner.network(eye).double()
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0)
