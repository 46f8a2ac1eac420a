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
import decoder_dumps
import film
import law
import noise_dumps
import numpy as np
import pytest
import results
import scripts
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


class OneProcess:
    """Stands in for `multiprocessing.get_context(...)`: its pool works in this process."""

    @contextlib.contextmanager
    def Pool(self, *_, **__):
        yield SimpleNamespace(imap_unordered=map)


IN_ONE_PROCESS = SimpleNamespace(get_context=lambda _: OneProcess())


def other_library(algorithm: str, config: Config) -> History:
    """Stands in for tasks.train_peer, which needs Stable-Baselines3."""
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
    for name, value in {
        "Config": config_class(**QUICK),
        "TASKS": found,
        "best_of": {tasks.CART: 199.0, tasks.LQR: -5.0}.get,
        "importlib": SimpleNamespace(util=is_there),
        "configs_of": lambda *arm: of_seeds(*arm)[:2],
        "train_peer": other_library,
        "through_gymnasium": lambda config: other_library("", config),
        "mark_of": functools.cache(tasks.mark_of.__wrapped__),  # of these settings
    }.items():
        monkeypatch.setattr(tasks, name, value)


def touch(figure: Figure, file, **_) -> None:
    """Makes a figure's file, which is empty: drawing takes long."""
    Path(file).touch()


# Scores and verdicts


# Replay layouts


# Few bits are another learning rate


# Pages


def test_every_table_in_results_is_on_a_page_or_linked_from_one():
    text = "".join(page.read_text() for page in results.READMES)
    for path in results.RESULTS.rglob("*.md"):
        assert f"results/{path.relative_to(results.RESULTS).as_posix()}" in text, path
        table = path.read_text()
        assert "commit " in table, path
        scripts = re.findall(r"`python (benchmarks/\S+\.py)", table)
        assert any((results.ROOT / script).exists() for script in scripts) or not scripts, path


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
    assert names <= {*shown} <= names | {path.stem for path in old}


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
    "fp8rl/dumps/README.md",
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


# Tasks, scripts, policies that act in few bits, and their dumps


def fields(patch: pytest.MonkeyPatch, module, **values) -> None:
    """Replaces constants of a module."""
    for name, value in values.items():
        patch.setattr(module, name, value)


def tiny_laboratory(module, patch) -> None:
    """Two arms of each study, and no training that ends without any success, of which there would
    be no shares."""
    small_setting = {"updates": 20, "batch": 8, "units": 8, "length": 4, "start": 0.01}
    setting = module.TWO_LAYERS._replace(**small_setting)
    few_bits = lambda form: {4: module.arms_of({form: module.ENDS})}  # noqa: E731
    rules = [*module.EVERY_RULE[:8], *module.EVERY_RULE[-3:]]
    in_two = setting._replace(minibatches=2)
    fields(
        patch,
        module,
        EXPERIMENTS={
            "acting_first": {"first": module.Experiment(setting, range(2), few_bits("e8m3"))},
            "acting_measured": {
                "other formats": module.Experiment(setting, range(1000, 1002), few_bits("fp8"))
            },
            "stack_rules_measured": {
                "attention": module.Experiment(setting, range(2000, 2002), {4: rules}),
                "attention, 4 minibatches": module.Experiment(
                    in_two, range(2000, 2002), {4: module.IN_MINIBATCHES}
                ),
            },
        },
        SHORT={"first": "attention"},
        multiprocessing=IN_ONE_PROCESS,
    )
    places = (("first", "e8m3"), ("other formats", "fp8"))
    horizons = [
        dict.fromkeys(module.PREDICTED, "")
        | {"experiment": name, "length": 4, "format": form, "horizon": 5.0}
        for name, form in places
    ]
    Journal(Path("acting_predicted.csv"), module.PREDICTED).write(horizons)
    patch.setattr(laboratory, "MOST_PRETRAINING", 20)
    rewards = module.Laboratory.learner_rewards
    more = lambda *arguments: rewards(*arguments) + 0.01  # noqa: E731
    patch.setattr(module.Laboratory, "learner_rewards", more)


def scripts_that_print(module, patch) -> None:
    """Trainings that only print: what stands still ends at 20, and the doctor says so."""
    stands_still = ("weights=e4m3", "model=bf16")

    def output_of(script, clone, seed, under) -> str:
        if "watch" in under:
            findings = [
                dict(
                    zip(("place", "format"), stack.split("="), strict=True), verdict=word, rate=0.1
                )
                for stack, word in {
                    **dict.fromkeys(stands_still, "stalls"),
                    "optimizer=torchao-8bit": "as float32",
                }.items()
            ]
            Path(under[-1]).write_text(json.dumps({"optimizers": [{"findings": findings}]}))
        reached = 20 if under[-1] in stands_still or "train" in under else 100
        return f"global_step=1, episodic_return=[{reached}]"

    ppo = module.PPO._replace(seeds=(1,))
    stacks = ("model=bf16", "optimizer=torchao-8bit")
    studies = {
        "strangers": module.Study(("weights=e4m3",), {"one": ppo, "another": ppo}, True),
        "stacks_in_scripts": module.Study(
            stacks, {"one": module.PPO._replace(chosen=True), "another": module.PPO}, False
        ),
    }
    fields(patch, module, STUDIES=studies, output_of=output_of)


def three_dumps(module, patch) -> None:
    """Two sound dumps without a model, and one with a temperature, in the present folder."""
    folder = Path("decoder/dumps")
    folder.mkdir(parents=True)
    about = {"parameters": 1, "seed": 1, "steps": 1, "seconds": 1.0, "loss": 1.0, "versions": {}}
    (folder.parent / "about.json").write_text(json.dumps(about))
    shape = noise_dumps.DumpShape(32, 32, True)
    for i, dump in enumerate(
        (
            noise_dumps.sound_dump(shape, "Gaussian", 0.001, 0),
            noise_dumps.sound_dump(shape, "Gaussian", 0.01, 1),
            noise_dumps.buggy_dump("temperature", shape, "Gaussian", 0.01, 0),
        )
    ):
        np.savez(
            folder / f"{i}.npz",
            learner_logp=dump.learner_logp,
            actor_logp=dump.actor_logp,
            mask=dump.mask,
            truth=np.array([dump.bug or "sound"]),
            what=str(i),
            claims="" if dump.bug else "bf16",
            actor="bf16",
            learner="bf16",
        )


def one_line(module, patch) -> None:
    """One line of torch alone: the others compile for minutes."""
    training = module.Training(steps=64)
    make = module.adam(lr=3e-3)
    line = module.Line("torch", "Adam, bf16", "weight", training, make, doctor="model=bf16:loop")
    patch.setattr(module, "SECTIONS", {"torch": lambda: [line]})


class Smoke(NamedTuple):
    """The smallest run of a benchmark.

    `files`    what it writes, with words of which each is in the file
    `calls`    what its `main` is called with, in an empty folder
    `sizes`    constants of its module, replaced
    `prepare`  what else is replaced, from the module and monkeypatch
    `module`   its name; None: that of the run
    """

    files: dict[str, list[str]]
    calls: list
    sizes: dict = {}
    prepare: Callable = lambda module, patch: None
    module: str | None = None


def steps(*lines: str) -> list[list[str]]:
    return [line.split() for line in lines]


SMOKE = {
    "tasks": Smoke(
        {
            "tasks.md": ["| task | arm | steps | median score |", "On fp8rl/Lqr-v0"],
            "tasks_short.md": ["| FP8 |"],
            "tasks_replay.md": ["| 17 updates on the new rollout |"],
            "tasks.png": [],
        },
        [["tasks.md", "--only", tasks.CART, tasks.CARTPOLE, "LunarLander-v3"]],
        prepare=short_tasks,
    ),
    "film": Smoke(
        {"film.gif": [], "curves.png": []},
        [Path()],
        {"Config": config_class(**SHORT), "SEEDS": range(5000, 5001), "FRAMES": 2},
    ),
    "characters": Smoke(
        {"characters.md": ["| kept |", "stored, bytes a parameter"], "characters.png": []},
        [Path("characters.md")],
        {"UPDATES": 2, "EVERY": 1, "SEEDS": 1, "UNITS": 8}
        | {"characters": lambda: (torch.arange(1_000) % 5, torch.arange(1_000) % 5, 5)},
    ),
    "strangers": Smoke(
        {"strangers.md": ["scripts that report: 2 of 2; a lookup", "The twin is 0.00 off"]},
        steps(*["run strangers.csv --cleanrl ."] * 2, "table strangers.md"),
        prepare=scripts_that_print,
        module="scripts",
    ),
    "stacks_in_scripts": Smoke(
        {"stacks_in_scripts.md": ["were chosen: 4 of 4", "scripts that report: 4 of 4; a lookup"]},
        steps(*["run stacks_in_scripts.csv --cleanrl ."] * 2, "table stacks_in_scripts.md"),
        prepare=scripts_that_print,
        module="scripts",
    ),
    "acting": Smoke(
        {"acting.md": ["| T / H |", "dead prompts"], "acting_short.md": [], "acting.png": []},
        steps(
            "measure acting_first.csv",
            *["measure acting_measured.csv"] * 2,
            "table acting.md",
        ),
        {"RESULTS": Path()},
        tiny_laboratory,
    ),
    "stack_rules": Smoke(
        {"stack_rules.md": ["AReaL, default", "more is lost by"], "stack_rules_short.md": []},
        steps("measure stack_rules_measured.csv", "table stack_rules.md"),
        {"RESULTS": Path()},
        tiny_laboratory,
        "acting",
    ),
    "decoder_dumps": Smoke(
        {
            "decoder_dumps.md": ["| 2 | temperature | yes | bug: temperature | bug: temperature |"],
            "decoder_dumps_short.md": [
                "| the report | 1 of 1 | 1 of 1 | 0 of 1 | 0 of 2 | 0 of 2 | 0 of 2 | 0 of 0 |",
                "| always rounding | 0 of 1 | - | - | 0 of 2 | - | 0 of 2 |",
            ],
        },
        steps("judge decoder decoder_dumps.md"),
        prepare=three_dumps,
    ),
    "real_stacks": Smoke(
        {"real_stacks.md": ["what is run", "model=bf16:loop: "]},
        [Path("real_stacks.md")],
        {"PACKAGES": {"torch": "torch"}},
        one_line,
    ),
}


@pytest.mark.parametrize("name", SMOKE)
def test_a_benchmark_of_policies_writes_its_tables(name, one_process, monkeypatch, tmp_path):
    run = SMOKE[name]
    module = importlib.import_module(run.module or name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Figure, "savefig", touch)
    fields(monkeypatch, module, **run.sizes)
    run.prepare(module, monkeypatch)
    for words in run.calls:
        module.main(words)
    for file, words in run.files.items():
        assert Path(file).exists()
        text = Path(file).read_text() if file.endswith(".md") else ""
        assert all(word in text for word in words)
        assert not text or " on " in text.splitlines()[-1]


def test_an_algorithm_of_stable_baselines3_is_evaluated_at_every_multiple_and_at_the_end():
    model = SimpleNamespace(
        num_timesteps=0,
        n_envs=8,
        action_space=SimpleNamespace(),
        get_vec_normalize_env=lambda: None,
        predict=lambda obs, deterministic: (bang_bang(torch.from_numpy(obs)).numpy(), None),
    )
    evaluator = tasks.PeerEvaluator(small(eval_every=16, eval_episodes=3))
    for steps in range(8, 48, 8):
        model.num_timesteps = steps
        assert evaluator({"self": model}, {})
    evaluator.evaluate(model)
    history = evaluator.history
    assert history.column("steps").tolist() == [16, 32, 40]
    assert (history.column("eval_return") > 190).all()


def test_a_task_trains_through_gymnasium():
    config = small(env_id="CartPole-v1", steps=512, eval_every=0, eval_episodes=1, precision="fp8")
    assert tasks.through_gymnasium(config).last["eval_return"] > 0


def test_a_film_keeps_the_last_picture_of_a_policy_that_has_left_the_track():
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
    lost = {"ppo": 0.9, "dqn": 0.2, "c51": 0.4}
    cases = [
        scripts.Case(name, "m=bf16", ["1"], "stalls", loss, 0.0) for name, loss in lost.items()
    ]
    assert scripts.lookup(cases[0], cases) == [0.2, 0.4]


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


ALL_EXPERIMENTS = [
    (file, *item)
    for file, experiments in acting.EXPERIMENTS.items()
    for item in experiments.items()
]


@pytest.mark.parametrize(("file", "name", "experiment"), ALL_EXPERIMENTS, ids=lambda x: str(x)[:35])
def test_jobs_of_the_laboratory_train_every_arm_and_seed_once_and_keep_seeds_apart(
    file, name, experiment
):
    jobs = [job for job in acting.jobs_of(acting.EXPERIMENTS[file]) if job.experiment == name]
    pairs = [(job.length, seed) for job in jobs for seed in job.seeds]
    assert sorted(pairs) == sorted(itertools.product(experiment.arms, experiment.seeds))
    for arms in experiment.arms.values():
        assert len(set(arms)) == len(arms) and arms[0] == acting.Arm()
    seeds = {"acting_first": 0, "acting_measured": 1000, "stack_rules_measured": 2000}
    assert min(experiment.seeds) == seeds[file] and len(experiment.seeds) <= 16


def test_rules_of_stacks_were_predicted_for_every_arm_of_fresh_seeds():
    columns = [*acting.RULES_PLACE, "predicted", "why"]
    predicted = Journal(results.RESULTS / "stack_rules_predicted.csv", columns).rows()
    trained = [
        {"experiment": name, "length": length, **arm._asdict()}
        for name, experiment in acting.EXPERIMENTS["stack_rules_measured"].items()
        for length, arms in experiment.arms.items()
        for arm in arms[1:]
    ]
    assert sorted(map(acting.key_of, predicted)) == sorted(map(acting.key_of, trained))


# Dumps of a real decoder


def a_rollout(prompts: list[list[int]]) -> decoder_dumps.Rollout:
    """Answers of 3 tokens, of which the first sequence has 2."""
    tokens = torch.tensor([[5, decoder_dumps.END, decoder_dumps.PAD], [4, 3, 5]])
    mask = tokens != decoder_dumps.PAD
    return decoder_dumps.Rollout(prompts, tokens, mask, mask, torch.zeros(2, 3))


@pytest.mark.parametrize("offset", (0, -1, 1))
def test_a_learner_scores_answers_after_prompts_of_any_length(offset):
    prompts = [[2, 3], [2, 4, 5, 3]]
    rollout = a_rollout(prompts)
    inputs = decoder_dumps.inputs_of(prompts, rollout)
    assert inputs.positions.tolist() == [[0, 0, 0, 1, 2, 3, 3], [0, 1, 2, 3, 4, 5, 6]]
    table = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))

    def model(input_ids, **_):  # whose logits depend on the last token that it has read
        return SimpleNamespace(logits=table[input_ids])

    logp = decoder_dumps.Lab.score(None, model, inputs, rollout.tokens, offset=offset, batch=1)
    for row, (prompt, answer) in enumerate(zip(prompts, rollout.tokens.tolist(), strict=True)):
        text = prompt + answer
        for t, token in enumerate(answer):
            read = text[len(prompt) + t - 1 + offset]
            assert logp[row, t] == table[read].log_softmax(-1)[token]


def test_a_learner_reads_what_a_fault_puts_before_answers():
    by_words = {recipe.what: recipe for recipe in decoder_dumps.RECIPES}
    prompts = [[2, 3], [2, 4, 5, 3]]
    rollout = a_rollout(prompts)
    assert decoder_dumps.after_neighbour(None, rollout) == [[2, 3], [2, 3, 5, 1, 2, 4, 5, 3]]
    assert by_words["first token missing"].change_prompts(None, rollout) == [[3], [4, 5, 3]]
    reads = decoder_dumps.sliding_window(
        decoder_dumps.inputs_of(prompts, rollout), rollout
    ).attention
    assert reads.shape == (2, 1, 7, 7)
    # The first answer of the first sequence reads its prompt and itself, and padding reads itself
    assert reads[0, 0, 4].tolist() == [False, False, True, True, True, False, False]
    assert reads[0, 0, 1].tolist() == [False, True, *[False] * 5]


def test_recipes_of_dumps_name_kinds_of_the_report():
    assert not any(recipe.kinds for recipe in decoder_dumps.SOUND)
    for recipe in decoder_dumps.BUGS:
        assert recipe.kinds and set(recipe.kinds) <= set(MEANING), recipe
    assert {recipe.claims for recipe in decoder_dumps.RECIPES} <= {"", *BITS_LEFT}


def test_a_small_decoder_trains_and_makes_dumps(monkeypatch, tmp_path):
    for package in decoder_dumps.PACKAGES[:1]:
        pytest.importorskip(package)
    monkeypatch.setattr(
        decoder_dumps, "documents", lambda: (f"x = {i * i}\n" * 9 for i in range(99))
    )
    monkeypatch.setattr(decoder_dumps, "HELD_OUT", 40)
    monkeypatch.setattr(decoder_dumps, "WINDOW", 16)
    monkeypatch.setattr(decoder_dumps, "ANSWER", 8)
    decoder_dumps.main(["train", str(tmp_path), "--seed", "1", "--seconds", "4"])
    for only in ("8-bit cache", "1 step of 0.001", "a window"):
        decoder_dumps.main(["make", str(tmp_path), "--only", only])
    (_, dump, _) = [np.load(path) for path in sorted((tmp_path / "dumps").glob("*.npz"))]
    assert dump["learner_logp"].shape == dump["tokens"].shape == (64, 8)
