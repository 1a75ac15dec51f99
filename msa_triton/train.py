"""Trains `SmallLM` on the source of Python's standard library: dense, then warm-up, then sparse.

    python -m msa_triton.train --steps 3600 --topk 4 --json curves.json

trains dense for half of the steps, then from that checkpoint in three ways: dense to the end (the baseline);
warm-up, then sparse with the blocks that the index chooses; sparse with a sliding window of the same budget, the last
topk blocks.
Validation loss is measured along the way. Runs on a CPU.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from msa_ref import dense
from msa_ref.inputs import standard_library_text
from msa_ref.recall import last_blocks, random_blocks, score_recall, teacher_block_mass
from msa_triton.model import SmallLM, SmallLMConfig


@dataclass(frozen=True)
class Recipe:
    """How to train; both learning rates rise linearly over `ramp` steps, then fall linearly towards 0 after the last.

    `batch` is windows of `SmallLMConfig.context` bytes per step; `clip` bounds the gradient norm of the backbone alone,
    so that the index branch cannot change the backbone's updates; `kl_weight` is lambda of P Alg. 1.
    """

    steps: int = 1400
    batch: int = 2
    learning_rate: float = 4e-3
    index_learning_rate: float = 1e-2
    weight_decay: float = 0.1
    clip: float = 1.0
    kl_weight: float = 1.0
    ramp: int = 50
    seed: int = 0


class Trainer:
    """A model, its optimiser and its place in the schedule; `fork` copies all three.

    The batch of a step depends on the seed and the step alone, so that forks see the same text.

    Attributes:
        model: the `SmallLM`. step: steps taken so far.
        history: a dict per step, with step, mode, lm_loss and kl_loss (nats; the KL summed over layers).
    """

    def __init__(self, config: SmallLMConfig, recipe: Recipe, text: Tensor):
        torch.manual_seed(recipe.seed)
        self.model, self.recipe, self.text = SmallLM(config), recipe, text
        self.step, self.history = 0, []
        self.optimizer = torch.optim.AdamW(
            [
                {"params": list(self.model.backbone_parameters()), "rate": recipe.learning_rate},
                {"params": list(self.model.index_parameters()), "rate": recipe.index_learning_rate},
            ],
            betas=(0.9, 0.95),
            weight_decay=recipe.weight_decay,
        )

    def fork(self) -> Trainer:
        """A copy that goes its own way; the text is shared."""
        return copy.deepcopy(self, {id(self.text): self.text})

    def run(self, steps: int, mode: str, select: Callable | None = None) -> None:
        """Takes `steps` steps in a mode of `SmallLM`, with a progress bar."""
        for _ in tqdm(range(steps), desc=mode, file=sys.stdout, mininterval=2, ncols=80):
            self._set_learning_rates()
            tokens = windows(self.text, self.recipe.batch, self.model.config.context, self.recipe.seed + self.step)
            result = self.model(tokens[:, :-1], tokens[:, 1:], mode=mode, select=select)
            self.optimizer.zero_grad()
            (result.lm_loss + self.recipe.kl_weight * result.kl_loss).backward()
            torch.nn.utils.clip_grad_norm_(list(self.model.backbone_parameters()), self.recipe.clip)
            self.optimizer.step()
            losses = {"lm_loss": result.lm_loss.item(), "kl_loss": result.kl_loss.item()}
            self.history.append({"step": self.step, "mode": mode, **losses})
            self.step += 1

    def _set_learning_rates(self) -> None:
        recipe = self.recipe
        fall = (recipe.steps - self.step) / max(recipe.steps - recipe.ramp, 1)
        share = min((self.step + 1) / recipe.ramp, fall)
        for group in self.optimizer.param_groups:
            group["lr"] = group["rate"] * share


def windows(text: Tensor, count: int, context: int, seed: int) -> Tensor:
    """[count, context + 1] bytes at random places of a text, int64; the same for the same seed."""
    start = torch.randint(len(text) - context, (count, 1), generator=torch.Generator().manual_seed(seed))
    return text[start + torch.arange(context + 1)].long()


@torch.no_grad()
def evaluate(model: SmallLM, text: Tensor, *, mode="sparse", select=None, count=96, seed=12345) -> float:
    """Mean loss, nats per byte, over `count` windows of a text that depend on the seed alone."""
    losses = []
    for tokens in windows(text, count, model.config.context, seed).split(8):
        losses.append(model(tokens[:, :-1], tokens[:, 1:], mode=mode, select=select).lm_loss * len(tokens))
    return float(sum(losses) / count)


@torch.no_grad()
def layer_recall(model: SmallLM, text: Tensor, *, select=None, exclude_own=False, count=8, seed=54321) -> list[float]:
    """Score recall of each layer's selection (`msa_ref.recall.score_recall`), over `count` windows of a text."""
    config = model.config
    tokens = windows(text, count, config.context, seed)[:, :-1]
    forced = {"local_blocks": config.local_blocks, "init_blocks": config.init_blocks}
    recalls = []
    for q, k, _, index_q, index_k in model.projections(tokens):
        mass = teacher_block_mass(q, k, index_heads=index_q.shape[1], block_size=config.block_size)
        choose = select or dense.select_blocks
        ids = choose(index_q, index_k, topk=config.topk, block_size=config.block_size, **forced)
        recall = score_recall(mass, ids, block_size=config.block_size, exclude_own=exclude_own, **forced)
        recalls.append(float(recall))
    return recalls


def select_last(index_q, index_k, *, topk, block_size=128, local_blocks=1, init_blocks=0, cu_seqlens=None) -> Tensor:
    """The control that keeps the newest topk blocks, a sliding window; takes the arguments of `select_blocks`."""
    return _last_blocks(*index_q.shape[:3], topk, block_size, init_blocks, _hashable(cu_seqlens)).to(index_q.device)


def select_random(index_q, index_k, *, topk, block_size=128, local_blocks=1, init_blocks=0, cu_seqlens=None) -> Tensor:
    """The control that keeps the forced blocks and random visible ones; takes the arguments of `select_blocks`."""
    batch, index_heads, tokens = index_q.shape[:3]
    return random_blocks(
        tokens, block_size, topk, seed=0, batch=batch, index_heads=index_heads, local_blocks=local_blocks,
        init_blocks=init_blocks, cu_seqlens=cu_seqlens,
    ).to(index_q.device)  # fmt: skip


@functools.lru_cache(maxsize=8)
def _last_blocks(batch, index_heads, tokens, topk, block_size, init_blocks, cu_seqlens):
    # Kept, because training with this control asks for the same ids at every layer of every step.
    return last_blocks(
        tokens, block_size, topk, batch=batch, index_heads=index_heads, init_blocks=init_blocks, cu_seqlens=cu_seqlens
    )


def _hashable(cu_seqlens):
    return None if cu_seqlens is None else tuple(torch.as_tensor(cu_seqlens).tolist())


def main(arguments=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3600, help="steps of each run, the shared dense half included")
    parser.add_argument("--warm-up", type=int, default=150, help="steps of the dense warm-up of the index")
    parser.add_argument("--topk", type=int, default=4, help="blocks kept per query")
    parser.add_argument("--every", type=int, default=200, help="steps between two measurements")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file to write the curves to")
    options = parser.parse_args(arguments)

    config, recipe = SmallLMConfig(topk=options.topk), Recipe(steps=options.steps, seed=options.seed)
    train, validation = standard_library_text("train"), standard_library_text("validation")
    start = Trainer(config, recipe, train)
    start.run(options.steps // 2, "dense")
    curves = {}
    for name, warm_up, mode, select in (
        ("dense", 0, "dense", None), ("index", options.warm_up, "sparse", None), ("last", 0, "sparse", select_last),
    ):  # fmt: skip
        trainer, curve = start.fork(), []
        trainer.run(warm_up, "warm-up")
        while trainer.step < options.steps:
            trainer.run(min(options.every, options.steps - trainer.step), mode, select)
            loss = evaluate(trainer.model, validation, mode=mode, select=select)
            curve.append({"step": trainer.step, "validation_loss": loss})
            print(f"{name}: step {trainer.step}, validation loss {loss:.4f}", flush=True)
        curves[name] = curve
    if options.json:
        settings = {"steps": options.steps, "warm_up": options.warm_up, "topk": options.topk, "seed": options.seed}
        options.json.write_text(json.dumps({"settings": settings, "curves": curves}, indent=1) + "\n")


if __name__ == "__main__":
    main()
