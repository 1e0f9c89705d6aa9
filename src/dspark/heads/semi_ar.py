"""SemiAutoregressiveHead: DSpark's drafter, a parallel block with a sequential Markov head and a confidence head.
It must never see the target's states from the anchor on.

Shapes: N blocks, B positions of a block (block_size), D hidden, S context tokens, V target vocabulary, W draft
vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dspark.heads.blocks import BlockLayer, Context, RMSNorm, Rope
from dspark.heads.config import HeadConfig
from dspark.heads.markov import MarkovHead


class ConfidenceHead(nn.Module):
    """Logit of the probability that a position's draft is accepted, given that those before it were (equation 7)."""

    def __init__(self, input_size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(input_size, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).squeeze(-1)


class SemiAutoregressiveHead(nn.Module):
    """Position j of a block, 0 .. B - 1, predicts the token at anchor + j + 1 (DSpark, section 3.1).

    Row 0 is the anchor (the last committed token), the others are masks. Where the configuration says that the anchor
    predicts nothing, there are R = B + 1 rows and position j is row j + 1; else R = B. `embed_tokens` (V, D) and
    `lm_head` (W, D) are the target's, frozen. Parameters are named as in DeepSpec's checkpoints.
    """

    draft_ids: Tensor

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        assert config.kind == "dspark"
        self.config = config
        hidden = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        if config.context == "fused":
            self.fc = nn.Linear(len(config.target_layer_ids) * hidden, hidden, bias=False)
            self.hidden_norm = RMSNorm(hidden, config.rms_norm_eps)
        if config.mask_token_id is None:
            self.mask_embedding = nn.Parameter(torch.zeros(hidden))
        if config.anchor_feature:
            self.feature_proj = nn.Linear(hidden, hidden, bias=False)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = None
        if config.confidence:
            self.confidence_head = ConfidenceHead(hidden + (config.markov_rank if config.confidence_with_markov else 0))
        self.register_buffer("draft_ids", torch.arange(config.draft_vocab_size), persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        """Hidden states of the tapped layers, each (S, D) -> the context's input (S, D)."""
        return self.hidden_norm(self.fc(torch.cat(list(states), dim=-1).to(self.fc.weight.dtype)))

    def context_of(self, fused: Tensor, rope: Rope) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each layer, (S, G, E), of fused states (S, D); rope: cos and sin (S, E)."""
        attentions = [layer.self_attn for layer in self.layers if isinstance(layer, BlockLayer)]
        return [attention.key_value(fused, rope) for attention in attentions]

    def inputs(self, anchors: Tensor, features: Tensor | None = None) -> Tensor:
        """anchors (N,) token ids -> (N, R, D): the anchor's embedding, then masks. `features` (N, D): the target's
        final hidden state of the token before each anchor, where the head wants one."""
        config = self.config
        first = self.embed_tokens(anchors)
        if config.anchor_feature:
            assert features is not None
            first = first + self.feature_proj(features.to(first.dtype))
        if config.mask_token_id is None:
            mask = self.mask_embedding.to(first.dtype)
        else:
            mask = self.embed_tokens.weight[config.mask_token_id]
        masks = mask.expand(len(anchors), config.num_rows - 1, -1)
        return torch.cat([first.unsqueeze(1), masks], dim=1)

    def forward(self, inputs: Tensor, rope: Rope, contexts: Sequence[Context]) -> Tensor:
        """inputs (N, R, D); rope: cos and sin (N, R, E); a context for each layer -> hidden (N, B, D), normed."""
        x = inputs
        for layer, context in zip(self.layers, contexts, strict=True):
            x = layer(x, rope, context)
        return self.norm(x if self.config.sample_from_anchor else x[:, 1:])

    def logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Logits (N, B, W) of whole blocks given the token before each position, previous (N, B) target ids."""
        base = self.lm_head(hidden)
        return base if self.markov_head is None else base + self.markov_head.bias(previous, hidden)

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """hidden (..., D), previous (...) ids -> confidence logits (...), known before the position's token is."""
        assert self.confidence_head is not None
        if self.config.confidence_with_markov:
            assert self.markov_head is not None
            hidden = torch.cat([hidden, self.markov_head.embed(previous).to(hidden.dtype)], dim=-1)
        return self.confidence_head(hidden).float()

    def draft_greedily(self, hidden: Tensor, anchors: Tensor, *, base: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The chains of greedy requests: hidden (N, B, D), anchors (N,) ids -> tokens (N, B) target ids, and the logit
        (N, B) of each one's acceptance, known before it was chosen: of the confidence head, or without one that of
        the largest probability. `base` (N, B, W): lm_head(hidden), where it is known."""
        if base is None:
            base = self.lm_head(hidden)
        previous, tokens, sure = anchors, [], []
        markov = self.markov_head
        state = None if markov is None else markov.start(len(hidden), hidden)
        for j in range(hidden.shape[1]):
            logits = base[:, j]
            if markov is not None:
                assert state is not None
                state, bias = markov.step(state, previous, hidden[:, j])
                logits = logits + bias
            if self.confidence_head is not None:
                sure.append(self.confidence(hidden[:, j], previous))
            else:
                sure.append(torch.logit(logits.float().softmax(dim=-1).amax(dim=-1), eps=1e-4))
            previous = self.draft_ids[logits.argmax(dim=-1)]
            tokens.append(previous)
        return torch.stack(tokens, dim=1), torch.stack(sure, dim=1)


def block_positions(anchors: Tensor, num_rows: int) -> Tensor:
    """anchors (N,) positions -> (N, R): the anchor's and those after it."""
    return anchors.unsqueeze(1) + torch.arange(num_rows, device=anchors.device)
