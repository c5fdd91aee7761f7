"""`python -m model.train`: how is the bundled demo model made? Trains a small qwen3_5 hybrid with an MTP head.

Owns the run's folder: `tokenizer/`, `checkpoints/` (orbax: weights, optimiser, place in the data; written
atomically), `model/` (the export that `serve.py` loads, rewritten at every checkpoint) and `report.json`.
Everything runs on the main thread. A run bounded by --steps is a function of its arguments; one bounded by
--minutes follows the clock: its learning rate ends at zero when its time does, however busy the machine is.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from tokenizers import Tokenizer
from tqdm import tqdm

from model import training_forward
from model.config import ModelConfig, parse_config
from model.demo_model import demo_config, initial_tensors, write_model
from model.tokenizer_training import TURN_END, save_tokenizer, train_tokenizer
from model.training_data import TrainingRows, held_out_rows, hold_out, read_stories

Tensors = dict[str, jax.Array]
MATRIX_RATE = 0.02  # Muon: every matrix moves by updates of spectral norm 1 times this
VECTOR_RATE = 3e-3  # Adam: embedding, norms, convolutions, decay parameters
WARM_SHARE, FALL_START_SHARE = 0.02, 0.4


@dataclass(frozen=True)
class Recipe:
    """What determines a run, beside its corpus. Rows of `row_tokens` for most of it, then of `long_row_tokens`."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 384
    n_layers: int = 6
    seed: int = 0
    batch_tokens: int = 2048
    slice_rows: int = 4
    row_tokens: int = 512
    long_row_tokens: int = 4096
    long_share: float = 0.08
    chat_share: float = 0.1
    held_out_share: float = 0.02
    mtp_weight: float = 0.25
    compute_dtype: str = "bfloat16"


def rate_factor(progress: float) -> float:
    """Learning rate relative to its peak: a short rise, level, then a straight fall to zero."""
    fall = (1.0 - progress) / (1.0 - FALL_START_SHARE)
    return max(0.0, min(1.0, (progress + 1e-3) / WARM_SHARE, fall))


def orthogonal(momentum_oi: jax.Array) -> jax.Array:
    """Muon's step for a matrix: its momentum with all singular values near one (five Newton-Schulz iterations,
    operands bfloat16), scaled so that tall matrices' outputs move as much as square ones'. After K. Jordan's Muon;
    optax has it too, in float32, at three times the cost."""
    n_out, n_in = momentum_oi.shape
    x = momentum_oi.T if n_out > n_in else momentum_oi
    x = x / (jnp.linalg.norm(x) + 1e-7)

    def product(a: jax.Array, b: jax.Array, axis_b: int) -> jax.Array:
        operands = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
        dimensions = (((1,), (axis_b,)), ((), ()))
        return jax.lax.dot_general(*operands, dimensions, preferred_element_type=jnp.float32)

    for _ in range(5):
        gram = product(x, x, 1)
        x = 3.4445 * x + product(-4.775 * gram + 2.0315 * product(gram, gram, 0), x, 0)
    x = x * max(1.0, n_out / n_in) ** 0.5
    return x.T if n_out > n_in else x


def make_optimizer() -> optax.GradientTransformation:
    """Muon for the layers' matrices, Adam for the rest; rates are peaks (the step scales the updates)."""

    def kinds(tensors: Tensors) -> dict[str, str]:
        def is_matrix(name: str, tensor: jax.Array) -> bool:
            return tensor.ndim == 2 and min(tensor.shape) >= 32 and "embed_tokens" not in name

        return {name: "matrix" if is_matrix(name, t) else "other" for name, t in tensors.items()}

    directions = optax.stateless(lambda updates, _: jax.tree.map(orthogonal, updates))
    matrices = optax.chain(optax.trace(0.95, nesterov=True), directions, optax.scale(-MATRIX_RATE))
    others = optax.adam(VECTOR_RATE, b1=0.9, b2=0.98)
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.partition({"matrix": matrices, "other": others}, kinds)
    )


class Trainer:
    """One run: its compiled programs, weights, optimiser state and place in the data."""

    def __init__(self, recipe: Recipe, out: Path, corpus: Path) -> None:
        self.recipe, self.out = recipe, out
        training, held = hold_out(read_stories(corpus), recipe.held_out_share, recipe.seed)
        self.tokenizer = self._tokenizer(training)
        config_json = demo_config(
            recipe.vocab_size, recipe.hidden_size, recipe.intermediate_size, recipe.n_layers
        )
        self.config_json = {**config_json, "eos_token_id": self.tokenizer.token_to_id(TURN_END)}
        self.config: ModelConfig = parse_config(self.config_json)
        self.rows = TrainingRows.encode(training, self.tokenizer, recipe.seed, recipe.chat_share)
        self.held_rows = {
            n_tokens: held_out_rows(held, self.tokenizer, n_tokens, 10_000)
            for n_tokens in (recipe.row_tokens, recipe.long_row_tokens)
        }
        tensors = initial_tensors(self.config, recipe.seed)
        self.tensors: Tensors = {name: jnp.asarray(value) for name, value in tensors.items()}
        self.optimizer = make_optimizer()
        with jax.numpy_dtype_promotion("standard"):
            self.optimizer_state = jax.jit(self.optimizer.init)(self.tensors)
        self.step, self.position_tokens, self.seen_tokens, self.elapsed_s = 0, 0, 0, 0.0
        self.log: list[dict[str, float]] = []
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self.checkpoints = ocp.CheckpointManager((out / "checkpoints").resolve(), options=options)
        dtype = jnp.dtype(recipe.compute_dtype)
        self._gradients = jax.jit(
            partial(_gradients, config=self.config, weight=recipe.mtp_weight, dtype=dtype),
            donate_argnums=1,
            static_argnums=3,
        )
        self._apply = jax.jit(partial(_apply, self.optimizer), donate_argnums=(0, 1))
        self._agreement = jax.jit(
            partial(training_forward.agreement, config=self.config, compute_dtype=dtype)
        )
        self._losses = jax.jit(
            partial(training_forward.losses, n_mtp_rows=1, config=self.config, compute_dtype=dtype)
        )

    def _tokenizer(self, stories: list[str]) -> Tokenizer:
        path = self.out / "tokenizer" / "tokenizer.json"
        if not path.is_file():
            tokenizer = train_tokenizer(stories, self.recipe.vocab_size)
            save_tokenizer(tokenizer, path.parent, demo_config()["max_position_embeddings"])
        return Tokenizer.from_file(str(path))

    def train_step(self, progress: float) -> tuple[float, float]:
        """One optimiser step -> (trunk loss, MTP loss), in nats per token."""
        recipe = self.recipe
        row_tokens = recipe.long_row_tokens if progress >= 1.0 - recipe.long_share else recipe.row_tokens
        n_rows = max(1, recipe.batch_tokens // row_tokens)
        batch, self.position_tokens = self.rows.batch(self.step, self.position_tokens, n_rows, row_tokens)
        gradients = jax.tree.map(jnp.zeros_like, self.tensors)
        parts, total = [], np.zeros(2)
        for start in range(0, n_rows, recipe.slice_rows):
            part = batch[start : start + recipe.slice_rows]
            n_mtp_rows = max(1, len(part) // 2)  # half the rows teach the MTP head: enough, and cheaper
            gradients, losses = self._gradients(self.tensors, gradients, part, n_mtp_rows, len(part) / n_rows)
            parts.append((losses, len(part) / n_rows))
        with jax.numpy_dtype_promotion("standard"):
            factor = np.float32(rate_factor(progress))
            self.tensors, self.optimizer_state = self._apply(
                self.tensors, self.optimizer_state, gradients, factor
            )
        for losses, share in parts:
            total += np.asarray(losses) * share
        if not np.isfinite(total).all():
            raise FloatingPointError(
                f"the loss at step {self.step} is {total}; resume from the last checkpoint"
            )
        self.step += 1
        self.seen_tokens += n_rows * row_tokens
        return float(total[0]), float(total[1])

    def evaluate(self, tensors: Tensors, row_tokens: int, n_rows: int) -> dict[str, float]:
        """Held-out loss (nats per token), MTP loss and MTP agreement over at most `n_rows` held-out rows."""
        rows = self.held_rows[row_tokens]
        rows = rows[np.unique(np.linspace(0, len(rows) - 1, min(n_rows, len(rows))).astype(int))]
        found = np.mean(
            [[*self._losses(tensors, row[None]), self._agreement(tensors, row[None])] for row in rows], axis=0
        )
        return {
            "row_tokens": row_tokens,
            "rows": len(rows),
            "loss": round(float(found[0]), 4),
            "perplexity": round(math.exp(found[0]), 2),
            "mtp_loss": round(float(found[1]), 4),
            "mtp_agreement": round(float(found[2]), 4),
        }

    def save(self) -> None:
        """Writes a checkpoint and the export. A checkpoint that was cut off has no final name and is not found."""
        state = {"tensors": self.tensors, "optimizer": self.optimizer_state}
        place = {
            "position_tokens": self.position_tokens,
            "seen_tokens": self.seen_tokens,
            "elapsed_s": self.elapsed_s,
            "log": self.log,
            "recipe": asdict(self.recipe),
        }
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), place=ocp.args.JsonSave(place))
        self.checkpoints.save(self.step, args=items, force=True)
        write_model(self.out / "model", self.config_json, self.tensors, self.out / "tokenizer")

    def restore(self) -> bool:
        """Continues from the newest checkpoint; False if there is none. Raises ValueError for another recipe's."""
        step = self.checkpoints.latest_step()
        if step is None:
            return False
        state = {"tensors": self.tensors, "optimizer": self.optimizer_state}
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), place=ocp.args.JsonRestore())
        found = self.checkpoints.restore(step, args=items)
        if found["place"]["recipe"] != asdict(self.recipe):
            raise ValueError(f"{self.out} holds a run of another recipe: {found['place']['recipe']}")
        self.tensors, self.optimizer_state = found["state"]["tensors"], found["state"]["optimizer"]
        place: dict[str, Any] = found["place"]
        self.step, self.position_tokens = step, place["position_tokens"]
        self.seen_tokens, self.elapsed_s, self.log = place["seen_tokens"], place["elapsed_s"], place["log"]
        return True

    def run(self, steps: int | None, minutes: float | None, checkpoint_minutes: float) -> dict[str, Any]:
        """Trains to the end of the budget, saving as it goes and when interrupted -> the final report."""
        progress_of = _progress_of(steps, minutes)
        last_s = saved_s = time.monotonic()
        total = steps if steps is not None else round((minutes or 0) * 60)
        with tqdm(total=total, unit="step" if steps is not None else "s", smoothing=0.05) as bar:
            try:
                while (progress := progress_of(self.step, self.elapsed_s)) < 1.0:
                    loss, mtp_loss = self.train_step(progress)
                    now_s = time.monotonic()
                    self.elapsed_s, last_s = self.elapsed_s + now_s - last_s, now_s
                    self.log.append(
                        {"step": self.step, "loss": round(loss, 4), "mtp_loss": round(mtp_loss, 4)}
                    )
                    bar.n = min(total, self.step if steps is not None else round(self.elapsed_s))
                    bar.set_postfix_str(
                        f"step {self.step}, loss {loss:.3f}, mtp {mtp_loss:.3f}, {self.seen_tokens / 1e6:.2f}M tokens"
                    )
                    if now_s - saved_s > checkpoint_minutes * 60:
                        self.save()
                        held = self.evaluate(self.tensors, self.recipe.row_tokens, 24)
                        bar.write(f"step {self.step}: held-out {json.dumps(held)}")
                        saved_s = time.monotonic()
                        self.elapsed_s, last_s = self.elapsed_s + saved_s - now_s, saved_s
            except KeyboardInterrupt:
                bar.write("stopped; --resume continues from here")
            if self.checkpoints.latest_step() != self.step:
                self.save()
        return self.report()

    def report(self) -> dict[str, Any]:
        """Figures of the exported (bfloat16) weights over all held-out text, kept in report.json."""
        stored = {
            name: tensor.astype(jnp.bfloat16).astype(jnp.float32) for name, tensor in self.tensors.items()
        }
        report = {
            "parameters": sum(t.size for t in self.tensors.values()),
            "steps": self.step,
            "seen_tokens": self.seen_tokens,
            "epoch_tokens": self.rows.epoch_tokens,
            "elapsed_minutes": round(self.elapsed_s / 60, 1),
            "held_out": [self.evaluate(stored, n_tokens, 10_000) for n_tokens in self.held_rows],
            "recipe": asdict(self.recipe),
        }
        (self.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
        return report


def _progress_of(steps: int | None, minutes: float | None) -> Callable[[int, float], float]:
    if steps is not None:
        return lambda step, elapsed_s: step / steps if steps else 1.0
    if minutes is None:
        raise ValueError("one of steps and minutes must bound the run")
    return lambda step, elapsed_s: elapsed_s / (minutes * 60)


def _gradients(
    tensors: Tensors,
    gradients: Tensors,
    rows_bt: jax.Array,
    n_mtp_rows: int,
    share: jax.Array,
    *,
    config: ModelConfig,
    weight: float,
    dtype: jnp.dtype,
) -> tuple[Tensors, tuple[jax.Array, jax.Array]]:
    def objective(tensors: Tensors) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        trunk_loss, mtp_loss = training_forward.losses(tensors, rows_bt, n_mtp_rows, config, dtype)
        return (trunk_loss + weight * mtp_loss) * share, (trunk_loss, mtp_loss)

    new, losses = jax.grad(objective, has_aux=True)(tensors)
    return jax.tree.map(jnp.add, gradients, new), losses


def _apply(
    optimizer: optax.GradientTransformation,
    tensors: Tensors,
    state: Any,
    gradients: Tensors,
    factor: jax.Array,
) -> tuple[Tensors, Any]:
    updates, state = optimizer.update(gradients, state, tensors)
    return optax.apply_updates(tensors, jax.tree.map(lambda u: u * factor, updates)), state


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m model.train", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--corpus", type=Path, required=True, help="stories, .txt or .xz, ended by <|endoftext|> lines"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="the run's folder; its model/ is what serve.py loads"
    )
    parser.add_argument("--resume", action="store_true", help="continue the run in --out")
    bound = parser.add_mutually_exclusive_group(required=True)
    bound.add_argument("--minutes", type=float, help="train this long in all, over every resumption")
    bound.add_argument("--steps", type=int, help="train this many steps in all")
    parser.add_argument("--checkpoint-minutes", type=float, default=4.0)
    for name, default in asdict(Recipe()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    given = parser.parse_args(arguments)
    recipe = Recipe(**{name: getattr(given, name) for name in asdict(Recipe())})
    if not given.resume and (given.out / "checkpoints").exists():
        parser.error(f"{given.out} holds a run already: give --resume to continue it, or another --out")
    if jax.config.jax_compilation_cache_dir is None:  # a resumed run need not compile again
        jax.config.update("jax_compilation_cache_dir", str(given.out / "compiled"))
    trainer = Trainer(recipe, given.out, given.corpus)
    if given.resume and trainer.restore():
        print(f"resumed at step {trainer.step}")
    report = trainer.run(given.steps, given.minutes, given.checkpoint_minutes)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
