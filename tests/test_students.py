"""One contract for every registered student, and DQN against a plain second implementation."""

import copy
import io
import math
from importlib.metadata import EntryPoint

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from reincarnate.acting import ActRule
from reincarnate.config import RunConfig, override, preset
from reincarnate.errors import UserError
from reincarnate.losses import kl, log_policy
from reincarnate.students import dqn, student
from reincarnate.students.student import TRANSITIONS, Method, StudentEntry, get_student, registry
from reincarnate.types import Batch, EnvSpec

CPU, META = torch.device("cpu"), torch.device("meta")
VECTOR = EnvSpec("Chain-v0", "vector", 3, (5,))
ATARI = EnvSpec("Small-v0", "atari", 4, (2, 36, 37))
SPECS = {"vector": VECTOR, "atari": ATARI}
STUDENTS = sorted(registry())
cases = pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in STUDENTS for kind in SPECS])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def config(**settings) -> RunConfig:
    values = {key.replace("__", "."): value for key, value in settings.items()}
    return override(preset("quick"), {"optimizer.batch_size": 6, "optimizer.learning_rate": 1e-3} | values)


def build(name: str = "qdagger-dqn", kind: str = "vector", seed: int = 0, precision="fp32", **settings):
    factory = get_student(name).factory
    return factory(config(**settings), SPECS[kind], CPU, precision, generator(seed))


def batch_of(spec: EnvSpec, size: int = 6, seed: int = 0) -> Batch:
    g = generator(seed)

    def observations() -> torch.Tensor:
        if spec.kind == "atari":
            return torch.randint(0, 256, (size, *spec.obs_shape), dtype=torch.uint8, generator=g)
        return torch.randn(size, *spec.obs_shape, generator=g)

    return Batch(
        obs=observations(),
        action=torch.randint(0, spec.num_actions, (size,), generator=g),
        reward=torch.randn(size, generator=g),
        discount=torch.rand(size, generator=g).round() * 0.97,
        next_obs=observations(),
        teacher_outputs=torch.randn(size, spec.num_actions, generator=g),
        behaviour_log_prob=torch.zeros(size),
    )


def advice(batch: Batch, name: str = "qdagger-dqn") -> torch.Tensor | None:
    return log_policy(batch.teacher_outputs, 0.5) if get_student(name).method.distill else None


def train(learner, spec: EnvSpec, updates: int, name: str = "qdagger-dqn", first: int = 0, m: float = 1.0):
    metrics = {}
    for i in range(first, first + updates):
        batch = batch_of(spec, seed=i)
        metrics = learner.update(batch, advice(batch, name), torch.tensor(m))
    return metrics


def weights(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.detach().clone() for key, value in network.state_dict().items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[bool]:
    assert first.keys() == second.keys()
    return [torch.equal(first[key], second[key]) for key in first]


# ------------------------------------------------------------ the contract


@cases
def test_what_a_student_says_of_itself(name: str, kind: str) -> None:
    entry, learner = get_student(name), build(name, kind)
    assert entry.name == name
    assert entry.summary
    assert entry.paper
    assert learner.batch_spec == TRANSITIONS
    assert learner.outputs in ("q_values", "policy_logits")
    assert learner.network_name == {"vector": "mlp", "atari": "impala"}[kind]
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


# ------------------------------------------------------------ DQN itself


def plain_training(learner, settings: RunConfig, batches: list[Batch], m: float) -> dict[str, torch.Tensor]:
    """The same updates by a second implementation: loops over the batch, PyTorch's plain Adam."""
    online, target = copy.deepcopy(learner.network), copy.deepcopy(learner.target)
    rates = settings.optimizer
    adam = torch.optim.Adam(
        online.parameters(), lr=rates.learning_rate, eps=rates.adam_eps, foreach=False, fused=False
    )
    for batch in batches:
        with torch.no_grad():
            next_target, next_online = target(batch.next_obs), online(batch.next_obs)
        outputs, terms = online(batch.obs), []
        for i in range(len(outputs)):
            best = (next_online if settings.td.double_q else next_target)[i].argmax()
            error = outputs[i, batch.action[i]] - (batch.reward[i] + batch.discount[i] * next_target[i, best])
            terms.append(error**2 if settings.td.loss == "mse" else
                         0.5 * error**2 if abs(error) <= 1 else abs(error) - 0.5)  # fmt: skip
        teacher = log_policy(batch.teacher_outputs, 0.5)
        student_ = F.log_softmax(outputs / settings.distill.student_temperature, dim=1)
        divergence = F.kl_div(student_, teacher, reduction="batchmean", log_target=True)
        loss = torch.stack(terms).mean() + settings.distill.coefficient * m * divergence
        adam.zero_grad()
        loss.backward()
        adam.step()
    return weights(online)


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize(
    ("loss", "double_q", "m"), [("huber", False, 0.7), ("mse", True, 0.7), ("huber", True, 0.0)]
)
def test_updates_are_those_of_a_plain_implementation(kind: str, loss: str, double_q: bool, m: float) -> None:
    settings = {"td__loss": loss, "td__double_q": double_q}
    learner, spec = build(kind=kind, **settings), SPECS[kind]
    train(learner, spec, 1, m=0.5)  # so that online and target differ
    fresh = build(kind=kind, **settings)
    fresh.network.load_state_dict(learner.network.state_dict())
    batches = [batch_of(spec, seed=50 + i) for i in range(5)]
    expected = plain_training(fresh, config(**settings), batches, m)
    for batch in batches:
        fresh.update(batch, advice(batch), torch.tensor(m))
    for key, value in weights(fresh.network).items():
        torch.testing.assert_close(value, expected[key], atol=2e-5, rtol=1e-4)


def test_the_metrics_are_what_they_say() -> None:
    learner = build(distill__coefficient=3.0)
    batch = batch_of(VECTOR)
    with torch.no_grad():
        q = learner.network(batch.obs)
    teacher = advice(batch)
    metrics = learner.update(batch, teacher, torch.tensor(0.25))
    divergence = kl(teacher, log_policy(q, 0.1)).mean()
    assert metrics["q_mean"] == pytest.approx(q.mean().item(), rel=1e-5)
    assert metrics["q_max"] == pytest.approx(q.max(dim=1).values.mean().item(), rel=1e-5)
    assert metrics["distill_loss"] == pytest.approx(divergence.item(), rel=1e-5)
    total = metrics["td_loss"].item() + 3.0 * 0.25 * metrics["distill_loss"].item()
    assert metrics["loss"].item() == pytest.approx(total, rel=1e-5)
    agree = (q.argmax(1) == teacher.argmax(1)).float().mean()
    assert metrics["teacher_agreement"] == agree


def test_targets_stay_until_they_are_copied() -> None:
    learner = build()
    before = weights(learner.target)
    assert all(same(before, weights(learner.network)))
    train(learner, VECTOR, 3)
    assert all(same(before, weights(learner.target)))
    learner.sync_target()
    assert all(same(weights(learner.network), weights(learner.target)))


def test_epsilon_greedy() -> None:
    learner, obs = build(), batch_of(VECTOR, size=4000).obs
    with torch.no_grad():
        best = learner.network(obs).argmax(1)
    action, log_prob, _ = learner.act(obs, None, ActRule("greedy"))
    assert torch.equal(action, best)
    assert (log_prob == 0).all()
    action, log_prob, _ = learner.act(obs, None, ActRule("epsilon", 0.3))
    chosen = action == best
    assert chosen.float().mean().item() == pytest.approx(0.7 + 0.1, abs=0.03)
    torch.testing.assert_close(log_prob[chosen], torch.full((int(chosen.sum()),), math.log(0.8)))
    torch.testing.assert_close(log_prob[~chosen], torch.full((int((~chosen).sum()),), math.log(0.1)))


@pytest.mark.parametrize("double_q", [False, True])
def test_bfloat16_leaves_no_parameter_without_a_gradient(double_q: bool) -> None:
    """Weights that autocast casts under no_grad and keeps would cut the online network off."""
    exact, learner = (
        build(kind="atari", precision=precision, td__double_q=double_q, optimizer__adam_eps=1.0)
        for precision in ("fp32", "bf16")
    )
    for one in (exact, learner):
        train(one, ATARI, 1)
        assert all(value.grad.abs().sum() > 0 for value in one.network.parameters())
        assert all(value.dtype == torch.float32 for value in one.network.parameters())
    for reference, found in zip(exact.network.parameters(), learner.network.parameters(), strict=True):
        assert F.cosine_similarity(reference.grad.flatten(), found.grad.flatten(), dim=0) > 0.98


def test_images_are_stored_channels_last() -> None:
    learner = build(kind="atari")
    for network in (learner.network, learner.target):
        weight = network.state_dict()["trunk.sections.1.blocks.0.conv1.weight"]
        assert weight.is_contiguous(memory_format=torch.channels_last)
        assert not weight.is_contiguous()


# ------------------------------------------------------------ methods, registry, precision


def test_the_methods() -> None:
    scratch, qdagger = get_student("dqn"), get_student("qdagger-dqn")
    assert scratch.factory is qdagger.factory
    assert scratch.method == Method(needs_teacher=False, offline=False, distill=False)
    assert qdagger.method == Method(needs_teacher=True, offline=True, distill=True)


def test_unknown_students_are_answered_with_the_nearest_name() -> None:
    with pytest.raises(
        UserError, match=r"no student 'qdager-dqn' \(did you mean 'qdagger-dqn'\?\); known: dqn, q"
    ):
        get_student("qdager-dqn")


OWN = [
    EntryPoint("dqn", "reincarnate.students.dqn:SCRATCH", student.GROUP),
    EntryPoint("qdagger-dqn", "reincarnate.students.dqn:QDAGGER", student.GROUP),
]


def offer(monkeypatch: pytest.MonkeyPatch, **points: str) -> None:
    extra = [EntryPoint(name.split("__")[0], value, student.GROUP) for name, value in points.items()]
    monkeypatch.setattr(student.importlib.metadata, "entry_points", lambda group: [*extra, *OWN])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no_such_package:ENTRY", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("reincarnate.errors:NOTHING", "AttributeError"),
        ("math:pi", "math:pi is a float, not a StudentEntry"),
        ("reincarnate.students.dqn:SCRATCH", "its entry calls itself 'dqn'"),
    ],
)
def test_a_broken_package_breaks_nobody_else(
    monkeypatch: pytest.MonkeyPatch, value: str, message: str
) -> None:
    offer(monkeypatch, theirs=value)
    assert list(registry()) == ["dqn", "qdagger-dqn"]
    assert get_student("dqn") is dqn.SCRATCH
    with pytest.raises(UserError, match=f"student 'theirs' of .* cannot be used: {message}"):
        get_student("theirs")


def test_nobody_takes_our_names_and_two_packages_cannot_share_one(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, dqn="math:pi", new__1="math:pi", new__2="math:e")
    assert get_student("dqn") is dqn.SCRATCH
    assert list(registry()) == ["dqn", "qdagger-dqn"]
    with pytest.raises(UserError, match="both offer that name; uninstall one"):
        get_student("new")


@pytest.mark.parametrize("name", STUDENTS)
def test_precision_is_timed_for_images_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry: StudentEntry = get_student(name)
    timed: list[str] = []

    def choose(device: torch.device, work) -> str:
        for precision in ("fp32", "bf16"):
            work(precision)()
            timed.append(precision)
        return "bf16"

    monkeypatch.setattr(student, "choose_precision", choose)
    assert entry.choose_precision(config(), VECTOR, CPU) == "fp32"
    assert entry.choose_precision(config(system__precision="bf16"), VECTOR, CPU) == "bf16"
    assert entry.choose_precision(config(system__precision="fp32"), ATARI, CPU) == "fp32"
    assert timed == []
    assert entry.choose_precision(config(), ATARI, CPU) == "bf16"
    assert timed == ["fp32", "bf16"]
