"""Models of other people's packages (extra ``models``), unedited: one line converts them.

`tests/papers/test_example_scripts.py` trains a Llama, by the example that users run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jfp8
from support.arrays import assert_same
from support.models import products_in

WORDS, LENGTH, BATCH, IMAGE, CLASSES = 16, 16, 32, 32, 4
STRAY = 1 / 4  # so that no model can learn its data by heart
TAIL = 10  # steps over which the loss at an end of a run is averaged


@pytest.fixture(autouse=True)
def as_their_authors_run_it():
    """These models promote ranks, which is not for us to judge."""
    with jax.numpy_rank_promotion("allow"):
        yield


# ---- data: nothing but seeds, and with something to learn


def chains(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Words i32[*shape] of which each is followed by one that belongs to it, but 1 in 4 by any."""
    follower = np.random.default_rng(0).permutation(WORDS)
    words = rng.integers(WORDS, size=shape)
    stray = rng.random(shape) < STRAY
    for t in range(1, shape[-1]):
        words[..., t] = np.where(stray[..., t], words[..., t], follower[words[..., t - 1]])
    return words.astype(np.int32)


def gaps(steps: int) -> dict[str, np.ndarray]:
    """Sentences in which every fourth word is hidden."""
    words = chains(np.random.default_rng(6), steps, BATCH, LENGTH)
    return {"x": np.where(np.arange(LENGTH) % 4 == 2, 0, words).astype(np.int32), "y": words}


def images(steps: int) -> dict[str, np.ndarray]:
    """Noisy views of one picture per class; 1 label in 4 is any."""
    coarse = np.random.default_rng(4).normal(size=(CLASSES, 4, 4, 3))
    pictures = coarse.repeat(IMAGE // 4, axis=1).repeat(IMAGE // 4, axis=2)
    rng = np.random.default_rng(5)
    labels = rng.integers(CLASSES, size=(steps, 64))
    x = pictures[labels] + 0.25 * rng.normal(size=(steps, 64, IMAGE, IMAGE, 3))
    labels = np.where(
        rng.random(labels.shape) < STRAY, rng.integers(CLASSES, size=labels.shape), labels
    )
    return {"x": x.astype(np.float32), "y": labels.astype(np.int32)}


def third_party(module: str) -> Any:
    return pytest.importorskip(module, reason="pip install 'jfp8[models]'")


def masks(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of sentences without padding: ones, and positions."""
    return jnp.ones_like(words), jnp.broadcast_to(jnp.arange(words.shape[-1]), words.shape)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def resnet() -> nn.Module:
    """Bottlenecks in two stages, batch norm; ``setup``."""
    resnet = third_party("transformers.models.resnet.modeling_flax_resnet")
    config = resnet.ResNetConfig(
        embedding_size=16,
        hidden_sizes=[32, 64],
        depths=[2, 2],
        layer_type="bottleneck",
        num_labels=CLASSES,
    )
    return resnet.FlaxResNetForImageClassificationModule(config)


def resnet_loss(model, variables, batch):
    out, mutated = model.apply(variables, batch["x"], deterministic=False, mutable=["batch_stats"])
    return cross_entropy(out.logits, batch["y"]), mutated


def bert() -> nn.Module:
    """Encoder only; the logits are a product by the embedding; every layer is under remat."""
    bert = third_party("transformers.models.bert.modeling_flax_bert")
    config = bert.BertConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.2,
    )
    return bert.FlaxBertForMaskedLMModule(config, gradient_checkpointing=True)


def bert_inputs(batch):
    ones, positions = masks(batch["x"])
    return batch["x"], ones, 0 * ones, positions, None


def bert_loss(model, variables, batch):
    return cross_entropy(model.apply(variables, *bert_inputs(batch)).logits, batch["y"]), {}


@dataclass(frozen=True)
class Products:
    """How many products one ``value_and_grad`` computes: in FP8, by kind, and not."""

    fprop: int
    dgrad: int
    wgrad: int
    plain: int


@dataclass(frozen=True)
class Case:
    """A model, what it learns, and the products that are counted in it.

    `products` is counted by reading the model: a layer has one of each kind, and three plain ones
    if it is exempt (two if nothing before it has parameters).
    """

    model: Callable[[], nn.Module]
    data: Callable[[int], dict[str, np.ndarray]]
    inputs: Callable[[dict[str, np.ndarray]], tuple[Any, ...]]
    loss: Callable[..., tuple[jax.Array, dict[str, Any]]]
    products: Products
    learning_rate: float | optax.Schedule
    steps: int = 40

    def batches(self) -> Iterator[dict[str, np.ndarray]]:
        data = self.data(self.steps)
        return ({name: array[t] for name, array in data.items()} for t in range(self.steps))

    def example(self) -> dict[str, np.ndarray]:
        return {name: array[0] for name, array in self.data(1).items()}


def pixels(batch):
    return (batch["x"],)


LOGITS, FIRST_CONVOLUTION = 3, 2
ATTENTION = 2 * 3  # queries by keys and weights by values; neither is asked for in FP8

CASES = {
    # 2 stages of 2 bottlenecks of 3 convolutions, the first of each stage with a shortcut
    "resnet": Case(
        resnet,
        images,
        pixels,
        resnet_loss,
        Products(14, 14, 14, plain=FIRST_CONVOLUTION + LOGITS),
        learning_rate=optax.cosine_decay_schedule(3e-3, 40),  # batch statistics are noise enough
    ),
    # Six in a layer and one before the logits; the backward pass computes the layers again.
    "bert": Case(
        bert,
        gaps,
        bert_inputs,
        bert_loss,
        Products(13 + 12, 13, 13, plain=2 * (ATTENTION + 2) + LOGITS),
        learning_rate=3e-3,
    ),
}


def initial(case: Case, model: nn.Module) -> dict[str, Any]:
    key = jax.random.key(0, impl="rbg")  # for one that compiles fast
    return jax.jit(model.init)(key, *case.inputs(case.example()))


def state_of(case: Case, model: nn.Module) -> jfp8.TrainState:
    tx = optax.adam(case.learning_rate)
    return jfp8.TrainState.create(apply_fn=model.apply, variables=initial(case, model), tx=tx)


def train(case: Case, model: nn.Module) -> tuple[jfp8.TrainState, np.ndarray]:
    @jax.jit
    def train_step(state, batch):
        loss, grads = jfp8.value_and_grad(functools.partial(case.loss, model))(state, batch)
        return state.apply_gradients(grads), loss

    state, losses = state_of(case, model), []
    for batch in case.batches():
        state, loss = train_step(state, batch)
        losses.append(loss)
    return state, np.asarray(losses)


def without_fp8(state: jfp8.TrainState) -> dict[str, Any]:
    return {"params": state.params, **state.collections}


@pytest.fixture(params=CASES)
def case(request) -> Case:
    return CASES[request.param]


@pytest.mark.slow
def test_every_product_that_should_be_is_in_fp8(case):
    model = case.model()
    expected, counts = case.products, {}
    for kind, m in (("plain", model), ("converted", jfp8.convert(model, "delayed"))):
        gradient = jfp8.value_and_grad(functools.partial(case.loss, m))
        state = jax.eval_shape(functools.partial(state_of, case, m))
        jaxpr = jax.make_jaxpr(gradient)(state, case.example()).jaxpr
        counts[kind] = products_in(jaxpr, in_loops=True)
    assert counts["converted"] == vars(expected)
    assert counts["plain"] == {"plain": sum(vars(expected).values())}


@pytest.mark.slow
def test_parameters_are_those_of_the_model(case):
    model = case.model()
    theirs, ours = initial(case, model), initial(case, jfp8.convert(model, "delayed"))
    assert set(ours) - set(theirs) == {"fp8", "fp8_sink"}
    assert_same({name: ours[name] for name in theirs}, theirs)


@pytest.mark.slow
def test_it_trains_as_it_did(case):
    model = case.model()
    converted = jfp8.convert(model, "delayed")
    theirs, their_losses = train(case, model)
    ours, our_losses = train(case, converted)

    start, end = their_losses[0], their_losses[-TAIL:].mean()
    assert end < 0.7 * start
    # Float32 runs of the ResNet end up to 0.6 percent apart if initial weights differ by 1e-6.
    assert our_losses[-TAIL:].mean() == pytest.approx(end, rel=0.02)
    assert (our_losses != their_losses).any()  # FP8 is somewhere in it

    # Each reads the checkpoint of the other, and computes with it what the other does.
    last = list(case.batches())[-1]
    evaluate = [jax.jit(functools.partial(case.loss, m)) for m in (model, converted)]
    for writer, reader in ((theirs, ours), (ours, theirs)):
        checkpoint = flax.serialization.to_bytes(without_fp8(writer))
        read = flax.serialization.from_bytes(without_fp8(reader), checkpoint)
        assert_same(read, without_fp8(writer))
        plain, fp8 = (float(loss(read, last)[0]) for loss in evaluate)
        assert fp8 == pytest.approx(plain, rel=0.05)
