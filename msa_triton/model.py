"""A small byte-level language model around `MSAttention`, for training on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from msa_triton.layer import MSAttention


@dataclass(frozen=True)
class SmallLMConfig:
    """Sizes of a `SmallLM`; the defaults train on two CPU cores in minutes.

    index_heads None is kv_heads, rotary_width None every channel; `context` is the length it is trained at, which
    `generate` keeps to; `tied` shares the embedding with the output. The rest is as in `MSAttention`.
    """

    layers: int = 4
    hidden_size: int = 128
    ffn_width: int = 480
    vocabulary: int = 256
    context: int = 512
    tied: bool = False
    heads: int = 4
    kv_heads: int = 2
    head_width: int = 16
    index_heads: int | None = None
    index_width: int = 32
    block_size: int = 8
    topk: int = 6
    local_blocks: int = 1
    init_blocks: int = 0
    qk_norm: bool = False
    rotary_width: int | None = None
    rope_theta: float = 10000.0
    backend: str = "dense"

    def attention(self) -> MSAttention:
        """A layer of these sizes."""
        own = {"layers", "ffn_width", "vocabulary", "context", "tied"}
        return MSAttention(**{name: value for name, value in asdict(self).items() if name not in own})


class LMOutput(NamedTuple):
    """What `SmallLM` returns.

    Attributes:
        logits: [B, N, vocabulary].
        lm_loss: scalar, mean cross-entropy in nats per token; None without targets.
        kl_loss: scalar, in nats: the sum of the layers' KL losses; 0 in mode "dense".
    """

    logits: Tensor
    lm_loss: Tensor | None
    kl_loss: Tensor


class SmallLM(nn.Module):
    """A pre-norm decoder: embedding, layers of MSAttention and SwiGLU, RMS norms, output projection.

    Minimise `lm_loss + kl_loss` (P Alg. 1 with lambda 1); the two train disjoint parameters, so that the index branch
    may have its own learning rate (`index_parameters`).

    Raises:
        TypeError, ValueError: sizes or options that no call could have.
    """

    def __init__(self, config: SmallLMConfig | None = None):
        super().__init__()
        self.config = config or SmallLMConfig()
        self.embedding = nn.Embedding(self.config.vocabulary, self.config.hidden_size)
        self.layers = nn.ModuleList(_Layer(self.config) for _ in range(self.config.layers))
        self.norm = nn.RMSNorm(self.config.hidden_size, eps=1e-6)
        self.head = None
        if not self.config.tied:
            self.head = nn.Linear(self.config.hidden_size, self.config.vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02 if self.config.tied else 1.0)

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, *, mode: str = "sparse", cu_seqlens=None,
        select: Callable | None = None,
    ) -> LMOutput:  # fmt: skip
        """Predicts each next token.

        Args:
            tokens: [B, N], any integer dtype. targets: [B, N], the token that follows each; -100 is not counted.
            mode, cu_seqlens, select: as in `MSAttention`.

        Raises:
            ValueError: an unknown mode; bad cu_seqlens.
        """
        hidden = self.embedding(tokens.long())
        kl_loss = hidden.new_zeros((), dtype=torch.float32)
        for layer in self.layers:
            hidden, kl = layer(hidden, mode=mode, cu_seqlens=cu_seqlens, select=select)
            kl_loss = kl_loss + kl
        hidden = self.norm(hidden)
        logits = functional.linear(hidden, self.embedding.weight) if self.head is None else self.head(hidden)
        lm_loss = None
        if targets is not None:
            lm_loss = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten().long())
        return LMOutput(logits, lm_loss, kl_loss)

    @torch.no_grad()
    def projections(self, tokens: Tensor, *, mode: str = "sparse", cu_seqlens=None) -> list[tuple[Tensor, ...]]:
        """(q, k, v, index_q, index_k) of every layer, as `MSAttention.project` gives them."""
        hidden, found = self.embedding(tokens.long()), []
        for layer in self.layers:
            found.append(layer.attention.project(layer.attention_norm(hidden), cu_seqlens=cu_seqlens))
            hidden, _ = layer(hidden, mode=mode, cu_seqlens=cu_seqlens)
        return found

    @torch.no_grad()
    def generate(
        self, prompt: bytes, count: int, *, mode: str = "sparse", temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> bytes:  # fmt: skip
        """Continues a prompt by `count` bytes: the likeliest ones, or at a temperature > 0 drawn ones.

        Raises:
            ValueError: an empty prompt.
        """
        if not prompt:
            raise ValueError("prompt must not be empty")
        written = bytearray(prompt)
        for _ in range(count):
            recent = torch.tensor([list(written[-self.config.context :])], device=self.embedding.weight.device)
            logits = self(recent, mode=mode).logits[0, -1].float()
            if temperature > 0:
                chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            else:
                chosen = logits.argmax()
            written.append(int(chosen))
        return bytes(written[len(prompt) :])

    def index_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of every index branch, which only the KL loss trains."""
        for layer in self.layers:
            yield from layer.attention.index_parameters()

    def backbone_parameters(self) -> Iterator[nn.Parameter]:
        """All other parameters, which only the language-model loss trains."""
        index = set(map(id, self.index_parameters()))
        yield from (parameter for parameter in self.parameters() if id(parameter) not in index)

    def save(self, path, dtype: torch.dtype = torch.float32) -> None:
        """Writes configuration and weights; `dtype=torch.float16` halves the file."""
        weights = {name: tensor.detach().to("cpu", dtype) for name, tensor in self.state_dict().items()}
        torch.save({"config": asdict(self.config), "weights": weights}, path)

    @classmethod
    def load(cls, path) -> SmallLM:
        """Reads what `save` wrote, onto the CPU in float32; runs no code from the file."""
        stored = torch.load(path, map_location="cpu", weights_only=True)
        model = cls(SmallLMConfig(**stored["config"]))
        model.load_state_dict(stored["weights"])
        return model


class _Layer(nn.Module):
    def __init__(self, config: SmallLMConfig):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.attention = config.attention()
        self.ffn_norm = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.gate = nn.Linear(config.hidden_size, config.ffn_width, bias=False)
        self.up = nn.Linear(config.hidden_size, config.ffn_width, bias=False)
        self.down = nn.Linear(config.ffn_width, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor, **options) -> tuple[Tensor, Tensor]:
        attended, kl_loss = self.attention(self.attention_norm(hidden), **options)
        hidden = hidden + attended
        normed = self.ffn_norm(hidden)
        return hidden + self.down(functional.silu(self.gate(normed)) * self.up(normed)), kl_loss
