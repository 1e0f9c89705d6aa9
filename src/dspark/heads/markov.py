"""MarkovHead: the sequential part of a DSpark head, a bias on the logits given the token drawn before.
It must never look at a token that lies further ahead.

Shapes: N blocks, B positions, r rank, D hidden, W draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dspark.heads.config import HeadConfig


class MarkovHead(nn.Module):
    """Logit bias W2 z, with z made from the embedding e = W1[previous token] (DSpark, equations 5 and 6).

    vanilla: z = e. gated: z = sigmoid(gate [h; e]) * e. rnn: a recurrent state s over the block,
    [g, c, o] = joint [s; e; h], s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c), z = tanh(o).
    Previous tokens are target ids, the bias is over the draft vocabulary.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        rank, hidden = config.markov_rank, config.hidden_size
        self.kind = config.markov_type
        self.rank = rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def embed(self, previous: Tensor) -> Tensor:
        """previous (...) target ids -> (..., r)."""
        return self.markov_w1(previous)

    def start(self, num_blocks: int, like: Tensor) -> Tensor:
        """The state before the first position (N, r); only the recurrent kind changes it."""
        return like.new_zeros(num_blocks, self.rank)

    def latent(self, state: Tensor, previous: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """One position: state (N, r), previous (N,) ids, hidden (N, D) -> the next state and z (N, r)."""
        embedded = self.embed(previous).to(hidden.dtype)
        if self.kind == "vanilla":
            return state, embedded
        if self.kind == "gated":
            return state, torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], dim=-1))) * embedded
        gate, candidate, output = self.joint_proj(torch.cat([state, embedded, hidden], dim=-1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return gate * state + (1 - gate) * torch.tanh(candidate), torch.tanh(output)

    def step(self, state: Tensor, previous: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The next state and the bias (N, W) of one position."""
        state, latent = self.latent(state, previous, hidden)
        return state, self.markov_w2(latent)

    def latents(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """All positions of given blocks at once: previous (N, B), hidden (N, B, D) -> z (N, B, r)."""
        if self.kind != "rnn":
            return self.latent(hidden, previous, hidden)[1]
        state, found = self.start(len(hidden), hidden), []
        for j in range(hidden.shape[1]):
            state, latent = self.latent(state, previous[:, j], hidden[:, j])
            found.append(latent)
        return torch.stack(found, dim=1)

    def bias(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """previous (N, B), hidden (N, B, D) -> (N, B, W)."""
        return self.markov_w2(self.latents(previous, hidden))
