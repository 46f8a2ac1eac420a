"""What do RL stacks for language models do by default about actor and learner?

An engine writes sequences, a learner trains on them, and their log-probabilities differ. This
script downloads pinned releases and reads from their source, without importing it, what each stack
does about the difference unless it is told otherwise. A value in the table is read from a config
class, a command line or a YAML file. A sentence in the table is tied to code that must be there. If
it is not, the script stops and names it.

    python benchmarks/stack_defaults.py benchmarks/results/stack_defaults.md

It needs pip and PyYAML, but no torch, and takes a minute. The page docs/stack_defaults.md says
what follows for a training.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import NamedTuple

from release_source import Changed, Release, download
from results import table_of

PINNED = {
    "trl": "1.16.0",
    "verl": "0.9.1",
    "openrlhf": "0.11.2",
    "areal": "1.0.4",
    "ms-swift": "4.6.0",
    "skyrl": "0.3.0",
    "unsloth": "2026.10.9",
    "unsloth_zoo": "2026.10.9",
}
LEGEND = (
    "μ is the probability of a token by the engine that wrote it, π₀ by the learner before it trains "
    "on the rollout, and π by the learner now."
)
ASYNC_VERL = {
    "fully_async_policy": "verl/experimental/fully_async_policy/config/fully_async_ppo_trainer.yaml",
    "one_step_off_policy": "verl/experimental/one_step_off_policy/config/one_step_off_ppo_trainer.yaml",
}


class Answers(NamedTuple):
    """The cells of one stack, in the order of the table's rows."""

    correction: str
    way: str
    bounds: str
    sequence: str
    denominator: str
    actor: str
    clip: str
    temperature: str
    kept: str
    engine: str
    log_probs: str
    weights: str
    names: str


QUESTIONS = Answers(
    correction="Is the difference corrected, by π₀/μ?",
    way="If it is: by token or sequence, weights or masks",
    bounds="Largest and smallest ratio",
    sequence="The ratio of a sequence is",
    denominator="PPO's clip is by the ratio of π to",
    actor="When it is by π/μ",
    clip="The clip's range, below and above 1",
    temperature="The learner divides its logits by the sampling temperature",
    kept="With top-p, the learner's probabilities are of the kept tokens",
    engine="Log-probabilities that are asked of the engine",
    log_probs="Type of the learner's log-probabilities",
    weights="Type of the stored weights and of Adam's moments",
    names="What the code calls log μ and log π₀",
)


def read_trl(releases: dict[str, Release]) -> Answers:
    trl = releases["trl"]
    config = "trl/trainer/grpo_config.py"
    trainer = "trl/trainer/grpo_trainer.py"
    generate = "GRPOTrainer._generate_and_score_completions"
    trl.has_defaults(
        config,
        "GRPOConfig",
        use_vllm=False,
        vllm_importance_sampling_correction=True,
        epsilon_high=None,
        delta=None,
    )
    # The ratio of a sequence is the exponential of a sum over its tokens
    trl.holds(
        trainer,
        generate,
        "per_token_logps_diff = (old_per_token_logps - sampling_per_token_logps) * mask",
        "per_sequence_logps_diff = per_token_logps_diff.sum(dim=-1, keepdim=True)",
        "vllm_importance_sampling_ratio = torch.exp(logps_diff)",
        "vllm_importance_sampling_ratio.masked_fill(invalid_mis_mask, value=0.0)",
        "output['old_per_token_logps'] = old_per_token_logps",
        "output['sampling_per_token_logps'] = sampling_per_token_logps",
    )
    # When π₀ is computed, and what stands in for it
    trl.holds(
        trainer,
        generate,
        "self.args.gradient_accumulation_steps % generate_every != 0 "
        "or (self.use_vllm and self.vllm_importance_sampling_correction)",
        "old_per_token_logps = None",
    )
    trl.holds(
        trainer,
        "GRPOTrainer._compute_loss",
        "per_token_logps.detach() if old_per_token_logps is None else old_per_token_logps",
        "log_ratio = per_token_logps - old_per_token_logps",
    )
    trl.lacks("top_p", trainer, "GRPOTrainer._get_per_token_logps_and_entropies")
    trl.holds(trainer, "GRPOTrainer.__init__", "temperature = self.temperature")
    check_fused_head(trl)
    trl.holds(
        "trl/generation/vllm_generation.py",
        "VLLMGeneration",
        "logprobs_mode = 'processed_logprobs'",
    )
    loading = "dtype = kwargs.get('dtype', 'float32')"
    trl.holds("trl/trainer/utils.py", "create_model_from_path", loading)
    # The trained model itself is cast, and stays so
    trl.holds(trainer, "GRPOTrainer._generate_single_turn", "unwrapped_model.to(torch.bfloat16)")
    bf16 = "self.bf16 = not self.fp16 if self.bf16 is None else self.bf16"
    trl.holds("trl/trainer/base_config.py", "_BaseConfig.__post_init__", bf16)
    mode = trl.field(config, "GRPOConfig", "vllm_importance_sampling_mode")
    upper = trl.field(config, "GRPOConfig", "vllm_importance_sampling_clip_max")
    lower = trl.field(config, "GRPOConfig", "vllm_importance_sampling_clip_min")
    epsilon = trl.field(config, "GRPOConfig", "epsilon")
    return Answers(
        correction="yes, once `use_vllm` is set, which is off",
        way=f"`{mode}`; also `sequence_truncate`, `token_mask`, `token_truncate`",
        bounds=f"{upper}, {none(lower)}",
        sequence="the product of its tokens' ratios",
        denominator="π₀ with vLLM and the correction, or if a rollout serves more than one step. "
        "Else π itself, so that the ratio is 1",
        actor="no option for it",
        clip=f"{epsilon}, {epsilon}",
        temperature="yes",
        kept="no",
        engine="`processed_logprobs`, with vLLM",
        log_probs="float32, of logits in autocast's type",
        weights="float32 if `model` is a path; if it is a model, that model's; bf16 with "
        "`use_transformers_continuous_batching`",
        names="`sampling_per_token_logps`, `old_per_token_logps`",
    )


def check_fused_head(trl: Release) -> None:
    """Checks TRL's head, which returns log-probabilities in place of logits."""
    trl.lacks("top_p", "trl/trainer/utils.py", "add_fused_lm_head")
    trl.holds(
        "trl/kernels/chunked_logprob.py",
        "ChunkedLogProbFunction.forward",
        "torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) "
        "else hidden.dtype",
        "inv_t = 1 / temperature",
        "target_logit = torch.zeros((N,), device=device, dtype=torch.float32)",
        "logprobs = target_logit - log_z",
    )


def read_async_trl(releases: dict[str, Release]) -> Answers:
    trl = releases["trl"]
    config = "trl/experimental/async_grpo/async_grpo_config.py"
    trainer = "trl/experimental/async_grpo/async_grpo_trainer.py"
    worker = "trl/experimental/async_grpo/async_rollout_worker.py"
    for file in (config, trainer, worker):
        trl.lacks("importance_sampling", file)
        trl.lacks("logprobs_mode", file)
    # The old log-probabilities are those that the server sends
    turn = "_AsyncRolloutLoop._generate_one_turn"
    trl.holds(worker, turn, "logprobs = 0", "choice['logprobs']['token_logprobs']")
    trl.holds(
        trainer,
        "AsyncGRPOTrainer.compute_loss",
        "log_ratio = log_probs - old_log_probs",
        "coef_1 = torch.exp(log_ratio)",
        "coef_2 = torch.clamp(coef_1, 1 - self.epsilon_low, 1 + self.epsilon_high)",
    )
    trl.holds(trainer, "AsyncGRPOTrainer.__init__", "temperature = self.temperature")
    check_fused_head(trl)
    trl.has_defaults(config, "AsyncGRPOConfig", epsilon_high=None)
    epsilon = trl.field(config, "AsyncGRPOConfig", "epsilon")
    return Answers(
        correction="no, and no option for it",
        way="-",
        bounds="-",
        sequence="-",
        denominator="**μ**",
        actor="always",
        clip=f"{epsilon}, {epsilon}",
        temperature="yes",
        kept="no",
        engine="whatever the server is set to",
        log_probs="float32, of logits in autocast's type",
        weights=trl.field(config, "AsyncGRPOConfig", "dtype"),
        names="`old_log_probs`, none",
    )


def read_verl(releases: dict[str, Release]) -> Answers:
    verl = releases["verl"]
    config = "verl/trainer/config/_generated_ppo_trainer.yaml"  # all of the trainer's YAML, joined
    losses = "verl/trainer/ppo/core_algos.py"
    engine = "verl/workers/engine/fsdp/transformer_impl.py"
    correction = verl.yaml_value(config, "algorithm.rollout_correction")
    actor = verl.yaml_value(config, "actor_rollout_ref.actor")
    rollout = verl.yaml_value(config, "actor_rollout_ref.rollout")
    must_be(correction["rollout_is"], None)
    must_be(correction["bypass_mode"], False)
    must_be(rollout["calculate_log_probs"], True)
    must_be(actor["optim"]["optimizer_impl"], "torch.optim")
    verl.has_defaults("verl/workers/config/rollout.py", "RolloutConfig", calculate_log_probs=False)
    for file in ASYNC_VERL.values():
        must_be(verl.yaml_value(file, "algorithm.rollout_correction.bypass_mode"), True)
        must_be(verl.yaml_value(file, "actor_rollout_ref.rollout.calculate_log_probs"), True)
    verl.holds(
        "verl/trainer/ppo/rollout_corr_helper.py",
        "compute_rollout_correction_weights",
        "verl_F.masked_sum(log_ratio, response_mask, axis=-1).unsqueeze(-1)",
        "torch.exp(log_ratio_sum_safe).expand_as(log_ratio)",
        "raw_rollout_is_weights.clamp(max=rollout_is_threshold_upper)",
    )
    verl.holds(
        "verl/trainer/ppo/v1/trainer_base.py",
        "PPOTrainer._compute_old_log_prob",
        "data['old_log_probs'] = data.pop('rollout_log_probs')",
        "self.actor_rollout_wg.compute_log_prob(batch)",
    )
    verl.holds(
        "verl/trainer/ppo/rollout_corr_helper.py",
        "apply_bypass_mode",
        "batch.batch['old_log_probs'] = batch.batch['rollout_log_probs']",
    )
    # Where docs/stack_defaults.md saves a dump
    verl.holds(
        "verl/utils/debug/metrics.py",
        "calculate_debug_metrics",
        "rollout_old_log_probs = data.batch['rollout_log_probs']",
        "actor_old_log_probs = data.batch['old_log_probs']",
    )
    clip_by_old = "negative_approx_kl = log_prob - old_log_prob"
    dual_clip = "pg_losses = torch.where(advantages < 0, clip_pg_losses2, clip_pg_losses1)"
    verl.holds(losses, "compute_policy_loss_vanilla", clip_by_old, dual_clip)
    bypass = "loss_type = rollout_corr_config.get('loss_type', 'ppo_clip')"
    verl.holds(losses, "compute_policy_loss_bypass_mode", bypass)
    scaled = "logits / temperature.clamp(min=1e-8).to(logits.dtype)"
    verl.holds(engine, "_scale_logits_by_temperature", scaled)
    verl.lacks("top_p", engine)
    verl.holds(
        "verl/workers/rollout/vllm_rollout/vllm_async_server.py",
        "vLLMHttpServer.launch_server",
        "logprobs_mode = self.config.logprobs_mode",
    )
    verl.holds(
        "verl/utils/torch_functional.py",
        "logprobs_from_logits",
        "logprobs_from_logits_flash_attn(logits, labels, inplace_backward=inplace_backward)",
        "logprobs_from_logits_v2(logits, labels)",
    )
    fallback = "row_logprobs = F.log_softmax(row_logits, dim=-1)"
    verl.holds("verl/utils/torch_functional.py", "logprobs_from_logits_v2", fallback)
    verl.lacks(".float()", "verl/utils/torch_functional.py", "logprobs_from_logits_v2")
    verl.holds(engine, "", "param_dtype = torch.bfloat16")
    stored = actor["fsdp_config"]["model_dtype"]
    return Answers(
        correction="no (`rollout_is: null`)",
        way='`token` or `sequence`, as weights; a threshold such as `"0.5_2.0"` masks; `rollout_rs` '
        "masks, too",
        bounds=f"{correction['rollout_is_threshold']}, none",
        sequence="the product (`rollout_is`)",
        denominator="π₀, recomputed",
        actor=f"**`bypass_mode: true`**, the default of {listed(ASYNC_VERL)}",
        clip=f"{actor['clip_ratio_low']}, {actor['clip_ratio_high']}; dual clip at "
        f"{actor['clip_ratio_c']}",
        temperature="yes, in the logits' type",
        kept="no",
        engine=f"`{rollout['logprobs_mode']}` (`calculate_log_probs: true` in YAML)",
        log_probs="flash-attn's; without it, log_softmax of the logits as they are",
        weights=f"{stored}, computing in bf16 (FSDP)",
        names="`rollout_log_probs`, `old_log_probs`",
    )


def read_openrlhf(releases: dict[str, Release]) -> Answers:
    openrlhf = releases["openrlhf"]
    command = "openrlhf/cli/train_ppo_ray.py"
    correction = "--algo.advantage.is_correction_"
    must_be(openrlhf.option(command, f"{correction}level"), "off")
    must_be(openrlhf.option(command, f"{correction}mode"), "mask")
    must_be(openrlhf.option(command, f"{correction}gating"), "ratio")
    must_be(openrlhf.option(command, "--actor.policy_loss_type"), "ppo")
    must_be(openrlhf.option(command, "--actor.dual_clip"), None)
    must_be(openrlhf.option(command, "--actor.eps_clip_low_high"), None)
    openrlhf.holds(
        "openrlhf/models/loss.py",
        "PolicyLoss.__init__",
        "is_correction_mode == 'clip' "
        "and (is_correction_level == 'seq' or is_correction_gating != 'ratio')",
    )
    openrlhf.holds(
        "openrlhf/models/loss.py",
        "PolicyLoss.forward",
        "raw_policy_log_ratio = log_probs - old_log_probs",
        "log_ratio = log_probs - rollout_log_probs",  # GSPO's
        "stat = masked_mean(is_log_ratio, action_mask, dim=-1).unsqueeze(-1) if seq_level "
        "else is_log_ratio",
        "stat = stat.exp()",
        "coef = stat.clamp(min=low, max=high)",
        "coef = torch.where(keep, token_is, 0.0)",
    )
    openrlhf.holds(
        "openrlhf/trainer/ppo_utils/experience_maker.py",
        "RemoteExperienceMaker.make_experience",
        "samples.action_log_probs = action_log_probs",
    )
    openrlhf.holds(  # where docs/stack_defaults.md saves a dump
        "openrlhf/trainer/ppo_utils/experience_maker.py",
        "RemoteExperienceMaker.make_experience_batch",
        "experiences = self.compute_advantages_and_returns(experiences)",
    )
    is_on = "args.algo.advantage.is_correction_level != 'off'"
    openrlhf.holds(
        "openrlhf/trainer/ppo_utils/samples_generator.py",
        "SamplesGenerator._dispatch_prompts_to_vllm",
        f"logprobs = 1 if self.{is_on} else None",
    )
    openrlhf.holds(command, "train", f"'processed_logprobs' if {is_on} else None")
    openrlhf.holds(
        "openrlhf/models/actor.py",
        "Actor.forward",
        "output['logits'] = output['logits'].to(torch.float32)",
        "output['logits'].div_(self.temperature)",
    )
    openrlhf.holds(
        "openrlhf/trainer/ray/ppo_actor.py",
        "PolicyModelActor.init_model_from_pretrained",
        "temperature = strategy.args.rollout.temperature",
    )
    openrlhf.lacks("top_p", "openrlhf/models/actor.py")
    openrlhf.holds(
        "openrlhf/utils/deepspeed/deepspeed_utils.py",
        "get_train_ds_config",
        "bf16 = {'enabled': param_dtype == 'bf16'}",
    )
    lower, upper = openrlhf.option(command, f"{correction}threshold")
    epsilon = openrlhf.option(command, "--actor.eps_clip")
    return Answers(
        correction="no (`is_correction_level off`)",
        way="`token` or `seq`, as masks (what is kept has its token's weight); "
        "`is_correction_mode clip` makes weights, of tokens alone",
        bounds=f"{upper}, {lower}",
        sequence="the geometric mean of its tokens' ratios",
        denominator="π₀, recomputed",
        actor="`--actor.policy_loss_type gspo` with the correction on",
        clip=f"{epsilon}, {epsilon}",
        temperature="yes",
        kept="no",
        engine="`processed_logprobs` with the correction on, else none",
        log_probs="float32",
        weights=f"{openrlhf.option(command, '--ds.param_dtype')}, and what DeepSpeed's bf16 mode makes of it",
        names="`rollout_log_probs`, `action_log_probs`",
    )


def read_areal(releases: dict[str, Release]) -> Answers:
    areal = releases["areal"]
    config = "areal/api/cli_args.py"
    functional = "areal/utils/functional/functional.py"
    areal.has_defaults(
        config,
        "PPOActorConfig",
        use_decoupled_loss=False,
        recompute_logprob=False,
        rejection_sampling=None,
        eps_clip_higher=None,
        c_clip=None,
        importance_sampling_level="token",
    )
    areal.has_defaults(config, "RejectionSamplingConfig", metric="ratio", agg="mean")
    # Without the two options, the engine's log-probabilities stand for the old policy's
    areal.holds(
        config,
        "PPOActorConfig.should_compute_prox_logp",
        "(self.use_decoupled_loss and not method.skips_forward_pass()) "
        "or (not self.use_decoupled_loss and self.recompute_logprob)",
    )
    areal.holds(
        "areal/trainer/ppo/actor.py",
        "PPOActor._compute_advantages",
        "not self.config.use_decoupled_loss and self.config.recompute_logprob",
        "old_logp = torch.roll(data['logprobs'], shifts=-1, dims=-1)",
        "data['prox_logp'] = old_logp",
        "data['logprobs'] = old_logp",  # shifted, as docs/stack_defaults.md saves it
        "data['loss_mask'] = loss_mask",
    )
    areal.holds(
        functional,
        "ppo_actor_loss_fn",
        "torch.where(loss_mask, torch.exp(logprobs - proximal_logprobs), 0)",
    )
    areal.holds(
        functional,
        "apply_rejection_sampling",
        "seq_log_mean = masked_agg.sum(dim=-1, keepdim=True) / valid_count",
        "behave_imp_weight = torch.exp(seq_log_mean).expand_as(log_ratio)",
    )
    areal.holds(
        "areal/utils/functional/vocab_parallel.py",
        "_gather_logprobs",
        "torch.nn.functional.log_softmax(logits.float() / temperature, dim=-1)",
    )
    areal.holds(
        "areal/engine/fsdp_engine.py",
        "FSDPEngine._compute_logprobs_entropy",
        "temperature = self.config.temperature",
    )
    areal.lacks("gconfig.temperature", "areal/trainer/rl_trainer.py")
    areal.lacks("gconfig.temperature", config)
    areal.lacks("top_p", "areal/engine/fsdp_engine.py")
    areal.lacks("top_p", "areal/utils/functional/vocab_parallel.py")
    request = "VLLMBackend.build_generation_request"
    areal.holds("areal/engine/vllm_remote.py", request, "logprobs = 0")
    areal.lacks("logprobs_mode")
    areal.lacks("logprobs-mode")
    level = areal.field(config, "RejectionSamplingConfig", "level")
    action = areal.field(config, "RejectionSamplingConfig", "action")
    upper = areal.field(config, "RejectionSamplingConfig", "upper")
    lower = areal.field(config, "RejectionSamplingConfig", "lower")
    epsilon = areal.field(config, "PPOActorConfig", "eps_clip")
    temperature = areal.field(config, "TrainEngineConfig", "temperature")
    stored = areal.field(config, "TrainEngineConfig", "optimizer_dtype")
    computed = areal.field(config, "TrainEngineConfig", "dtype")
    return Answers(
        correction="no (`rejection_sampling: null`)",
        way=f"`level: {level}`, `action: {action}`; also `sequence` and `clamp`; only with "
        "`use_decoupled_loss`",
        bounds=f"{upper}, {none(lower)}",
        sequence="the geometric mean of its tokens' ratios",
        denominator="**μ**",
        actor="**by default**: `use_decoupled_loss` and `recompute_logprob` are false",
        clip=f"{epsilon}, {epsilon}",
        temperature=f"by `actor.temperature` ({temperature}), which does not follow "
        "`gconfig.temperature`",
        kept="no",
        engine="yes, in the engine's default mode",
        log_probs="float32",
        weights=f"{stored}, computing in {computed} (FSDP)",
        names="`logprobs`, `prox_logp` (one place earlier)",
    )


def read_swift(releases: dict[str, Release]) -> Answers:
    swift = releases["ms-swift"]
    arguments = "swift/rlhf_trainers/args_mixin.py"
    trainer = "swift/rlhf_trainers/grpo_trainer.py"
    mixin = "swift/rlhf_trainers/rollout_mixin.py"
    swift.has_defaults(
        arguments,
        "GRPOArgumentsMixin",
        rollout_importance_sampling_mode=None,
        epsilon_high=None,
        delta=None,
    )
    swift.holds(
        trainer,
        "GRPOTrainer._compute_sequence_level_ratios",
        "(log_ratio * completion_mask).sum(-1) / completion_mask.sum(-1).clamp(min=1.0)",
    )
    swift.holds(
        trainer,
        "GRPOTrainer._apply_rollout_importance_sampling",
        "is_weights = is_ratio * seq_mask.unsqueeze(-1)",
        "clipped_seq_ratios = torch.clamp(seq_ratios, max=threshold)",
    )
    swift.holds(
        trainer,
        "GRPOTrainer._prepare_batch_inputs",
        "grpo_batch.old_per_token_logps = self._get_per_token_logps_and_entropies("
        "self.model, model_inputs, grpo_batch, origin_data=origin_data)[0]",
    )
    ratio = "log_ratio = per_token_logps - old_per_token_logps"
    engine = "rollout_per_token_logps = grpo_batch.rollout_per_token_logps"
    swift.holds(trainer, "GRPOTrainer._compute_loss_and_metrics", ratio, engine)
    swift.holds(
        trainer,
        "GRPOTrainer._get_logps_via_local_forward",
        "logits.div_(self.temperature)",
        "logps = selective_log_softmax(logits, input_ids_for_logps)",
    )
    swift.lacks("top_p", trainer, "GRPOTrainer._get_logps_via_local_forward")
    swift.holds(trainer, "", "from trl.trainer.utils import selective_log_softmax")
    swift.holds(mixin, "RolloutTrainerMixin._prepare_rollout_params", "logprobs = args.use_vllm")
    swift.holds(
        mixin,
        "RolloutTrainerMixin._prepare_vllm_engine",
        "logprobs_mode = 'processed_logprobs' if self.vllm_version_ge_0_10_2 else None",
    )
    swift.has_defaults(
        "swift/arguments/base_args/model_args.py", "ModelArguments", torch_dtype=None
    )
    by_config = "self.torch_dtype = model_info.torch_dtype"
    swift.holds("swift/model/register.py", "ModelLoader.__init__", by_config)
    threshold = swift.field(
        arguments, "GRPOArgumentsMixin", "rollout_importance_sampling_threshold"
    )
    epsilon = swift.field(arguments, "GRPOArgumentsMixin", "epsilon")
    temperature = swift.field("swift/arguments/rlhf_args.py", "RLHFArguments", "temperature")
    tuner = swift.field("swift/arguments/base_args/base_args.py", "BaseArguments", "tuner_type")
    must_be(tuner, "lora")
    return Answers(
        correction="no (`rollout_importance_sampling_mode` is None)",
        way="`token_truncate`, `token_mask`, `sequence_truncate` or `sequence_mask`, which keeps "
        "the tokens' weights",
        bounds=f"{threshold}, none",
        sequence="the geometric mean of its tokens' ratios",
        denominator="π₀, recomputed",
        actor="no option for it",
        clip=f"{epsilon}, {epsilon}",
        temperature=f"yes; sampling is at {temperature}",
        kept="no",
        engine="`processed_logprobs`, with vLLM from 0.10.2",
        log_probs="TRL's selective_log_softmax of the logits as they are",
        weights="LoRA adapters; with `tuner_type full`, the type in config.json",
        names="`rollout_per_token_logps`, `old_per_token_logps`",
    )


def read_skyrl(releases: dict[str, Release]) -> Answers:
    skyrl = releases["skyrl"]
    config = "skyrl/train/config/config.py"
    losses = "skyrl/backends/skyrl_train/utils/ppo_utils.py"
    correction = "skyrl/backends/skyrl_train/utils/off_policy_correction_utils.py"
    wrapper = "skyrl/backends/skyrl_train/workers/model_wrapper.py"
    functional = "skyrl/backends/skyrl_train/utils/torch_utils.py"
    skyrl.has_defaults(
        config,
        "OffPolicyCorrectionConfig",
        tis_ratio_type=None,
        sequence_mask_metric=None,
        token_mask_is_threshold_high=None,
    )
    skyrl.has_defaults(config, "AlgorithmConfig", policy_loss_type="regular", temperature=None)
    skyrl.has_defaults(config, "TrainerConfig", recompute_old_logprobs_per_minibatch=True)
    skyrl.has_defaults(config, "PolicyConfig", inference_only_init=False)
    skyrl.has_defaults(config, "SamplingParams", logprobs=1)
    skyrl.holds(
        correction,
        "compute_tis_ratio",
        "seq_tis_log_ratio = (token_tis_log_ratio * loss_mask).sum(dim=-1, keepdim=True)",
        "torch.clamp(seq_tis_ratio, max=seq_tis_ratio_cap)",
    )
    skyrl.holds(
        losses,
        "ppo_policy_loss",
        "ratio = safe_exp_delta(log_probs - old_log_probs, clip=20.0, out_dtype=log_probs.dtype)",
    )
    # Two other losses are by the engine's log-probabilities, and asynchronous training allows no
    # more. One of them is no clip of a ratio.
    skyrl.holds(
        losses,
        "rollout_is_policy_loss",
        "ratio = safe_exp_delta(log_probs - rollout_logprobs, clip=20.0, out_dtype=log_probs.dtype)",
        "in_range = (ratio > 1 - config.eps_clip_low) & (ratio < 1 + config.eps_clip_high)",
    )
    skyrl.holds(
        losses,
        "dppo_policy_loss",
        "prob_diff = current_probs - mu_probs",
        "mask[(advantages < 0) & (-prob_diff > delta_low)] = 0.0",
        "loss = -(ratio * advantages * mask)",
    )
    skyrl.has_defaults(config, "DPPOConfig", dppo_type="binary_tv", delta_low=0.2, delta_high=0.2)
    skyrl.holds(
        losses,
        "",
        "LOSSES_WITHOUT_OLD_LOGPROBS = frozenset({PolicyLossType.ROLLOUT_IS, PolicyLossType.DPPO})",
    )
    skyrl.holds(
        "skyrl/train/fully_async_trainer.py",
        "FullyAsyncRayPPOTrainer.__init__",
        "self.cfg.trainer.algorithm.policy_loss_type not in LOSSES_WITH_OLD_LOGPROBS",
    )
    skyrl.holds(
        config,
        "SkyRLTrainConfig.__post_init__",
        "self.trainer.algorithm.temperature = self.generator.sampling_params.temperature",
    )
    skyrl.holds(
        "skyrl/train/trainer.py",
        "RayPPOTrainer.fwd_logprobs_values_reward",
        "training_input['action_log_probs'] = action_log_probs",
        "training_input.get('rollout_logprobs', None) is not None and action_log_probs is not None",
    )
    skyrl.holds(wrapper, "HFModelWrapper.forward", "logits_BSV.div_(temperature)")
    skyrl.lacks("top_p", wrapper)
    skyrl.holds(
        functional, "logprobs_from_logits_v2", "row_logprobs = F.log_softmax(row_logits, dim=-1)"
    )
    skyrl.lacks(".float()", functional, "logprobs_from_logits_v2")
    skyrl.lacks("logprobs_mode")
    skyrl.lacks("logprobs-mode")
    worker = "skyrl/backends/skyrl_train/workers/fsdp/fsdp_worker.py"
    init = "FSDPPolicyWorkerBase.init_model"
    skyrl.holds(worker, init, "bf16 = self.cfg.policy.inference_only_init")
    skyrl.holds(wrapper, "", "torch_dtype = torch.bfloat16 if bf16 else torch.float32")
    token = skyrl.field(config, "OffPolicyCorrectionConfig", "token_tis_ratio_clip_high")
    sequence = skyrl.field(config, "OffPolicyCorrectionConfig", "sequence_tis_ratio_clip_high")
    lower = skyrl.field(config, "AlgorithmConfig", "eps_clip_low")
    upper = skyrl.field(config, "AlgorithmConfig", "eps_clip_high")
    computed = skyrl.field(config, "MixedPrecisionConfig", "param_dtype")
    return Answers(
        correction="no (`tis_ratio_type` is None)",
        way="`token` or `sequence`, as weights; masks apart, such as `sequence_mask_metric`",
        bounds=f"tokens {token}, sequences {sequence}; none",
        sequence="the product; `sequence_mask_metric` is `product` or `geometric`",
        denominator="π₀, recomputed for each mini-batch",
        actor="`policy_loss_type rollout_is`, on both sides whatever the advantage. **Fully "
        "asynchronous training** takes only it and `dppo` of the built-in ones; `dppo` weighs by π/μ "
        "and drops tokens whose probability moved by more than 0.2",
        clip=f"{lower}, {upper}",
        temperature="yes",
        kept="no",
        engine="yes, in the engine's default mode",
        log_probs="flash-attn's; without it, log_softmax of the logits as they are",
        weights=f"float32, computing in {computed} (FSDP)",
        names="`rollout_logprobs`, `action_log_probs`",
    )


def read_unsloth(releases: dict[str, Release]) -> Answers:
    unsloth = releases["unsloth"]
    zoo = releases["unsloth_zoo"]
    patches = "unsloth/models/rl_replacements.py"
    losses = "unsloth_zoo/rl_replacements.py"
    unsloth.holds(
        "unsloth/models/rl.py",
        "_patch_trl_rl_trainers_impl",
        "vllm_importance_sampling_correction = False",
    )
    # TRL's condition for π₀ is kept, and its correction is replaced by one in the loss
    correction = "self.use_vllm and self.vllm_importance_sampling_correction:"
    unsloth.holds(
        patches,
        "grpo_trainer__generate_and_score_completions",
        f"'if {correction}'",
        f"'if False and {correction}'",
    )
    unsloth.holds(
        patches,
        "_unsloth_grpo_rollout_logps_as_old",
        "os.environ.get('UNSLOTH_GRPO_ROLLOUT_LOGPROBS_AS_OLD', '0') != '1'",
    )
    zoo.holds(
        losses,
        "grpo_compute_loss",
        "importance_sampling_ratio = importance_sampling_ratio.sum(dim=-1, keepdim=True)",
        "vllm_importance_sampling_mode in ['geometric_mask', 'geometric_truncate']",
        "log_ratio = new - old",
        "log_ratio = new - new.detach()",
    )
    zoo.holds(
        losses,
        "grpo_truncated_support_kwargs",
        "consumed = bool(getattr(trainer, 'vllm_importance_sampling_correction', False) "
        "or getattr(args, 'off_policy_mask_threshold', None) is not None)",
    )
    zoo.holds(
        losses,
        "chunked_selective_log_softmax",
        "chunk_logits = chunk_logits.to(torch.float32)",
        "chunk_logits = chunk_logits / temperature",
    )
    fused = "unsloth_zoo/fused_losses/chunked_logprob.py"
    zoo.holds(fused, "", "logps = torch.empty(n, device = device, dtype = torch.float32)")
    must_be(zoo.parameter("unsloth_zoo/vllm_utils.py", "load_vllm", "training"), True)
    zoo.holds(
        "unsloth_zoo/vllm_utils.py",
        "load_vllm",
        "logprobs_mode = 'processed_logprobs' if training else 'raw_logprobs'",
    )
    loader = "unsloth/models/loader.py"
    must_be(unsloth.parameter(loader, "FastLanguageModel.from_pretrained", "load_in_4bit"), True)
    must_be(
        unsloth.parameter(loader, "FastLanguageModel.from_pretrained", "full_finetuning"), False
    )
    trl = read_trl(releases)
    return Answers(
        correction="no: TRL's option is replaced by False",
        way=f"{trl.way}, and `geometric_*`",
        bounds=trl.bounds,
        sequence="the product; with `geometric_*`, the geometric mean",
        denominator="as in TRL",
        actor="`UNSLOTH_GRPO_ROLLOUT_LOGPROBS_AS_OLD=1`",
        clip=f"{trl.clip}, as in TRL",
        temperature="yes",
        kept="no; yes on CUDA if the correction is on, where it can "
        "(`UNSLOTH_GRPO_TRUNCATED_SUPPORT`)",
        engine="`processed_logprobs`, from its own vLLM",
        log_probs="float32",
        weights="4 bits, with LoRA adapters",
        names="as in TRL",
    )


# A column's title -> the package that it is read from, and what reads it
STACKS: dict[str, tuple[str, Callable[[dict[str, Release]], Answers]]] = {
    "TRL, GRPOTrainer": ("trl", read_trl),
    "TRL, async_grpo": ("trl", read_async_trl),
    "verl": ("verl", read_verl),
    "OpenRLHF": ("openrlhf", read_openrlhf),
    "AReaL": ("areal", read_areal),
    "ms-swift": ("ms-swift", read_swift),
    "SkyRL": ("skyrl", read_skyrl),
    "unsloth": ("unsloth", read_unsloth),
}


def none(value) -> str:
    return "none" if value is None else str(value)


def listed(names) -> str:
    return " and ".join(f"`{name}`" for name in names)


def must_be(value, wanted) -> None:
    """Raises Changed if a default is another one than the table says."""
    if value != wanted:
        raise Changed(f"a default is {value!r}, not {wanted!r}")


def fetch(folder: Path) -> dict[str, Release]:
    """Downloads and unpacks the pinned releases."""
    requirements = [f"{package}=={version}" for package, version in PINNED.items()]
    archives = download(requirements, folder / "archives")
    return {
        package: Release.unpacked(archive, folder / package)
        for package, archive in zip(PINNED, archives, strict=True)
    }


def commit() -> str:
    """The short hash of this code's commit, with a + if code has changed since; or "unknown"."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "*.py"])
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + "+" * bool(changed.returncode)


def table(releases: dict[str, Release]) -> str:
    """The table of all stacks: a row for each question."""
    answers = [read(releases) for _, read in STACKS.values()]
    packages = [package for package, _ in STACKS.values()]
    versions = ["version", *(f"{package} {PINNED[package]}" for package in packages)]
    dates = [
        "newest file in it",
        *(str(releases[package].dated or "not dated") for package in packages),
    ]
    rows = [versions, dates, *zip(QUESTIONS, *answers, strict=True)]
    return table_of(["", *STACKS], rows)


def main(path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        text = table(fetch(Path(folder)))
    origin = f"`python benchmarks/stack_defaults.py {path}` on {date.today()}; commit {commit()}."
    path.write_text(f"{LEGEND}\n\n{text}\n\n{origin}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
