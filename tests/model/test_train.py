"""Does the trainer learn, resume exactly, and write what the loader reads; and is its forward the model's own maths?"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from model import training_forward as forward
from model.config import load_config, parse_config
from model.demo_model import declared_tensors, demo_config
from model.loading import load_params
from model.tokenizer_training import SPECIAL_TOKENS, TURN_START, save_tokenizer, train_tokenizer
from model.train import Recipe, Trainer, main, orthogonal, rate_factor
from model.training_data import TrainingRows, hold_out, make_chat, read_stories
from tests.shared import shared_path

TINY = Recipe(
    vocab_size=320,
    hidden_size=32,
    intermediate_size=48,
    n_layers=3,
    batch_tokens=128,
    slice_rows=2,
    row_tokens=32,
    long_row_tokens=32,
    long_share=0.2,
    held_out_share=0.1,
)


def one_device() -> jax.sharding.Mesh:
    return jax.make_mesh((1,), ("tp",), devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty little stories of few words: learnt in few steps."""
    who, what = ("king", "fox", "miller", "girl", "bear"), ("garden", "golden bird", "well", "castle")
    stories = [
        f"The {w.title()} and the {t.title()}\n\nOnce upon a time there lived a {w} who had a {t}.\n\n"
        f'"I love my {t}," said the {w}.\n\nSo the {w} went home to the {t}, and was happy.\n'
        for w in who
        for t in what
    ]
    path = tmp_path_factory.mktemp("corpus") / "stories.txt"
    path.write_text("".join(f"{story}<|endoftext|>\n" for story in stories))
    return path


def test_forward_agrees_with_reference() -> None:
    folder = shared_path("tiny_models/qwen3_5")
    config, reference = load_config(folder), np.load(folder / "reference.npz")
    weights = {name: jnp.asarray(value) for name, value in load_file(folder / "model.safetensors").items()}
    tokens = jnp.asarray(reference["prompt_4"])[None]

    @jax.jit
    def both(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        hidden = forward.trunk(weights, tokens, config, jnp.float32)
        ahead = forward.mtp_hidden(weights, hidden[:, :-1], tokens[:, 1:], config, jnp.float32)
        return forward.logits(weights, hidden, jnp.float32), forward.logits(weights, ahead, jnp.float32)

    for found, name in zip(both(tokens), ("logits_4", "mtp_logits_4"), strict=True):
        np.testing.assert_allclose(found[0], reference[name], atol=5e-4)


def test_attention_gradients() -> None:
    rng = np.random.default_rng(0)
    q, k, v, probe = (jnp.asarray(rng.standard_normal((37, 8), dtype=np.float32)) for _ in range(4))

    def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.where(jnp.tril(jnp.ones((37, 37), bool)), q @ k.T, -jnp.inf)
        return jnp.sum(jax.nn.softmax(scores, -1) @ v * probe)

    def ours(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(forward.causal_attention(q, k, v, jnp.float32) * probe)

    for expected, found in zip(
        jax.grad(plain, (0, 1, 2))(q, k, v), jax.grad(ours, (0, 1, 2))(q, k, v), strict=True
    ):
        np.testing.assert_allclose(found, expected, atol=1e-4)


def test_vocabulary_loss_gradients() -> None:
    rng = np.random.default_rng(1)
    hidden = jnp.asarray(rng.standard_normal((12, 16), dtype=np.float32))
    embedding = jnp.asarray(rng.standard_normal((40, 16), dtype=np.float32))
    targets = jnp.asarray(rng.integers(0, 40, 12), jnp.int32)

    def plain(hidden: jax.Array, embedding: jax.Array) -> jax.Array:
        return -jnp.mean(jax.nn.log_softmax(hidden @ embedding.T)[jnp.arange(12), targets])

    def ours(hidden: jax.Array, embedding: jax.Array) -> jax.Array:
        return forward.vocabulary_loss(hidden, embedding, targets, jnp.dtype(jnp.float32))

    np.testing.assert_allclose(ours(hidden, embedding), plain(hidden, embedding), rtol=1e-5)
    pairs = zip(
        jax.grad(plain, (0, 1))(hidden, embedding), jax.grad(ours, (0, 1))(hidden, embedding), strict=True
    )
    for expected, found in pairs:
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_delta_rule_and_gradients_agree_with_token_form() -> None:
    rng = np.random.default_rng(2)
    n_time, n_heads, dim = 70, 2, 4  # more than one chunk, not a whole number of them
    q, k, v, probe = (
        jnp.asarray(rng.standard_normal((1, n_time, n_heads, dim), dtype=np.float32)) for _ in range(4)
    )
    k = forward.l2_norm(k)
    log_decay = -jnp.asarray(rng.uniform(0, 1, (1, n_time, n_heads)), jnp.float32)
    beta = jnp.asarray(rng.uniform(0, 1, (1, n_time, n_heads)), jnp.float32)

    def by_token(q, k, v, log_decay, beta):  # type: ignore[no-untyped-def]
        def step(state, token):  # type: ignore[no-untyped-def]
            q, k, v, log_decay, beta = token
            state = state * jnp.exp(log_decay)[:, None, None]
            update = beta[:, None] * (v - jnp.einsum("hkv,hk->hv", state, k))
            state = state + k[:, :, None] * update[:, None, :]
            return state, jnp.einsum("hkv,hk->hv", state, q)

        first = jnp.zeros((n_heads, dim, dim), jnp.float32)
        return jax.lax.scan(step, first, jax.tree.map(lambda x: x[0], (q, k, v, log_decay, beta)))[1][None]

    arguments = (q, k, v, log_decay, beta)
    np.testing.assert_allclose(jax.jit(forward.delta_rule)(*arguments), by_token(*arguments), atol=2e-5)
    places = tuple(range(5))
    expected = jax.jit(jax.grad(lambda *a: jnp.sum(by_token(*a) * probe), places))(*arguments)
    found = jax.jit(jax.grad(lambda *a: jnp.sum(forward.delta_rule(*a) * probe), places))(*arguments)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-4)


def test_orthogonal_steps_have_singular_values_near_one() -> None:
    rng = np.random.default_rng(3)
    for shape in ((64, 48), (48, 64)):
        step = orthogonal(jnp.asarray(rng.standard_normal(shape, dtype=np.float32)))
        assert step.shape == shape
        scale = max(1.0, shape[0] / shape[1]) ** 0.5
        values = np.linalg.svd(np.asarray(step), compute_uv=False) / scale
        assert values.min() > 0.4 and values.max() < 1.4


def test_rate_rises_stays_and_falls() -> None:
    rates = [rate_factor(p) for p in (0.0, 0.01, 0.3, 0.7, 1.0)]
    assert 0 < rates[0] < rates[1] < rates[2] == 1.0 and rates[3] == pytest.approx(0.5) and rates[4] == 0.0


def test_tokenizer_round_trip(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["Once upon a time there was a king."] * 3, 330)
    assert tokenizer.get_vocab_size() == 330
    assert [tokenizer.token_to_id(t) for t in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    text = "  Two\n\n\nlines,\r\n\ttabs; naïve 東京 👩‍👩‍👧 it's 1234 "
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    save_tokenizer(tokenizer, tmp_path, 4096)
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(TURN_START).ids == [1]
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["eos_token"] == "<|im_end|>" and config["chat_template"]
    with pytest.raises(ValueError, match="256 bytes"):
        train_tokenizer(["x"], 200)


def test_rows_depend_on_seed_step_and_position_only(corpus: Path) -> None:
    stories = read_stories(corpus)
    training, held = hold_out(stories, 0.1, 0)
    assert len(training) + len(held) == len(stories) and not set(training) & set(held)
    tokenizer = train_tokenizer(training, 320)
    rows = TrainingRows.encode(training, tokenizer, 0, 0.5)
    one, position = rows.batch(3, 40, 6, 32)
    again, _ = TrainingRows.encode(training, tokenizer, 0, 0.5).batch(3, 40, 6, 32)
    assert one.shape == (6, 34) and position > 40 and np.array_equal(one, again)
    assert any(row[0] == tokenizer.token_to_id(TURN_START) for row in one)
    assert not np.array_equal(one, rows.batch(4, 40, 6, 32)[0])
    long = rows.running_text(0, 3 * rows.epoch_tokens)  # every epoch holds every story, in its own order
    epochs = long.reshape(3, -1)
    assert not np.array_equal(epochs[0], epochs[1])
    assert np.array_equal(np.sort(epochs[0]), np.sort(epochs[1]))


def test_chats_are_made_of_the_story() -> None:
    story = "The Frog\n\nThere lived a frog in a well.\n\nIt sang.\n\nIt was glad."
    chat = make_chat(story, np.random.default_rng(0))
    assert chat.startswith("<|im_start|>user\n") and chat.endswith("<|im_end|>\n")
    assert "assistant\nThere lived a frog in a well." in chat


def test_corpus_without_stories_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("only one story")
    with pytest.raises(ValueError, match="two or more stories"):
        read_stories(path)


def test_training_lowers_the_loss_and_exports_what_the_loader_reads(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [f"--{k.replace('_', '-')}={getattr(TINY, k)}" for k in TINY.__dataclass_fields__]
    main([f"--corpus={corpus}", f"--out={tmp_path / 'run'}", "--steps=20", *flags])
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["steps"] == 20 and report["held_out"][0]["loss"] < 5.0 < np.log(TINY.vocab_size)
    folder = tmp_path / "run" / "model"
    config = load_config(folder)
    assert config.eos_token_ids == (2, 0) and config.max_position_tokens == 131072
    load_params(
        folder, config, one_device(), jnp.dtype(jnp.bfloat16)
    )  # raises for any missing or unexpected name
    stored = load_file(folder / "model.safetensors")
    assert {n: v.shape for n, v in stored.items()} == {n: s for n, s, _ in declared_tensors(config)}
    with pytest.raises(SystemExit):
        main([f"--corpus={corpus}", f"--out={tmp_path / 'run'}", "--steps=20", *flags])
    assert "--resume" in capsys.readouterr().err


@pytest.mark.slow
def test_resumed_run_repeats_the_uninterrupted_one(corpus: Path, tmp_path: Path) -> None:
    whole = Trainer(TINY, tmp_path / "whole", corpus)
    expected = [whole.train_step(p) for p in (0.1, 0.3, 0.6, 0.9)]
    first = Trainer(TINY, tmp_path / "parts", corpus)
    found = [first.train_step(p) for p in (0.1, 0.3)]
    first.save()
    second = Trainer(TINY, tmp_path / "parts", corpus)
    assert second.restore() and second.step == 2
    found += [second.train_step(p) for p in (0.6, 0.9)]
    assert found == expected
    other = Trainer(Recipe(**{**TINY.__dict__, "seed": 1}), tmp_path / "parts", corpus)
    with pytest.raises(ValueError, match="another recipe"):
        other.restore()


def test_demo_shape_is_within_its_bounds() -> None:
    config = parse_config(demo_config())
    n_parameters = sum(int(np.prod(shape)) for _, shape, _ in declared_tensors(config))
    assert 5e6 < n_parameters < 8e6 and config.mtp_layers == 1 and config.gated_delta
