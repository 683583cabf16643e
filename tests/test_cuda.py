"""What only a device can show: captured updates equal plain ones, nobody waits, nothing grows.

``pytest -m cuda`` is what to run on a GPU. Every test runs on the CPU too, where a Step is the plain
function: that tries the test itself, and takes long for whole runs (``-m slow``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from test_muesli_student import SMALL as SMALL_MUESLI
from torch.utils._pytree import tree_map_only

from reincarnate.device import WARM_UP_UPDATES, Step
from reincarnate.phases import Stopped
from reincarnate.replay import Replay, RowBatch
from reincarnate.runner import Run
from reincarnate.students.student import blank_batch, get_student, registry
from reincarnate.teachers.zoo import load_teacher
from reincarnate.types import EnvSpec

from small_runs import TEACHER, quiet, read, same_tensors, small_config, stopping, student_weights
from student_cases import ATARI, SPECS, config

_CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
)
_SLOW_CPU = pytest.param("cpu", marks=pytest.mark.slow)
on_devices = pytest.mark.parametrize("device", ["cpu", _CUDA])
on_devices_slowly = pytest.mark.parametrize("device", [_SLOW_CPU, _CUDA])
_IMAGES: dict[str, Any] = {
    "teacher": "bundled/Breakout-dqn",
    "env__max_agent_steps": 100,  # per game
    "evaluate__games": 1,
    "optimizer__batch_size": 8,
    "offline__updates": 30,
    "online__agent_steps": 200,
}
#: Runs that differ in what is captured: a buffer on the device or on the host, rows or sequences, an LSTM,
#: random numbers inside the update, convolutions.
RUNS: dict[str, dict[str, Any]] = {
    "dqn": {},
    "dqn from the host": {"system__buffer": "ram"},
    "dqn in bfloat16": {"system__precision": "bf16"},
    "muesli": SMALL_MUESLI,
    "muesli that samples": SMALL_MUESLI
    | {"muesli__core_units": None, "muesli__num_roots": 3, "muesli__cmpo_samples": 4},
    "dqn with nature": _IMAGES | {"network": "nature", "system__precision": "fp32"},
    "dqn with impala": _IMAGES | {"network": "impala", "system__precision": "fp32"},
}
each_run = pytest.mark.parametrize("name", RUNS)


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """One algorithm for each product, in float32 proper: runs that are the same give the same bits."""
    flags = torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    with mock.patch("reincarnate.prepare.tune"), flags:
        yield
    torch.set_float32_matmul_precision(before)


def execute(folder: Path, name: str, device: str) -> dict[str, torch.Tensor]:
    Run.start(small_config(**RUNS[name], system__device=device), folder, quiet()).execute()
    assert read(folder, "result.json")["device"].startswith(device)
    return student_weights(folder)


@contextlib.contextmanager
def instead_of_steps(call: Any) -> Iterator[None]:
    """``call(step, number)`` is what updates do; ``number`` counts the calls of a step from 0."""
    numbers: dict[Step, int] = {}  # the steps themselves are the keys: none is freed, and none mistaken

    def called(step: Step) -> None:
        number = numbers.setdefault(step, 0)
        numbers[step] += 1
        call(step, number)

    with mock.patch.object(Step, "__call__", called):
        yield


@on_devices_slowly
@each_run
def test_captured_updates_equal_plain_ones_bit_for_bit(
    name: str, device: str, cache: Path, tmp_path: Path
) -> None:
    """A whole run each: offline and online, copies of the target, a learning rate and an m that change."""
    captured = execute(tmp_path / "captured", name, device)
    with instead_of_steps(lambda step, number: step._function()):
        plain = execute(tmp_path / "plain", name, device)
    assert same_tensors(captured, plain)


@on_devices_slowly
@each_run
def test_no_update_makes_the_host_wait(name: str, device: str, cache: Path, tmp_path: Path) -> None:
    """A read inside an update raises; the first few settle the optimiser's lazy state."""
    guarded = 0

    def call(step: Step, number: int) -> None:
        nonlocal guarded
        if device == "cuda" and number >= 3:
            torch.cuda.set_sync_debug_mode("error")
        try:
            step._function()
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        guarded += number >= 3

    with instead_of_steps(call):
        execute(tmp_path / "run", name, device)
    assert guarded > 20


@on_devices_slowly
@each_run
def test_replays_take_no_more_memory(name: str, device: str, cache: Path, tmp_path: Path) -> None:
    original = Step.__call__
    sizes: dict[Step, list[int]] = {}

    def call(step: Step, number: int) -> None:
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        original(step)
        after = torch.cuda.memory_allocated() if device == "cuda" else 0
        sizes.setdefault(step, []).append(after - before)

    with instead_of_steps(call):
        execute(tmp_path / "run", name, device)
    assert max(map(len, sizes.values())) > WARM_UP_UPDATES
    assert all(set(grown[WARM_UP_UPDATES:]) <= {0} for grown in sizes.values())


@on_devices_slowly
@each_run
def test_what_a_graph_reads_outlives_it(name: str, device: str, cache: Path, tmp_path: Path) -> None:
    """PyTorch looks, at every replay, whether an input of the graph was freed."""
    if device == "cpu" or "check_input_liveness" not in inspect.signature(torch.cuda.graph).parameters:
        execute(tmp_path / "run", name, device)  # PyTorch before 2.13 does not look
        return
    watched = functools.partial(torch.cuda.graph, check_input_liveness=True)
    with mock.patch.object(torch.cuda, "graph", watched):
        execute(tmp_path / "run", name, device)


@on_devices_slowly
@pytest.mark.parametrize(
    ("name", "point"), [("dqn", 60), ("dqn with nature", 25), ("muesli that samples", 15)]
)
def test_a_stopped_run_goes_on_to_the_same_bits(
    name: str, point: int, device: str, cache: Path, tmp_path: Path
) -> None:
    """After replays: weights, optimiser, random numbers come back, and the update is captured anew."""
    assert point > WARM_UP_UPDATES
    whole = execute(tmp_path / "whole", name, device)
    folder = tmp_path / "stopped"
    with stopping(point=point), pytest.raises(Stopped):
        execute(folder, name, device)
    Run.resume(folder, quiet()).execute()
    assert same_tensors(whole, student_weights(folder))


@on_devices
@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("student", sorted(registry()))
def test_a_device_computes_what_the_cpu_does(student: str, kind: str, device: str) -> None:
    """Three updates from one state, to the accuracy of float32."""
    results = [_three_updates(student, kind, torch.device(where)) for where in ("cpu", device)]
    here, there = results
    assert here.keys() == there.keys()
    for name, value in here.items():
        torch.testing.assert_close(there[name], value, rtol=2e-3, atol=2e-5, msg=name)


def _three_updates(name: str, kind: str, device: torch.device) -> dict[str, torch.Tensor]:
    entry, spec, torch_cpu = get_student(name), SPECS[kind], torch.device("cpu")
    # Adam's first steps are as large for a gradient of 1e-9 as for one of 1: a large eps makes them tell.
    settings = config(student=name, optimizer__adam_eps=1e-2, muesli__sequence_length=6)
    first = entry.factory(settings, spec, torch_cpu, "fp32", torch.Generator().manual_seed(0))
    student = entry.factory(settings, spec, device, "fp32", torch.Generator(device).manual_seed(0))
    student.load_state_dict(tree_map_only(torch.Tensor, lambda value: value.to(device), first.state_dict()))
    batch = blank_batch(student.batch_spec, 6, spec, torch_cpu)
    drawn = np.random.default_rng(0)
    values = {
        "obs": drawn.integers(0, 256, batch.obs.shape)
        if spec.kind == "atari"
        else drawn.normal(size=batch.obs.shape),
        "reward": drawn.normal(size=batch.reward.shape),
        "action": drawn.integers(0, spec.num_actions, batch.action.shape),
        "teacher_outputs": drawn.normal(size=batch.teacher_outputs.shape),
    }
    filled = {key: torch.as_tensor(value).to(getattr(batch, key).dtype) for key, value in values.items()}
    batch = dataclasses.replace(batch, **filled)
    moved = type(batch)(**{k: v if v is None else v.to(device) for k, v in vars(batch).items()})
    advice = torch.log_softmax(moved.teacher_outputs, dim=-1) if entry.method.distill else None
    metrics: dict[str, torch.Tensor] = {}
    for _ in range(3):
        metrics = student.update(moved, advice, torch.ones((), device=device))
    found = {f"metric {key}": value for key, value in metrics.items()} | student.network.state_dict()
    return {key: value.detach().cpu() for key, value in found.items()}


@pytest.mark.parametrize("device", [_SLOW_CPU, _CUDA])
def test_frames_beyond_two_gigabytes_are_where_they_belong(device: str) -> None:
    """Past frame 304,348 a byte offset exceeds 2^31: an int32 on the way would read another frame."""
    spec, lanes = EnvSpec("Breakout-v5", "atari", 4, (4, 84, 84)), 512
    steps = 2**31 // (84 * 84 * lanes) + 12
    replay = Replay(spec, lanes, steps * lanes, n_step=1, discount=0.9, device=torch.device(device))
    for step in range(steps):
        replay.add(np.arange(lanes), _rows(step, lanes, device))
    for step in (7, steps - 3):
        lane = torch.arange(lanes, device=device)
        batch = replay.gather(step * lanes + lane)
        newest = batch.obs[:, -1].flatten(1).cpu()
        assert (newest == (step % 251 + lane.cpu() % 5)[:, None].to(torch.uint8)).all()


def _rows(step: int, lanes: int, device: str) -> RowBatch:
    frames = np.empty((lanes, 84, 84), dtype=np.uint8)
    frames[:] = (step % 251 + np.arange(lanes) % 5)[:, None, None]
    zeros, no = np.zeros(lanes, dtype=np.float32), np.zeros(lanes, dtype=np.bool_)
    return RowBatch(
        frame=frames,
        action=torch.zeros(lanes, dtype=torch.int64, device=device),
        reward=zeros,
        raw_reward=zeros,
        terminal=no,
        truncated=no,
        executed=~no,
        game_start=no if step else ~no,
        teacher_outputs=torch.zeros((lanes, 4), device=device),
        behaviour_log_prob=torch.zeros(lanes, device=device),
        epsilon=zeros,
    )


@on_devices
def test_a_teacher_acts_alike_on_every_device(device: str) -> None:
    here, there = (load_teacher(TEACHER, device=torch.device(where)) for where in ("cpu", device))
    obs = torch.randn(200, *here.spec.env.obs_shape, generator=torch.Generator().manual_seed(0)) * 0.1
    ours, theirs = here.outputs(obs), there.outputs(obs.to(device)).cpu()
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)
    clear = ours.topk(2).values.diff().abs().squeeze(1) > 1e-3
    assert torch.equal(theirs.argmax(1)[clear], ours.argmax(1)[clear])


@pytest.mark.parametrize("name", sorted(registry()))
def test_what_is_timed_registers_what_it_draws_from(name: str) -> None:
    """A capture that draws from a generator it does not know fails: the trial of a precision, too."""
    entry, made = get_student(name), []

    def factory(*arguments: Any) -> Any:
        made.append(arguments[-1])
        return entry.factory(*arguments)

    spied = dataclasses.replace(entry, factory=factory)
    step = spied.trial_step(config(student=name), ATARI, torch.device("cpu"), "fp32")
    step()
    assert list(step._generators) == made
