"""The model card: README.md beside ``student.safetensors``, with the metadata that the Hub shows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from reincarnate.report.page import (
    normalised,
    number,
    settings_read,
    shares,
    teacher_rows,
    teacher_title,
    verdict,
)
from reincarnate.report.rundir import RunData, short_path
from reincarnate.types import Returns

_PAPER = (
    "Rishabh Agarwal, Max Schwarzer, Pablo Samuel Castro, Aaron Courville, Marc G. Bellemare: "
    "*Reincarnating Reinforcement Learning: Reusing Prior Computation to Accelerate Progress*, NeurIPS 2022, "
    "<https://arxiv.org/abs/2206.01626>"
)
_SETTINGS = ("preset", "seed", "collect.", "offline.", "online.", "td.", "distill.", "optimizer.", "muesli.")


def card(run: RunData, *, repo: str | None = None, chain: Sequence[Mapping[str, Any]] = ()) -> str:
    """Markdown with YAML front matter; ``mean_reward`` is the last evaluation's.

    ``repo`` is the Hub repository that the card is for, if there is one; ``chain`` its ``lineage.json``.
    """
    student, teacher = run.result["student"]["name"], run.result["teacher"]
    about = "trained without a teacher"
    if teacher:
        ref = code(short_path(teacher["ref"]))
        from_scratch = f"trained from scratch and measured beside the teacher {ref}"
        about = f"reincarnated from the teacher {ref}" if run.reincarnated else from_scratch
    sections = [
        f"# {_line(student)} on {_line(run.result['env'])}",
        f"A {code(student)} agent that plays {code(run.result['env'])}, {about} with "
        f"`reincarnate` {_line(run.result['versions'].get('reincarnate', ''))}. {_line(verdict(run))}",
        "## Return",
        _returns(run),
        _how_measured(run),
        "## Environment",
        _bullets([(name, value) for name, value in run.env.items() if name != "kind"]),
        *_teacher(run),
        *_lineage(chain),
        "## Use it",
        _use(run, repo),
        "## Training",
        _training(run),
    ]
    return f"---\n{_front_matter(run)}\n---\n\n" + "\n\n".join(sections) + "\n"


def _front_matter(run: RunData) -> str:
    """YAML as agents on the Hub have it, written by the Hub's own library."""
    from huggingface_hub import EvalResult, ModelCardData

    env, student = run.result["env"], run.result["student"]["name"]
    measured = _last(run)
    results = (
        []
        if measured is None
        else [
            EvalResult(
                task_type="reinforcement-learning",
                task_name="reinforcement-learning",
                dataset_type=env,
                dataset_name=env,
                metric_type="mean_reward",
                metric_name="mean_reward",
                metric_value=f"{measured.mean:.2f} +/- {measured.std:.2f}",
                verified=False,
            )
        ]
    )
    method = ["reincarnating-rl"] if run.reincarnated else []
    tags = [env, "reinforcement-learning", "deep-reinforcement-learning", *method, student]
    teacher = (run.teacher or {}) if run.reincarnated else {}
    data = ModelCardData(
        base_model=teacher["resolved"] if teacher.get("revision") else None,  # only the Hub has revisions
        library_name="reincarnate",
        pipeline_tag="reinforcement-learning",
        tags=tags,
        model_name=student,
        eval_results=results or None,
    )
    return data.to_yaml()


def _last(run: RunData) -> Returns | None:
    return run.returns("final") or run.returns("offline")


def _returns(run: RunData) -> str:
    student = run.result["student"]["name"]
    labels = {
        "final": f"{_line(student)} after {run.moment('final')}",
        "offline": f"{_line(student)} after {run.moment('offline')}",
        "teacher": "its teacher" if run.reincarnated else "the teacher beside it",
        "random": "random policy",
    }
    head = ("mean return", "95 % interval", "std", "games", *run.scales)
    rows = [f"| | {' | '.join(head)} |", f"|---{'|---' * len(head)}|"]
    for name, label in labels.items():
        returns = run.returns(name)
        if returns is not None:
            low, high = map(number, returns.ci95)
            cells = (
                label,
                number(returns.mean),
                f"{low} to {high}",
                number(returns.std),
                str(returns.n),
                *shares(run, name),
            )
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _how_measured(run: RunData) -> str:
    teacher = run.result["teacher"]
    rules = f"The student acts by {code(run.result['student']['act'])}"
    if teacher and teacher.get("act"):
        rules += f", the teacher by {code(teacher['act'])}"
    measured = (
        f"{rules}. Returns are undiscounted raw scores of whole games, none cut short but by the game's own "
        "limit; every environment plays the same number of games; the interval is a bootstrap over games."
    )
    return " ".join((measured, *normalised(run)))


def _teacher(run: RunData) -> list[str]:
    rows = teacher_rows(run)
    return [f"## {teacher_title(run)}", _bullets(rows)] if rows else []


def _lineage(chain: Sequence[Mapping[str, Any]]) -> list[str]:
    """The generations, oldest first; one alone needs no list."""
    if len(chain) < 2:
        return []
    rows = []
    for number_, entry in enumerate(chain, 1):
        measured = entry["return"]
        mean = (
            "not measured" if measured is None else f"{number(measured['mean'])} over {measured['n']} games"
        )
        sha256 = code(str(entry["sha256"])[:12])
        rows.append(f"{number_}. {code(entry['name'])}: {code(entry['algorithm'])}, {mean}, sha256 {sha256}")
    return ["## Lineage", "\n".join(rows)]


def _use(run: RunData, repo: str | None) -> str:
    shape = "[B, ...]" if run.spec is None else f"[B, {', '.join(map(str, run.env['obs_shape']))}]"
    outputs = "Q-values" if run.spec is None or run.spec.get("outputs") == "q_values" else "policy logits"
    told = (
        "" if repo else "FOLDER is the folder of this file, or the Hub repository that it was pushed to.\n\n"
    )
    place = repo or "FOLDER"
    recurrent = run.spec is not None and run.spec.get("network_options", {}).get("core") is not None
    use = "agent.outputs(obs)"
    if recurrent:
        use = "agent.step(obs, agent.initial_state(B))[0]"
    return f"""{told}```
reincarnate teachers eval {place}
reincarnate run --teacher {place} --student qdagger-dqn
```

```python
import reincarnate

agent = reincarnate.load_teacher("{place}")
print(reincarnate.evaluate_teacher(agent, episodes=32).returns)
outputs = {use}  # observations {shape} -> {outputs} [B, actions]
```"""


def _training(run: RunData) -> str:
    phases = run.result["phases"]
    amounts = (
        ("teacher agent steps collected", phases["collect"].get("agent_steps")),
        ("offline updates", phases["offline"].get("updates")),
        ("online agent steps", phases["online"].get("agent_steps")),
        ("online updates", phases["online"].get("updates")),
    )
    rows: list[tuple[str, Any]] = [(name, f"{amount:,}") for name, amount in amounts if amount]
    if run.spec is not None:
        rows.append(("network", run.spec.get("network")))
    rows += [(name, value) for name, value in settings_read(run) if name.startswith(_SETTINGS)]
    rows += [(name, run.result[name]) for name in ("device", "precision")]
    rows += list(run.result["versions"].items())
    method = f"\n\nThe method is QDagger: {_PAPER}." if run.reincarnated else ""
    return _bullets(rows) + method


def _bullets(rows: list[tuple[str, Any]]) -> str:
    shown = ((name, short_path(value) if isinstance(value, str) else value) for name, value in rows)
    return "\n".join(f"- {_line(name)}: {code(value)}" for name, value in shown)


def code(value: Any) -> str:
    """As Markdown code on one line; a value cannot break out of it."""
    text = " ".join(str(value).split()) or " "
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    space = " " if longest else ""
    return f"{fence}{space}{text}{space}{fence}"


def _line(value: Any) -> str:
    """As plain Markdown text on one line."""
    text = re.sub(r"([\\`*{}\[\]<>#|!&])", r"\\\1", " ".join(str(value).split()))
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\_", text)  # inside a word it means nothing
