"""Do the trainer and the sampler of reinforcement learning agree if the sampler has 4-bit weights?

tunix trains its Qwen3 (2 layers of width 64) by GRPO to draw vowels: without quantization; with a
sampler whose weights are in MXFP4; and with this sampler and a trainer under `QuantizationAware`.
After each step `jfp8.checkpoint.serving_tensors` sends the weights in the layout of
compressed-tensors, and the sampler dequantizes the bytes by code of its own. `jfp8.debug.mismatch`
compares the log-probabilities of the drawn tokens.

    pip install --no-deps google-tunix==0.1.7 qwix==0.1.8 jaxtyping wadler-lindig
    python benchmarks/rl_mismatch.py              # 3 seeds, some minutes on two cores
    python benchmarks/rl_mismatch.py --table      # what has been run, as Markdown
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import results_file
from flax import nnx

import jfp8

RESULTS = results_file.ROOT / "benchmarks/results/rl_mismatch.json"
STEPS, PROMPTS, GROUP, LENGTH = 60, 4, 8, 12
LETTERS = "\0\1\2abcdefghijklmnopqrstuvwxyz .!"  # padding, begin and end come first
SIZES = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 16}
CONFIG = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
NAMES = jfp8.checkpoint.names_for("tunix/qwen3", CONFIG | {"head_dim": 16})
QAT = {"layers/*": jfp8.recipes.QuantizationAware("mxfp4")}
WAYS = {"no quantization": (None, None), "rounded for the sampler": (None, QAT)}  # train, export
WAYS["quantization-aware"] = (QAT, QAT)


class Letters:
    """A tokenizer: a token for each letter."""

    pad_id, bos_id, eos_id = (lambda self, i=i: i for i in range(3))
    encode = staticmethod(lambda text, **_: [LETTERS.index(letter) for letter in text])
    decode = staticmethod(lambda ids, **_: "".join(LETTERS[i] for i in ids))


def dequantized(stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights of a checkpoint of compressed-tensors in MXFP4, as an engine computes them."""
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    found = {n: x for n, x in stored.items() if not n.endswith(("_packed", "_scale"))}
    for name in (n.removesuffix("_packed") for n in stored if n.endswith("_packed")):
        packed, exponents = stored[f"{name}_packed"], stored[f"{name}_scale"].astype(int) - 127
        codes = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1, 32)
        values = np.where(codes & 8, -1, 1) * e2m1[codes & 7] * np.exp2(exponents)[..., None]
        found[name] = values.reshape(len(packed), -1).astype(np.float32)
    return found


def run(trainer: Any, export: Any, seed: int) -> dict[str, list[float]]:
    """Return the mean reward and the mismatch of each step, for two recipes."""
    from tunix.models.qwen3 import model as qwen3
    from tunix.rl import common, rl_cluster
    from tunix.rl.grpo import grpo_learner
    from tunix.rl.rollout import base_rollout, vanilla_rollout

    sizes = dict(SIZES, num_heads=4, vocab_size=32, embed_dim=64, hidden_dim=128)
    config = qwen3.ModelConfig(**sizes, rope_theta=10_000, norm_eps=1e-6)
    actor, sampler = (qwen3.Qwen3(config, rngs=nnx.Rngs(seed)) for _ in range(2))
    actor = actor if trainer is None else jfp8.convert(actor, trainer, exempt=())
    found: dict[str, list[float]] = {"reward": [], "k3": []}

    class Sampler(vanilla_rollout.VanillaRollout):
        """tunix's sampler, to which weights come as the arrays of a checkpoint."""

        def __init__(self, rollout_actor: Any, tokenizer: Any, **_: Any) -> None:
            self.actor = rollout_actor
            super().__init__(sampler, tokenizer, base_rollout.CacheConfig(cache_size=64, **SIZES))
            self.update_params(nnx.state(rollout_actor, nnx.Param))

        @jax.transfer_guard("allow")
        def update_params(self, params: Any, filter_types: Any = None) -> None:
            how = {"names": NAMES, "recipe": export}
            stream = jfp8.checkpoint.serving_tensors(params, "compressed-tensors", **how)
            weights = nnx.state(self.model(), nnx.Param)
            received = jfp8.checkpoint.to_flax_params(dequantized(dict(stream)), NAMES)
            nnx.replace_by_pure_dict(weights, received)
            super().update_params(weights)

        def generate(self, prompts: list[str], rollout_config: Any, **more: Any) -> Any:
            key = jax.random.fold_in(jax.random.PRNGKey(seed), len(found["k3"]))
            rollout_config = dataclasses.replace(rollout_config, seed=key)
            drawn = super().generate(prompts, rollout_config, **more)
            padded = lambda rows: np.stack([np.pad(x, (0, LENGTH - len(x))) for x in rows])
            tokens, theirs = padded(drawn.tokens), padded(drawn.logprobs)
            asked = jnp.asarray(drawn.left_padded_prompt_tokens), jnp.asarray(tokens)
            ours = common.compute_per_token_logps(*nnx.split(self.actor), *asked, 0, 2)
            # If padding is drawn, tunix's trainer masks it in attention, and its sampler does not.
            found["k3"].append(jfp8.debug.mismatch(ours, theirs, np.cumprod(tokens != 0, 1)).k3)
            return drawn

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        shares = [sum(x in "aeiou" for x in text) / LENGTH for text in completions]
        found["reward"].append(float(np.mean(shares)))
        return shares

    mesh = jax.sharding.Mesh(np.reshape(jax.devices()[:1], (1, 1)), ("fsdp", "tp"))
    lengths = {"max_tokens_to_generate": LENGTH, "max_prompt_length": 4, "eos_tokens": [2]}
    steps = {"max_steps": STEPS, "eval_every_n_steps": 10**6}
    cluster_config = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys(rl_cluster.Role, mesh),
        rollout_engine=Sampler,
        training_config=rl_cluster.RLTrainingConfig(actor_optimizer=optax.adam(3e-4), **steps),
        rollout_config=base_rollout.RolloutConfig(temperature=1, return_logprobs=True, **lengths),
    )
    cluster = rl_cluster.RLCluster(actor=actor, tokenizer=Letters(), cluster_config=cluster_config)
    algorithm = grpo_learner.GRPOConfig(num_generations=GROUP, beta=0.0)
    learner = grpo_learner.GRPOLearner(cluster, algorithm, reward_fns=reward)
    letters = np.random.default_rng(seed).choice(list(LETTERS[3:29]), (STEPS, PROMPTS, 4))
    learner.train([{"prompts": np.array(list(map("".join, batch)))} for batch in letters])
    return found


def table(runs: dict[str, list[dict[str, list[float]]]]) -> str:
    """The means over all seeds, and the largest mismatch."""
    columns = ("", "reward, first 10 steps", "last 10", "k3, first 10", "last 10", "largest")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for way, found in runs.items():
        reward, k3 = (np.array([run[name] for run in found]) for name in ("reward", "k3"))
        numbers = [f"{x.mean():.2f}" for x in (reward[:, :10], reward[:, -10:])]
        numbers += [f"{x:.0e}" for x in (k3[:, :10].mean(), k3[:, -10:].mean(), k3.max())]
        lines.append(f"| {way} | {' | '.join(numbers)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.path.append(str(results_file.ROOT / "benchmarks/clients"))
    from stand_ins import stand_in_for

    names = "metrax dialog huggingface_hub sentencepiece tensorflow grain wandb PIL pandas"
    stand_in_for(*names.split(), "perfetto", "kagglehub", "psutil", "transformers")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true", help="print what has been run, and end")
    results = results_file.read(RESULTS, {"conditions", "runs"})
    if not parser.parse_args().table:
        runs = {way: [run(*recipes, seed) for seed in range(3)] for way, recipes in WAYS.items()}
        results = {"conditions": results_file.conditions(tunix="0.1.7", steps=STEPS), "runs": runs}
        results_file.write(RESULTS, results)
    print(table(results["runs"]))
