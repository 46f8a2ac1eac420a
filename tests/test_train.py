import copy
import dataclasses
import math
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8rl import collect as collect_module
from fp8rl import train as train_module
from fp8rl.collect import act, collect, compiled, steps
from fp8rl.devices import Placement, make_env
from fp8rl.env import MAX_STEPS, BatchedEnv, dynamics
from fp8rl.losses import DUMMY, TERMINATED, TRUNCATED, Rollout
from fp8rl.model import ActorCritic
from fp8rl.precision import Precision
from fp8rl.train import Config, episode_returns, iterate, train, update

SHORT = {"steps": 2_048, "eval_every": 1_024, "eval_episodes": 5}


def numbers(history) -> np.ndarray:
    return np.array([[value for name, value in row.items() if name != "seconds"] for row in history.rows])


def weights(history) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(history.model.parameters())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp8"])
def test_same_config_same_numbers_bit_for_bit(precision):
    config = Config(precision=precision, seed=7, **SHORT)
    state = torch.get_rng_state()
    first = train(config, progress=False)
    assert torch.equal(torch.get_rng_state(), state)  # the caller's generator is not ours
    torch.rand(3)
    again = train(config, progress=False)
    np.testing.assert_array_equal(numbers(first), numbers(again))
    assert torch.equal(weights(first), weights(again))
    other = train(dataclasses.replace(config, seed=8), progress=False)
    assert not torch.equal(weights(first), weights(other))


@pytest.mark.parametrize("precision", ["fp32", "fp8"])
def test_learns_to_stay_at_the_origin(precision):
    history = train(Config(steps=20_480, precision=precision), progress=False)
    assert history.final_return >= 195
    assert history.first_step_at(195) <= 20_480 and math.isnan(history.first_step_at(201))


def test_a_rollout_is_what_happened():
    precision, generator = Precision("fp32"), torch.Generator().manual_seed(0)
    model, env = ActorCritic(), BatchedEnv(4, 0.5, generator=generator)
    rollout = collect(model, env, 50, precision, generator)
    assert torch.equal(rollout.obs[-1], env.obs)
    dummy = (rollout.flags & DUMMY) != 0
    ended = (rollout.flags & (TERMINATED | TRUNCATED)) != 0
    assert ended.any() and torch.equal(dummy[1:], ended[:-1]) and not dummy[0].any()
    assert (rollout.reward[dummy] == 0).all()
    torch.testing.assert_close(dynamics(rollout.obs[:-1], rollout.action)[~dummy], rollout.obs[1:][~dummy])
    assert (rollout.obs[1:][dummy].abs() <= 0.5).all()  # what follows a dummy row is a start
    with torch.no_grad():
        logits, _ = model(rollout.obs[:-1])
    expected = torch.distributions.Categorical(logits=logits).log_prob(rollout.action)
    torch.testing.assert_close(rollout.behavior_logp, expected)


def test_actions_follow_the_policy():
    model = ActorCritic()
    with torch.no_grad():
        model.actor.weight.zero_()
        model.actor.bias.copy_(torch.tensor([0.0, 1.0]))
    generator = torch.Generator().manual_seed(0)
    rollout = collect(model, BatchedEnv(100, generator=generator), 100, Precision("fp32"), generator)
    share, expected = rollout.action.float().mean().item(), torch.tensor(1.0).sigmoid().item()
    assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / 10_000)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("which", ["obs", "reward"])
def test_an_environment_that_breaks_is_named(which, bad, monkeypatch):
    class Broken(BatchedEnv):
        def step(self, *args):
            obs, reward, *ends = super().step(*args)
            (obs if which == "obs" else reward)[0] = bad
            return obs, reward, *ends

    monkeypatch.setattr(train_module, "make_env", lambda num_envs, *args, **options: Broken(num_envs))
    with pytest.raises(ValueError, match=f"{which} from the environment is not finite"):
        train(Config(**SHORT), progress=False)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("encoder", ["mlp", "gru"])
def test_the_forward_passes_that_acted_give_the_update_of_a_new_one(encoder, precision):
    kept, slow = [], []
    for results, keep in ((kept, True), (slow, False)):
        precision_, generator = Precision(precision), torch.Generator().manual_seed(0)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = ActorCritic(encoder=encoder)
        env, state = BatchedEnv(16, 0.5, generator=generator), None
        for _ in range(3):  # so that episodes end in it and a memory comes into it
            rollout, outputs = act(model, env, 20, precision_, generator, state)
            state = None if encoder == "mlp" else rollout.state[-1]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        update(model, optimizer, precision_, rollout, Config(), outputs if keep else None)
        results += [rollout.obs, torch.cat([p.grad.flatten() for p in model.parameters()])]
    assert torch.equal(kept[0], slow[0]) and (rollout.flags & DUMMY).any()
    error = (kept[1] - slow[1]).norm() / slow[1].norm()
    assert error < (1e-5 if precision == "fp32" else 2e-2) and slow[1].norm() > 0


@pytest.mark.parametrize("fields", [{"precision": "bf16"}, {"precision": "fp8"}, {"encoder": "gru", "steps": 40_960}], ids=str)
def test_learns_from_the_forward_passes_that_acted(fields):
    history = train(Config(**{"steps": 20_480, "eval_every": 0, "reuse_forward": True, **fields}), progress=False)
    assert history.final_return >= 195


@pytest.mark.parametrize(
    "fields", [{"fresh_updates": 0}, {"collect_precision": "bf16"}, {"placement": Placement(async_collect=True)}], ids=str
)
def test_forward_passes_of_another_policy_are_not_reused(fields):
    with pytest.raises(ValueError, match="reuse_forward is True: leave it out, it needs an actor that is the learner"):
        Config(reuse_forward=True, **fields)


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


def plain_and_chunked(config: Config, length: int) -> list[tuple[torch.Tensor, ...]]:
    """What three rollouts give and leave behind, from `steps` and then from `compiled()`."""
    results = []
    for loop in (steps, compiled()):
        generator = torch.Generator().manual_seed(0)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = config.network()
        env, state = make_env(16, 0.5, generator=generator, **config.observed), None
        env.steps[:8] = MAX_STEPS - 5  # so that episodes end
        for _ in range(3):
            rollout = collect(model, env, length, Precision("fp32"), generator, state, loop)
            state = None if rollout.state is None else rollout.state[-1]
            results.append((*rollout._asdict().values(), *env.tensors().values()))
    assert any(row[3].any() for row in results)  # flags
    return results


@pytest.mark.parametrize("length", [2, 4, 5])
@pytest.mark.parametrize("fields", [{}, {"encoder": "gru", "extra_features": 3, "hide_velocity": True}], ids=str)
def test_a_rollout_in_chunks_is_the_whole_one(length, fields, monkeypatch):
    monkeypatch.setattr(collect_module, "CHUNK", 2)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    results = plain_and_chunked(Config(**fields), length)
    for ours, plain in zip(results[3:], results[:3], strict=True):
        assert all(mine is expected is None or torch.equal(mine, expected) for mine, expected in zip(ours, plain, strict=True))


@needs_compiler
def test_the_compiled_loop_collects_what_the_plain_one_does(monkeypatch):
    monkeypatch.setattr(collect_module, "CHUNK", 2)
    results = plain_and_chunked(Config(encoder="gru", extra_features=3, hide_velocity=True), 4)
    for ours, plain in zip(results[3:], results[:3], strict=True):
        for mine, expected in zip(ours, plain, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)


@needs_compiler
def test_learns_from_what_the_compiled_loop_collects(monkeypatch):
    monkeypatch.setattr(collect_module, "CHUNK", 4)
    config = Config(precision="bf16", compile=True, collect_precision="fp32", steps=20_480, eval_every=0)
    assert train(config, progress=False).final_return >= 195


@pytest.mark.parametrize(
    "fields", [{"env_id": "CartPole-v1", "start_noise": 0.5}, {"precision": "fp8"}, {"reuse_forward": True}], ids=str
)
def test_what_cannot_be_compiled_is_refused(fields):
    with pytest.raises(ValueError, match="compile is True: leave it out, or collect on the CPU in the package's environment"):
        Config(compile=True, **fields)


def test_without_a_compiler_nothing_is_compiled(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match="compile is True: leave it out, or install no-such-compiler"):
        Config(compile=True)


def test_repeated_updates_lower_the_loss_of_a_batch():
    generator = torch.Generator().manual_seed(0)
    model, precision, config = ActorCritic(), Precision("fp32"), Config()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batch = collect(model, BatchedEnv(16, 0.5, generator=generator), 32, precision, generator)
    losses = [update(model, optimizer, precision, batch, config)["value_loss"].item() for _ in range(30)]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("learner, actor", [("fp32", "fp8"), ("fp8", "fp32"), ("bf16", "fp16")])
@pytest.mark.parametrize("importance", ["behavior", "learner"])
def test_stored_log_probabilities_are_those_of_the_policy_named(learner, actor, importance, monkeypatch):
    seen = []
    monkeypatch.setattr(train_module.ReplayBuffer, "append", lambda ring, rollout, seam: seen.append(rollout))
    monkeypatch.setattr(train_module.ReplayBuffer, "sample", lambda *args: seen[-1])
    config = Config(precision=learner, collect_precision=actor, importance=importance, steps=512, eval_episodes=1)
    next(iterate(config))
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        base = ActorCritic()
    for name in (learner, actor):
        precision = Precision(name)
        logp = train_module._logp(precision.prepare(copy.deepcopy(base)), precision, seen[0])
        ours = name == (actor if importance == "behavior" else learner)
        assert torch.allclose(logp, seen[0].behavior_logp, atol=1e-7, rtol=1e-6) == ours


@given(seed=st.integers(0, 1000), parts=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_episode_returns_equal_a_plain_loop_across_rollouts(seed, parts):
    rng = np.random.default_rng(seed)
    reward, flags = rng.normal(size=(sum(parts), 2)), rng.choice([0, 0, TERMINATED, TRUNCATED], size=(sum(parts), 2))
    expected, totals = [], [0.0, 0.0]
    for t, b in np.ndindex(*reward.shape):
        totals[b] += reward[t, b]
        if flags[t, b]:
            expected.append(totals[b])
            totals[b] = 0.0
    ours, carried, start = [], np.zeros(2), 0
    for length in parts:
        rows = slice(start, start := start + length)
        rollout = Rollout(None, None, torch.from_numpy(reward[rows]), torch.from_numpy(flags[rows]), None)
        finished, carried = episode_returns(rollout, carried)
        ours.extend(finished)
    np.testing.assert_allclose(ours, expected)
    np.testing.assert_allclose(carried, totals)


def test_evaluations_come_when_asked():
    history = train(Config(steps=4_096, eval_every=1_500, eval_episodes=2), progress=False)
    assert history.evaluations()[0].tolist() == [1_536, 3_072, 4_096]
    assert train(Config(steps=1_024, eval_every=0, eval_episodes=2), progress=False).evaluations()[0].tolist() == [1_024]


def test_learning_rate_falls_to_the_last_step_or_stays():
    rates = train(Config(**SHORT), progress=False).column("learning_rate")
    np.testing.assert_allclose(rates, 1e-3 * np.array([1, 0.75, 0.5, 0.25]))
    assert set(train(Config(**SHORT, anneal=False), progress=False).column("learning_rate")) == {1e-3}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gradient_that_is_not_finite_stops_a_run_without_a_scaler(precision):
    with pytest.raises(FloatingPointError, match=f"gradient not finite at step 512 in {precision}: lower learning_rate"):
        train(Config(precision=precision, steps=512, reward_scale=1e38), progress=False)


@pytest.mark.parametrize("precision", ["fp16", "fp8"])
def test_a_run_that_only_skips_stops_too(precision):
    with pytest.raises(FloatingPointError, match=f"gradient not finite at step 10240 in {precision}"):
        train(Config(precision=precision, reward_scale=1e38), progress=False)


def test_published_is_the_published_loop():
    config = Config.published(seed=3)
    assert (config.num_envs, config.rollout_length, config.slice_length, config.batch_size) == (1, 128, 1, 64)
    assert (config.fresh_updates, config.replay_updates, config.importance, config.entropy_coef) == (0, 1, "none", 0)
    assert not (config.bootstrap_truncation or config.normalize_advantage or config.anneal) and config.seed == 3
    assert (config.gamma, config.reward_scale, config.start_noise) == (0.99, 1.0, 0.0)
    assert Config.published(gamma=0.5, num_envs=2).gamma == 0.5  # a change wins over the published value
    assert len(train(dataclasses.replace(config, steps=512, eval_episodes=2), progress=False).rows) == 4


@pytest.mark.parametrize(
    "field, value, mend",
    [
        *(
            (name, 0, "give at least")
            for name in ("steps", "num_envs", "rollout_length", "capacity", "slice_length", "batch_size")
        ),
        ("steps", 511, "512 steps"),
        ("eval_episodes", -1, "at least 1"),
        *((name, -1, "0 or more") for name in ("seed", "replay_updates", "eval_every", "entropy_coef", "value_coef")),
        ("entropy_coef", math.nan, "0 or more"),
        *((name, 0.0, "positive") for name in ("learning_rate", "max_grad_norm", "reward_scale")),
        ("learning_rate", math.nan, "positive"),
        ("reward_scale", math.inf, "positive"),
        ("gamma", 1.1, "from 0 to 1"),
        ("lam", math.nan, "from 0 to 1"),
        ("start_noise", -0.1, "from 0 to 1"),
        ("slice_length", 64, "at most rollout_length, 32"),
        ("seed", 2**63, "less than 2"),
        ("device", "meta", "choose from cpu"),
        ("capacity", 500, "at least 528, 33 rows of 16"),
        ("batch_size", 500, "multiple of slice_length, 32"),
        ("fresh_updates", 2, "0 or 1"),
        ("precision", "fp7", "choose from fp32"),
        ("importance", "maybe", "behavior, learner or none"),
        ("device", "cuda:99", "choose from cpu"),
        ("device", "gpu", "choose from cpu"),
        ("layout", "loose", "choose from compact, full, delta"),
        ("codec", "fp4", "choose from fp32, fp16, bf16, int8, fp8"),
        ("encoder", "lstm", "choose from mlp, gru"),
        ("extra_features", -1, "0 or more"),
        ("extra_features", 10**9, "at most a million"),
        ("vectorization", "threads", "choose from sync, async, vector_entry_point"),
    ],
)
def test_bad_fields_are_named_with_the_mend_in_one_line(field, value, mend):
    with pytest.raises(ValueError, match=mend) as caught:
        Config(**{field: value})
    message = str(caught.value)
    assert "\n" not in message and message.startswith(f"{field} is ") and str(value) in message


def test_the_actors_precision_is_checked_too():
    with pytest.raises(ValueError, match=r"precision is 'tf32' and .*choose from fp32"):
        Config(collect_precision="tf32")


def test_fields_that_fit_only_together():
    with pytest.raises(ValueError, match="replay_updates is 0: give at least 1 without fresh_updates"):
        Config(fresh_updates=0, replay_updates=0)
    with pytest.raises(ValueError, match="num_envs is 10: give a multiple of 16 for fp8"):
        Config(num_envs=10, precision="fp8")
    with pytest.raises(ValueError, match="batch_size is 320: give a multiple of 16 slices for fp8"):
        Config(batch_size=320, precision="fp8")
    with pytest.raises(ValueError, match="batch_size is 120: give a multiple of 16 slices for a gru in fp8"):
        Config(batch_size=120, slice_length=15, rollout_length=15, precision="fp8", encoder="gru")
    Config(num_envs=8, precision="fp8", encoder="gru", fresh_updates=0)
    with pytest.raises(ValueError, match="memmap is : name a folder"):
        Config(memmap="")
    with pytest.raises(ValueError, match=r"memmap is runs/ring: give a folder or placement\.store, not both"):
        Config(memmap="runs/ring", placement=Placement(store="cpu"))
    Config(num_envs=10, batch_size=320, collect_precision="fp8")  # acting takes no weight gradient
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().seed = 1


@pytest.mark.parametrize("kind", [{"layout": "full"}, {"memmap": "ring"}])
def test_exact_storage_trains_the_same_agent(kind, tmp_path):
    kind = {name: str(tmp_path / value) if name == "memmap" else value for name, value in kind.items()}
    plain, other = train(Config(**SHORT), progress=False), train(Config(**SHORT, **kind), progress=False)
    np.testing.assert_array_equal(numbers(plain), numbers(other))
    assert torch.equal(weights(plain), weights(other))


@pytest.mark.parametrize("kind", [{"codec": "int8"}, {"codec": "fp8"}, {"codec": "bf16", "layout": "delta"}])
def test_rounded_storage_trains_another_agent_as_well(kind):
    plain, other = Config(steps=20_480, eval_every=0), Config(steps=20_480, eval_every=0, **kind)
    assert other.ring_bytes < plain.ring_bytes
    plain, other = train(plain, progress=False), train(other, progress=False)
    assert not torch.equal(weights(plain), weights(other)) and other.final_return >= 195
    assert other.last["clipped"] == 0


def test_a_memory_needs_no_velocity():
    history = train(Config(encoder="gru", hide_velocity=True, steps=51_200, eval_every=0), progress=False)
    assert history.final_return >= 190


@pytest.mark.parametrize("learner, actor", [("fp32", None), ("fp32", "bf16")])
def test_a_memory_s_rollout_is_learned_from_as_it_was_acted(learner, actor):
    config = Config(precision=learner, collect_precision=actor, encoder="gru", hide_velocity=True, steps=4_096, eval_episodes=1)
    precision, generator = Precision(actor or learner), torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model, env, state = precision.prepare(config.network()), BatchedEnv(16, 0.5, generator=generator, hide_velocity=True), None
    for _ in range(4):  # across rollouts and episodes
        rollout = collect(model, env, 32, precision, generator, state)
        assert rollout.state.shape == (2, 16, 64)
        state = rollout.state[-1]
        torch.testing.assert_close(train_module._logp(model, precision, rollout), rollout.behavior_logp)
    assert (rollout.flags & DUMMY).any()


def test_a_wide_observation_is_learned_from():
    assert train(Config(extra_features=6, steps=51_200, eval_every=0), progress=False).final_return >= 190


def test_history_keeps_columns_and_gives_rows():
    history = train(Config(**SHORT), progress=False)
    assert len(history) == len(history.rows) == 4 and history.rows[-1] == history.last
    assert history.column("steps").tolist() == [512, 1024, 1536, 2048]
    assert history.ring.nbytes == history.config.ring_bytes


def test_without_replay_the_ring_stays_empty_but_in_a_folder(tmp_path):
    config = Config(**SHORT, replay_updates=0)
    assert train(config, progress=False).ring.size == 0
    kept = train(dataclasses.replace(config, memmap=str(tmp_path / "ring")), progress=False).ring
    assert kept.size == 2048 // config.num_envs
    kept.close()


@pytest.mark.parametrize("actions", [2, 3])
def test_the_highest_score_is_chosen(actions):
    scores = torch.randint(5, (1000, actions)).float()  # with equal ones
    chosen = collect_module._argmax(scores)
    assert chosen.dtype == torch.int64
    assert torch.equal(scores[torch.arange(1000), chosen], scores.max(-1)[0]) and len(chosen.unique()) == actions
