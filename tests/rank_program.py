"""What one of two ranks does in a test: ``rank_program.py SCENARIO[,...] FOLDER``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from reincarnate.errors import UserError
from reincarnate.phases import Stopped, evaluation
from reincarnate.ranks import Ranks, digest
from reincarnate.runner import Run
from reincarnate.team import PeerEnded, connect
from reincarnate.types import Batch

import student_cases as cases
from small_runs import quiet, small_config, stopping


def part(batch: Batch, rows: slice) -> Batch:
    return Batch(**{name: value[rows] for name, value in vars(batch).items()})


def updates(ranks: Ranks, folder: Path) -> None:
    """The same batches for one student that gets them whole, and for one that is trained by both ranks."""
    found: dict[str, Any] = {}
    for kind, spec in cases.SPECS.items():
        whole, shared = cases.build(kind=kind), cases.build(kind=kind)
        rows = slice(6 * ranks.rank, 6 * ranks.rank + 6)
        for i in range(8):
            batch = cases.batch_of(spec, size=12, seed=i)
            whole.update(batch, cases.advice(batch), torch.tensor(0.5))
            mine = part(batch, rows)
            with ranks.averaging():
                shared.update(mine, cases.advice(mine), torch.tensor(0.5))
        found[kind] = {"whole": cases.weights(whole.network), "shared": cases.weights(shared.network)}
        found[kind]["digest"] = digest(shared.network.parameters())
        found[kind]["start"] = cases.weights(cases.build(kind=kind).network)
    torch.save(found, folder / f"updates-{ranks.rank}.pt")


def meetings(ranks: Ranks, folder: Path) -> None:
    """Every way in which ranks exchange something."""
    rank = ranks.rank
    asked = [ranks.agree(stop=rank == 1 and i == 3, save=False) for i in range(2_000)]
    saves = [ranks.agree(stop=False, save=i == 3) for i in range(2_000)]
    others = [ranks.agree(stop=False, save=rank == 1) for i in range(2_000)]
    learner = cases.build()
    learner_state = {"network": learner.network.state_dict()}
    with torch.no_grad():
        next(iter(learner_state["network"].values())).fill_(float(rank))
    found = {
        "stops": sum(stop for stop, _ in asked),
        "saves": sum(save for _, save in saves),
        "saves of others": sum(save for _, save in others),
        "rows": [ranks.gather_rows([rank, 0.1][: 1 + rank], 2), ranks.gather_rows([0.1 + 0.2], 5)],
        "all": [ranks.all(True), ranks.all(rank == 0), ranks.all(False)],
        "gather": ranks.gather({"rank": rank}),
        "lead": ranks.lead(lambda: f"from {rank}"),
        "first": float(next(iter(ranks.from_first(learner_state, cases.CPU)["network"].values())).mean()),
    }
    try:
        with ranks.averaging():
            pass  # a student that shares nothing
    except UserError as error:
        found["refused"] = str(error)
    torch.save(found, folder / f"meetings-{rank}.pt")


def stopped(run: Run) -> None:
    try:
        run.execute()
    except Stopped:
        return
    raise AssertionError("it was to stop")


def small(**changes: Any) -> Any:
    return small_config(env__num_envs=2, **changes)


def whole_run(ranks: Ranks, folder: Path) -> None:
    """One without interruption; one that rank 1 stops in the offline phase; one, in the online phase."""
    Run.start(small(), folder / "whole", quiet(), ranks).execute()

    with stopping(40, rank=1):
        stopped(Run.start(small(), folder / "offline", quiet(), ranks))
    Run.resume(folder / "offline", quiet(), ranks).execute()

    run = Run.start(small(), folder / "online", quiet(), ranks)
    with stopping(200, rank=1):
        stopped(run)
    again = Run.resume(folder / "online", quiet(), ranks)
    compared = {"equal": equal(run, again), "seed": run.stage.sampler.generator.initial_seed()}
    compared["held"] = run.record.student_data.agent_steps if run.record.student_data else 0
    compared["frames"] = drawn(run).obs
    compared["stopped at"] = run.record.online.agent_steps
    again.execute()
    compared["m"] = again.record.coefficient.state_dict() if again.record.coefficient else None
    torch.save(compared, folder / f"online-{ranks.rank}.pt")


def drawn(run: Run) -> Batch:
    assert run.record.student_data is not None
    return run.record.student_data.sample(64, torch.Generator().manual_seed(0))


def equal(old: Run, new: Run) -> dict[str, bool]:
    """What a resumed run has of the one that was stopped."""
    weights = zip(old.stage.student.network.parameters(), new.stage.student.network.parameters(), strict=True)
    counters = [replace(run.record.online, seconds=0.0) for run in (old, new)]  # those are of rank 0's clock
    m, again = old.record.coefficient, new.record.coefficient
    return {
        "counters": counters[0] == counters[1],
        "window": m is not None and again is not None and m.state_dict() == again.state_dict(),
        "weights": all(torch.equal(a, b) for a, b in weights),
        "actions": torch.equal(old.stage.generator.get_state(), new.stage.generator.get_state()),
        "batches": torch.equal(old.stage.sampler.get_state(), new.stage.sampler.get_state()),
        "rows": all(torch.equal(value, vars(drawn(new))[name]) for name, value in vars(drawn(old)).items()),
    }


def stopped_evaluation(ranks: Ranks, folder: Path) -> None:
    """Rank 1 is asked to stop while both evaluate; rank 0 hears of it."""
    run = Run.start(small(evaluate__games=400), folder / "run", quiet(), ranks)
    if ranks.rank == 1:
        run._stop.set()
    stopped(run)
    torch.save(run.stage.teacher_return, folder / f"evaluation-{ranks.rank}.pt")
    torch.save(run.record.finished, folder / f"finished-{ranks.rank}.pt")


def failing(ranks: Ranks, folder: Path) -> None:
    """Rank 1 fails in an evaluation, for which rank 0 waits patiently."""

    def broken(*arguments: Any, **more: Any) -> Any:
        raise RuntimeError("a fault of rank 1 alone")

    run = Run.start(small(), folder / "run", quiet(), ranks)
    if ranks.rank == 1:
        with mock.patch.object(evaluation, "_play", broken):
            run.execute()
    try:
        run.execute()
    except PeerEnded as error:
        (folder / "told").write_text(str(error))
        raise


SCENARIOS: dict[str, Callable[[Ranks, Path], None]] = {
    "updates": updates,
    "meetings": meetings,
    "whole_run": whole_run,
    "stopped_evaluation": stopped_evaluation,
    "failing": failing,
}

if __name__ == "__main__":
    with connect() as team:
        for name in sys.argv[1].split(","):
            SCENARIOS[name](team, Path(sys.argv[2]))
