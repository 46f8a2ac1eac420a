"""Every benchmark writes its tables, at a tiny size; and the rules that its claims rest on.

Nobody runs the benchmarks in CI: they take hours, need other libraries or a GPU. Here each of them
runs once with few seeds and steps, where possible in this process. Other libraries and CUDA have
stand-ins. The numbers mean nothing, but a benchmark that no longer fits the package fails."""

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import io
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import acting
import law
import noise_dumps
import numpy as np
import pytest
import results
import small_decoder
import tasks
import torch
from helpers import TINY, bang_bang, small
from matplotlib.figure import Figure
from PIL import Image
from results import Journal

from fp8rl.config import Config
from fp8rl.dumps.mismatch import MEANING
from fp8rl.dumps.symptoms import BITS_LEFT
from fp8rl.history import History
from fp8rl.sequences import laboratory

BENCHMARKS = results.ROOT / "benchmarks"
SHORT = {"steps": 128, "eval_every": 0, "eval_episodes": 2} | TINY  # two iterations
QUICK = {"num_envs": 4, "rollout_length": 4, "slice_length": 4, "batch_size": 16}
QUICK |= {"replay_updates": 1, "eval_episodes": 2}


# A run of every benchmark


def config_class(**defaults) -> type[Config]:
    """Config with other defaults."""
    fields = [(name, type(value), value) for name, value in defaults.items()]
    return dataclasses.make_dataclass("TinyConfig", fields, bases=(Config,), frozen=True)


def replacing(steps: int) -> SimpleNamespace:
    """Stands in for `dataclasses`. Its `replace`, which makes untrained agents, takes fewer steps."""
    return SimpleNamespace(
        replace=lambda config, **fields: dataclasses.replace(config, **fields | {"steps": steps})
    )


class OneProcess:
    """Stands in for `multiprocessing.get_context(...)`: its pool works in this process."""

    @contextlib.contextmanager
    def Pool(self, *_, **__):
        yield SimpleNamespace(imap_unordered=map)


IN_ONE_PROCESS = SimpleNamespace(get_context=lambda _: OneProcess())


def other_library(algorithm: str, config: Config) -> History:
    """Stands in for zoo.train, which needs Stable-Baselines3."""
    history = History()
    every = config.eval_every or config.steps
    for i, steps in enumerate(range(every, config.steps + 1, every)):
        history.add({"iteration": i, "steps": steps, "seconds": i + 1.0, "eval_return": 10.0 * i})
    return history


def short_tasks(module, monkeypatch) -> None:
    """The benchmark `tasks`, with short trainings and without Stable-Baselines3."""
    found = {task: (8000, 32, 16, goal) for task, (*_, goal) in tasks.TASKS.items()}
    of_seeds = tasks.configs_of
    is_there = SimpleNamespace(find_spec=lambda name: True)
    monkeypatch.setattr(tasks.zoo, "train", other_library)
    for name, value in {
        "Config": config_class(**QUICK),
        "TASKS": found,
        "best_of": {tasks.CART: 199.0, tasks.LQR: -5.0}.get,
        "importlib": SimpleNamespace(util=is_there),
        "configs_of": lambda *arm: of_seeds(*arm)[:2],
        "through_gymnasium": lambda config: other_library("", config),
        "mark_of": functools.cache(tasks.mark_of.__wrapped__),  # of these settings
    }.items():
        monkeypatch.setattr(tasks, name, value)


def few_experiments(module, monkeypatch) -> None:
    setting = module.Setting(updates=20, batch=8, units=8, start=0.01)
    first = {32: module.arms_of({"e8m3": module.ENDS})}
    others = {32: module.arms_of({"fp8": module.ENDS})}
    experiments = {
        "first": module.Experiment(setting, range(2), first),
        "other formats": module.Experiment(setting, range(1000, 1002), others),
    }
    monkeypatch.setattr(module, "SHORT", {"first": "recurrent"})
    monkeypatch.setattr(module, "EXPERIMENTS", experiments)
    monkeypatch.setattr(laboratory, "MOST_PRETRAINING", 20)
    # So few updates may end without any success, of which there would be no shares
    rewards = module.Laboratory.learner_rewards
    more = lambda *arguments: rewards(*arguments) + 0.01  # noqa: E731
    monkeypatch.setattr(module.Laboratory, "learner_rewards", more)


def acting_in_steps(module, out: Path) -> None:
    module.RESULTS = out
    for command, name in {"first": "first", "predict": "predicted", "measure": "measured"}.items():
        module.main([command, str(out / f"acting_{name}.csv")])
    module.main(["table", str(out / "acting.md")])


def few_rules(module, monkeypatch) -> None:
    """Every rule in one small setting; without trainings that end without any success."""
    setting = module.TWO_LAYERS._replace(updates=20, batch=8, units=8, length=4, start=0.01)
    experiments = {
        "attention": module.Experiment(setting, range(2000, 2002), {4: module.EVERY_RULE}),
        "attention, 4 minibatches": module.Experiment(
            setting._replace(minibatches=2),
            range(2000, 2002),
            {4: module.IN_MINIBATCHES},
        ),
    }
    monkeypatch.setattr(module, "EXPERIMENTS", experiments)
    monkeypatch.setattr(laboratory, "MOST_PRETRAINING", 20)
    rewards = module.Laboratory.learner_rewards
    more = lambda *arguments: rewards(*arguments) + 0.01  # noqa: E731
    monkeypatch.setattr(module.Laboratory, "learner_rewards", more)


def stack_rules_in_steps(module, out: Path) -> None:
    module.RESULTS = out
    module.main(["measure", str(out / "stack_rules_measured.csv")])
    found = Journal(out / "stack_rules_measured.csv", module.FIELDS).rows()
    assert len(found) == 2 * (len(module.EVERY_RULE) + len(module.IN_MINIBATCHES))
    module.main(["measure", str(out / "stack_rules_measured.csv")])  # nothing is left to do
    assert Journal(out / "stack_rules_measured.csv", module.FIELDS).rows() == found
    predicted = [{**row, "predicted": 0.1, "why": "a guess"} for row in found[2::2]]
    lines = [{name: row[name] for name in module.PREDICTED} for row in predicted]
    Journal(out / "stack_rules_predicted.csv", module.PREDICTED).write(lines)
    module.main(["table", str(out / "stack_rules.md")])


def stubbed_scripts(module, monkeypatch) -> None:
    """Trainings that only print."""

    def run(words: list[str], **_) -> SimpleNamespace:
        if words[2] == "watch":
            finding = {"place": "weights", "format": "e4m3", "verdict": "slower", "rate": 0.2}
            report = {"optimizers": [{"findings": [finding]}]}
            Path(words[4]).write_text(json.dumps(report))
        reached = 20 if {"keep", "train"} & {*words} else 100
        printed = f"global_step=1, episodic_return=[{reached}]"
        return SimpleNamespace(returncode=0, stdout=printed, stderr="")

    ppo = module.SCRIPTS["ppo, CartPole"]._replace(seeds=(1,))
    monkeypatch.setattr(module, "SCRIPTS", {"one": ppo, "another": ppo})
    monkeypatch.setattr(module, "subprocess", SimpleNamespace(run=run))


def strangers_in_steps(module, out: Path) -> None:
    module.main(["run", str(out / "strangers.csv"), "--cleanrl", str(out)])
    module.main(["table", str(out / "strangers.md")])
    assert "this holds in 2 of 2" in (out / "strangers.md").read_text()


def stubbed_stacks(module, monkeypatch) -> None:
    """Trainings that only print: bfloat16 stands still, and the doctor says so."""

    def output_of(script, clone, seed, doctor) -> str:
        if doctor[:1] == ["watch"]:
            findings = [
                {
                    "place": stack.partition("=")[0],
                    "format": stack.partition("=")[2],
                    "verdict": "stalls" if "model" in stack else "as float32",
                    "rate": 0.1,
                    "last": None,
                    "longest_step": 2.0,
                    "bytes_per_parameter": 6.0,
                }
                for stack in module.STACKS
            ]
            report = {"optimizers": [{"findings": findings}]}
            Path(doctor[-1]).write_text(json.dumps(report))
        reached = 20 if doctor == ["keep", "model=bf16"] else 100
        return f"global_step=1, episodic_return=[{reached}]"

    ppo = module.SCRIPTS["ppo, CartPole"]
    scripts = {"one": ppo, "another": ppo._replace(chosen=False)}
    monkeypatch.setattr(module, "SCRIPTS", scripts)
    monkeypatch.setattr(module, "output_of", output_of)


def stacks_in_steps(module, out: Path) -> None:
    journal = str(out / "stacks_in_scripts.csv")
    for command in ("train", "watch", "watch"):  # which goes on where it ended
        module.main([command, journal, "--cleanrl", str(out)])
    module.main(["table", str(out / "stacks_in_scripts.md")])
    text = (out / "stacks_in_scripts.md").read_text()
    assert "4 of 4; a lookup" in text


def few_characters(module, monkeypatch) -> None:
    numbers = torch.arange(1_000) % 5
    monkeypatch.setattr(module, "characters", lambda: (numbers, numbers, 5))


def few_dumps(module, monkeypatch) -> None:
    shapes = module.Shape("recurrent", 8, 8), module.Shape("attention", 8, 8)
    monkeypatch.setattr(module, "CHOSEN_ON", shapes[:1])
    monkeypatch.setattr(module, "REPORTED_ON", shapes)
    monkeypatch.setattr(module, "ROUNDINGS", [module.ROUNDINGS[0], module.E4M3])
    imitate = module.Policies.imitate
    monkeypatch.setattr(module.Policies, "imitate", lambda policies, _: imitate(policies, 1))


def dumps_in_steps(module, out: Path) -> None:
    module.main(["choose"])
    module.main(["report", str(out / "dumps.md")])


def saved_dump(path: Path, dump, **facts) -> None:
    """Saves a dump without a model as decoder_dumps.py does."""
    arrays = {"learner_logp": dump.learner_logp, "actor_logp": dump.actor_logp, "mask": dump.mask}
    facts = {"what": path.stem, "claims": "", "actor": "bf16", "learner": "bf16"} | facts
    np.savez(path, **arrays, truth=np.array([dump.bug or "sound"]), **facts)


def three_dumps_of_a_decoder(module, out: Path) -> None:
    """Two sound dumps, and one with a temperature."""
    folder = out / "decoder"
    (folder / "dumps").mkdir(parents=True)
    about = {"parameters": 1, "seed": 1, "steps": 1, "seconds": 1.0, "loss": 1.0, "versions": {}}
    (folder / "about.json").write_text(json.dumps(about))
    shape = noise_dumps.DumpShape(32, 32, True)
    for seed, size in enumerate((0.001, 0.01)):
        dump = noise_dumps.sound_dump(shape, "Gaussian", size, seed, False)
        saved_dump(folder / f"dumps/{seed}.npz", dump, claims="bf16")
    bug = noise_dumps.buggy_dump("temperature", shape, "Gaussian", 0.01, 0)
    saved_dump(folder / "dumps/2.npz", bug)
    module.main(["judge", str(folder), str(out / "decoder_dumps.md")])
    short = (out / "decoder_dumps_short.md").read_text()
    assert "| the report | 1 of 1 | 1 of 1 | 0 of 1 | 0 of 2 | 0 of 2 | 0 of 2 | 0 of 0 |" in short
    assert "| always rounding | 0 of 1 | - | - | 0 of 2 | - | 0 of 2 |" in short
    text = (out / "decoder_dumps.md").read_text()
    assert "| 2 | temperature | yes | bug: temperature | bug: temperature |" in text


def one_stack(module, monkeypatch) -> None:
    """One line of torch alone: the others compile for minutes."""

    def line(section) -> None:
        training = module.Training(module.constant(1.0), 64)
        make = module.adam(lr=3e-3)
        in_bf16 = module.mean_at_end(training, make, module.BF16)
        in_float32 = module.mean_at_end(training, make)
        says = training.doctor(make, "model=bf16:loop")
        section.add("torch", "Adam, bf16", "weight", in_bf16, in_float32, says)

    monkeypatch.setattr(module, "SECTIONS", {"torch": line})


def no_releases(module, monkeypatch) -> None:
    """No release is downloaded."""
    monkeypatch.setattr(module, "fetch", lambda folder: {"trl": module.Release(folder)})
    monkeypatch.setattr(module, "STACKS", {"a stack": ("trl", lambda releases: module.QUESTIONS)})


class Run(NamedTuple):
    """The smallest run of a benchmark.

    `files`    what it writes, with some columns of the tables in it
    `sizes`    constants of its module, replaced
    `prepare`  what else is replaced, from the module and monkeypatch
    `call`     runs it, from the module and a folder; None: its main function, with the first file
    `module`   its name; None: that of the run
    """

    files: dict[str, set[str]]
    sizes: dict = {}
    prepare: Callable = lambda module, monkeypatch: None
    call: Callable | None = None
    module: str | None = None


RUNS = {
    "tasks": Run(
        {
            "tasks.md": {"task", "arm", "median score"},
            "tasks_short.md": {"FP8"},
            "tasks_replay.md": {"task", "17 updates on the new rollout"},
            "tasks.png": set(),
        },
        prepare=short_tasks,
        # Not the module of this run: others import it, and it was prepared
        call=lambda module, out: tasks.main(
            out / "tasks.md",
            [tasks.CART, tasks.CARTPOLE, "LunarLander-v3"],
            list(tasks.ARMS),
            False,
        ),
    ),
    "film": Run(
        {"film.gif": set(), "curves.png": set()},
        {"Config": config_class(**SHORT), "SEEDS": range(5000, 5001), "FRAMES": 2},
        call=lambda module, out: module.main(out),
    ),
    "characters": Run(
        {"characters.md": {"kept", "stored, bytes a parameter"}, "characters.png": set()},
        {"UPDATES": 2, "EVERY": 1, "SEEDS": 1, "UNITS": 8},
        few_characters,
    ),
    "strangers": Run(
        {"strangers.md": {"the doctor, from seed 1", "lost", "the twin lost"}},
        {"FORMATS": ("weights=e4m3",)},
        stubbed_scripts,
        strangers_in_steps,
    ),
    "stacks_in_scripts": Run(
        {"stacks_in_scripts.md": {"real optimizer", "float32", "with it", "held"}},
        {"STACKS": ("model=bf16", "optimizer=torchao-8bit")},
        stubbed_stacks,
        stacks_in_steps,
    ),
    "acting": Run(
        {"acting.md": {"T / H", "Spearman: T / H", "dead prompts"}, "acting.png": set()},
        {"multiprocessing": IN_ONE_PROCESS, "RESULTS": None, "WATCHED": [900]},
        few_experiments,
        acting_in_steps,
    ),
    "stack_rules": Run(
        {"stack_rules.md": {"AReaL, default", "silent prompts", "nothing is lost"}},
        {"multiprocessing": IN_ONE_PROCESS, "RESULTS": None},
        few_rules,
        stack_rules_in_steps,
        "stack_rules_in_lab",
    ),
    "dumps": Run(
        {"dumps.md": {"planted bug", "called a bug", "without advantages", "stale copy"}},
        {"POLICIES": 1, "SEQUENCES": 24, "BATCH": 16, "TOKENS": 6, "UPDATES_OF_POLICY": 8},
        few_dumps,
        dumps_in_steps,
    ),
    "decoder_dumps": Run(
        {
            "decoder_dumps.md": {"rule", "what is done", "truth", "with a precision"},
            "decoder_dumps_short.md": {"rule", "sound, called a bug"},
        },
        call=three_dumps_of_a_decoder,
    ),
    "real_stacks": Run(
        {"real_stacks.md": {"what is run", "in few bits", "in float32", "the doctor"}},
        prepare=one_stack,
    ),
    "stack_defaults": Run(
        {"stack_defaults.md": {"", "a stack"}},
        prepare=no_releases,
    ),
}


def imported(name: str):
    """A benchmark as a module. Python itself has a module called codecs."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def heads_of(path: Path) -> set[str]:
    """The columns of all tables in a file, each of which has a row."""
    lines = path.read_text().splitlines()
    rules = [i for i, line in enumerate(lines) if line.startswith("| --- ")]
    assert rules and all(lines[i + 1].startswith("| ") for i in rules), path
    return {cell.strip() for i in rules for cell in lines[i - 1].split("|")}


def touch(figure: Figure, file, **_) -> None:
    """Makes a figure's file, which is empty: drawing takes long."""
    Path(file).touch()


@pytest.mark.parametrize("name", RUNS)
def test_a_benchmark_writes_its_tables(name, one_process, monkeypatch, tmp_path):
    run = RUNS[name]
    module = imported(run.module or name)
    for package in getattr(module, "PACKAGES", ()):
        pytest.importorskip(package, reason=f"{name} needs benchmarks/requirements.txt")
    monkeypatch.setattr(Figure, "savefig", touch)
    for constant, value in run.sizes.items():
        assert hasattr(module, constant)
        setattr(module, constant, value)
    run.prepare(module, monkeypatch)
    first = tmp_path / next(iter(run.files))
    if run.call:
        run.call(module, tmp_path)
    else:
        module.main(first)
    for file, columns in run.files.items():
        path = tmp_path / file
        assert path.exists()
        if path.suffix == ".md":
            assert columns <= heads_of(path) and " on " in path.read_text().splitlines()[-1]


def test_an_algorithm_of_stable_baselines3_is_evaluated_at_every_multiple_and_at_the_end():
    model = SimpleNamespace(
        num_timesteps=0,
        n_envs=8,
        action_space=SimpleNamespace(),
        get_vec_normalize_env=lambda: None,
        predict=lambda obs, deterministic: (bang_bang(torch.from_numpy(obs)).numpy(), None),
    )
    evaluator = tasks.zoo.Evaluator(small(eval_every=16, eval_episodes=3))
    for steps in range(8, 48, 8):
        model.num_timesteps = steps
        assert evaluator({"self": model}, {})
    history = evaluator.end()
    assert history.column("steps").tolist() == [16, 32, 40]
    assert (history.column("eval_return") > 190).all()


def test_a_task_trains_through_gymnasium():
    config = small(env_id="CartPole-v1", steps=512, eval_every=0, eval_episodes=1, precision="fp8")
    assert tasks.through_gymnasium(config).last["eval_return"] > 0


def test_a_film_keeps_the_last_picture_of_a_policy_that_has_left_the_track():
    film = imported("film")
    gif = film.film({"good": bang_bang, "bad": lambda obs: 1}, frames=8)
    picture = Image.open(io.BytesIO(gif))
    assert picture.format == "GIF" and picture.n_frames == 8 and picture.size == (480, 480)
    frames = []
    for k in (0, 6, 7):
        picture.seek(k)
        frames.append(np.asarray(picture.convert("RGB")).astype(int))
    # But for its palette a picture that is kept stays the same
    moved = np.abs(frames[2] - frames[1]).mean((1, 2))
    assert moved[240:].mean() < 0.5 < moved[:240].mean()
    assert (frames[0] != frames[1]).any()


def test_a_lookup_of_a_stranger_leaves_its_own_script_out():
    import strangers

    lost = {"ppo": 0.9, "dqn": 0.2, "c51": 0.4}
    found = [strangers.Outcome(name, "m=bf16", "stalls", loss, 0.0) for name, loss in lost.items()]
    assert strangers.lookup(found[0], found) == pytest.approx(0.3)


# Who may act in few bits


def row_of(correction: str, seed: int, learner: float, form: str = "e8m2") -> dict:
    """A measured row of the laboratory, as its file has it."""
    row = {"experiment": "first", "length": "8", "format": form, "correction": correction}
    numbers = {"seed": seed, "learner": learner, "actor": 0.5, "dead": 1, "start": 0.4}
    return row | {name: str(number) for name, number in numbers.items()}


def test_losses_of_the_laboratory_are_shares_of_float32_s_success():
    rows = [row_of("none", seed, 0.8, "fp32") for seed in (3, 4)]
    rows += [row_of("clip", 3, 0.2), row_of("clip", 4, 0.4)]
    cells = acting.cells_of(rows)
    cell = cells["first", 8, "e8m2", "clip"]
    assert np.isclose(cell.loss, 1 - 0.3 / 0.8) and np.isclose(cell.dead, 1 / 4)
    assert np.isclose([cell.low, cell.high], [1 - 0.4 / 0.8, 1 - 0.2 / 0.8]).all()
    assert cells["first", 8, "fp32", "none"].loss == 0


def test_a_curve_of_losses_only_rises():
    curve = acting.Curve([1, 100, 10, 1000], [0.0, 0.1, 0.3, 0.6])
    assert np.allclose([curve(x) for x in (0.1, 1, 10, 50, 100, 1e6)], [0, 0, 0.2, 0.2, 0.2, 0.6])
    assert 0.2 < curve(300) < 0.6


def test_ranks_of_the_laboratory_are_scipy_s():
    assert np.isclose(acting.spearman([1, 2, 3, 4], [1, 8, 9, 70]), 1)
    assert np.isclose(acting.spearman([1, 2, 3, 4], [4, 3, 2, 2]), -0.9486833)
    assert np.isnan(acting.spearman([1, 1], [1, 2]))


def test_jobs_of_the_laboratory_train_every_arm_and_seed_once_and_keep_seeds_apart():
    for name, experiment in acting.EXPERIMENTS.items():
        jobs = acting.jobs_of([name])
        pairs = [(job.length, seed) for job in jobs for seed in job.seeds]
        assert sorted(pairs) == sorted(itertools.product(experiment.arms, experiment.seeds))
        for arms in experiment.arms.values():
            assert len(set(arms)) == len(arms) and arms[0] == acting.Arm()
        assert (max(experiment.seeds) < 1000) == (name == "first")


def test_rules_of_stacks_were_predicted_for_every_arm_of_fresh_seeds():
    import stack_rules_in_lab

    predicted = Journal(results.RESULTS / "stack_rules_predicted.csv", stack_rules_in_lab.PREDICTED)
    keys = [stack_rules_in_lab.key_of(row) for row in predicted.rows()]
    arms = [
        (name, length, arm)
        for name, experiment in stack_rules_in_lab.EXPERIMENTS.items()
        for length, of_length in experiment.arms.items()
        for arm in of_length
    ]
    assert len(set(arms)) == len(arms)
    trained = [
        {"experiment": name, "length": length, **arm._asdict()}
        for name, length, arm in arms
        if arm != acting.Arm()
    ]
    assert sorted(keys) == sorted(map(stack_rules_in_lab.key_of, trained))
    jobs = [
        (job.experiment, job.length, seed)
        for job in stack_rules_in_lab.jobs()
        for seed in job.seeds
    ]
    expected = []
    for name, experiment in stack_rules_in_lab.EXPERIMENTS.items():
        assert min(experiment.seeds) >= 2000
        expected += itertools.product([name], experiment.arms, experiment.seeds)
    assert sorted(jobs) == sorted(expected)


def test_what_is_predicted_of_the_laboratory_uses_only_what_each_rule_knows():
    known = {
        ("first", length, form, "clip"): acting.Cell(loss, 0, 0, 0, 0, 0)
        for length, form, loss in ((8, "e8m3", 0.0), (8, "e8m1", 0.2), (32, "e8m1", 0.6))
    }
    horizons = {("first", length, "e8m1"): (0.9, 10.0) for length in (8, 32)}
    horizons["first", 8, "e8m3"] = (0.99, 100.0)
    found = acting.predictions(known, horizons, 32, "fp8", 0.99, 100.0)
    assert found["format alone"] == 0.0  # that of three bits
    assert np.isclose(found["length alone"], 0.6)
    assert 0 < found["predicted"] < 0.2 and np.isclose(found["sample size alone"], 0.0)


# Dumps of a real decoder


def a_rollout(prompts: list[list[int]]) -> small_decoder.Rollout:
    """Answers of 3 tokens, of which the first sequence has 2."""
    tokens = torch.tensor([[5, small_decoder.END, small_decoder.PAD], [4, 3, 5]])
    mask = tokens != small_decoder.PAD
    return small_decoder.Rollout(prompts, tokens, mask, mask, torch.zeros(2, 3))


@pytest.mark.parametrize("offset", (0, -1, 1))
def test_a_learner_scores_answers_after_prompts_of_any_length(offset):
    prompts = [[2, 3], [2, 4, 5, 3]]
    rollout = a_rollout(prompts)
    inputs = small_decoder.inputs_of(prompts, rollout)
    assert inputs.positions.tolist() == [[0, 0, 0, 1, 2, 3, 3], [0, 1, 2, 3, 4, 5, 6]]
    table = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))

    def model(input_ids, **_):  # whose logits depend on the last token that it has read
        return SimpleNamespace(logits=table[input_ids])

    logp = small_decoder.Lab.score(None, model, inputs, rollout.tokens, offset=offset, batch=1)
    for row, (prompt, answer) in enumerate(zip(prompts, rollout.tokens.tolist(), strict=True)):
        text = prompt + answer
        for t, token in enumerate(answer):
            read = text[len(prompt) + t - 1 + offset]
            assert logp[row, t] == table[read].log_softmax(-1)[token]


def test_a_learner_reads_what_a_fault_puts_before_answers():
    import decoder_faults as faults

    prompts = [[2, 3], [2, 4, 5, 3]]
    rollout = a_rollout(prompts)
    assert faults.after_neighbour(None, rollout) == [[2, 3], [2, 3, 5, 1, 2, 4, 5, 3]]
    assert faults.begin_missing(None, rollout) == [[3], [4, 5, 3]]
    reads = faults.sliding_window(small_decoder.inputs_of(prompts, rollout), rollout).attention
    assert reads.shape == (2, 1, 7, 7)
    # The first answer of the first sequence reads its prompt and itself, and padding reads itself
    assert reads[0, 0, 4].tolist() == [False, False, True, True, True, False, False]
    assert reads[0, 0, 1].tolist() == [False, True, *[False] * 5]


def test_recipes_of_dumps_name_kinds_of_the_report():
    import decoder_faults as faults

    assert not any(recipe.kinds for recipe in faults.SOUND)
    for recipe in faults.BUGS:
        assert recipe.kinds and set(recipe.kinds) <= set(MEANING), recipe
    assert {recipe.claims for recipe in faults.RECIPES} <= {"", *BITS_LEFT}


def test_a_small_decoder_trains_and_makes_dumps(monkeypatch, tmp_path):
    for package in small_decoder.PACKAGES[:1]:
        pytest.importorskip(package)
    monkeypatch.setattr(
        small_decoder, "documents", lambda: (f"x = {i * i}\n" * 9 for i in range(99))
    )
    monkeypatch.setattr(small_decoder, "HELD_OUT", 40)
    monkeypatch.setattr(small_decoder, "WINDOW", 16)
    monkeypatch.setattr(small_decoder, "ANSWER", 8)
    module = imported("decoder_dumps")
    module.main(["train", str(tmp_path), "--seed", "1", "--seconds", "4"])
    for only in ("8-bit cache", "1 step of 0.001", "a window"):
        module.main(["make", str(tmp_path), "--only", only])
    (_, dump, _) = [np.load(path) for path in sorted((tmp_path / "dumps").glob("*.npz"))]
    assert dump["learner_logp"].shape == dump["tokens"].shape == (64, 8)


# Pages


def test_the_pages_have_a_section_for_every_table():
    shown = []
    for page in results.PAGES:
        text = page.read_text()
        sections = re.findall(r"(?m)^## (\w+)$", text)
        assert re.findall(r"(?m)^\| .* \| \[(\w+)\]\(#\1\) \|$", text) == sections, page
        shown += sections
    steps = re.compile("_(first|predicted|measured)$")
    names = {steps.sub("", name) for name in results.COMMANDS}
    # Their scripts are kept only in the commits that they name
    old = [path for path in results.RESULTS.glob("*.md") if "Made at commit" in path.read_text()]
    assert sorted(shown) == sorted(names | {path.stem for path in old})


def test_every_table_in_results_is_on_a_page_or_linked_from_one():
    text = "".join(page.read_text() for page in results.READMES)
    for path in results.RESULTS.rglob("*.md"):
        assert f"results/{path.relative_to(results.RESULTS).as_posix()}" in text, path
        table = path.read_text()
        assert "commit " in table, path
        scripts = re.findall(r"`python (benchmarks/\S+\.py)", table)
        assert any((results.ROOT / script).exists() for script in scripts) or not scripts, path


def test_tables_that_follow_from_others_have_their_numbers():
    for module, name in ((acting, "acting"), (law, "rates")):
        whole, short = (
            (results.RESULTS / f"{name}{suffix}.md").read_text() for suffix in ("", "_short")
        )
        assert module.short(whole) == short
        assert short.splitlines()[-1] == whole.splitlines()[-1]


PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "fp8rl/bits/README.md",
    "fp8rl/doctor/README.md",
    "findings/README.md",
    *(str(path.relative_to(results.ROOT)) for path in results.ROOT.glob("docs/*.md")),
    *(str(page.relative_to(results.ROOT)) for page in results.READMES[1:]),
    *(str(path.relative_to(results.ROOT)) for path in results.ROOT.glob("notebooks/*.ipynb")),
]


def anchors_of(text: str) -> list[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.+)$", re.sub(r"(?ms)^```.*?^```", "", text))
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("name", PAGES)
def test_links_of_pages_lead_somewhere(name):
    path = results.ROOT / name
    text = path.read_text()
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(x["source"]) for x in cells if x["cell_type"] == "markdown")
    for file, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", text):
        target = path.parent / file if file else path
        assert target.exists(), (file, anchor)
        assert not anchor or anchor in anchors_of(target.read_text()), (file, anchor)
