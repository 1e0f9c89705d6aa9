"""LLM: prompts in, answers out, for programs that wait.
It must never change a request silently: what cannot be done is refused by name."""

from __future__ import annotations

import itertools
import numbers
import operator
import random
import time
import warnings
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from dspark.config import EngineConfig, SpeculationConfig, engine_config, speculation_config
from dspark.engine.build import Progress, Target, build_engine, open_target
from dspark.engine.ends import StopWatcher
from dspark.engine.fitting import check_memory
from dspark.engine.loop import Engine
from dspark.engine.recording import recorded
from dspark.engine.totals import EngineTotals
from dspark.model.precision import told
from dspark.noise import Noise
from dspark.params import RequestSpeculation, SamplingParams
from dspark.plan.guard import GuardedPolicy
from dspark.plan.length import LengthPolicy
from dspark.sampling import Processors, RowSampler
from dspark.types import CompletionOutput, Request, RequestOutput, RowStep, Sequence, StepStats
from dspark.verify.grammar import GrammarCompiler

Prompt = str | Seq[int]
Message = Mapping[str, Any]
MAX_PRIORITY = 10**6


class LLM:
    """A language model with speculative decoding.

    `model`: a packaged name (`dspark models list`), a folder, a GGUF file or a hub id. `draft`: "none", "ngram",
    "suffix", "dspark" (the head that comes with dspark for this model), "auto" (that head and suffixes, by what each
    promises), or a draft model or head by name or folder; `speculative_config` takes everything else, with vLLM's key
    names. Further keywords are those of dspark.config.EngineConfig. Raises ValueError naming cause and cure.
    """

    def __init__(
        self,
        model: str,
        *,
        draft: str | None = None,
        num_speculative_tokens: int | None = None,
        speculative_config: Mapping[str, Any] | SpeculationConfig | None = None,
        progress: Progress | None = None,
        **engine: Any,
    ) -> None:
        config = engine_config(engine)
        speculation = resolve_speculation(draft, num_speculative_tokens, speculative_config)
        check_memory(model, config, speculation, progress=progress)
        self._set_up(open_target(model, config, progress=progress), config, speculation)

    def _set_up(self, target: Target, config: EngineConfig, speculation: SpeculationConfig) -> None:
        self.target = target
        self.engine_config = config
        self.speculation = speculation
        self.tokenizer = target.tokenizer
        self.engine: Engine = build_engine(target, config, speculation)
        self.requests = RequestMaker(target, self.engine, seed=config.seed)

    def variant(self, *, speculation: SpeculationConfig, **engine: Any) -> LLM:
        """Another engine over the same loaded weights, with a cache and a drafter of its own: for paired runs."""
        return LLM.over(self.target, replace(self.engine_config, **engine), speculation)

    @classmethod
    def over(cls, target: Target, config: EngineConfig, speculation: SpeculationConfig) -> LLM:
        """An engine over a target that is there already."""
        made = object.__new__(cls)
        made._set_up(target, config, speculation)
        return made

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        priority: int | Seq[int] = 0,
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts (texts, or token ids), in the order given.

        `params`, `priority`: one for all or one each; a smaller priority is more urgent (docs/tuning.md). `on_output`
        is called after each step for every request that grew, with all of its text so far. A single prompt that cannot
        be answered raises ValueError; in a list the refused come back with `error` set, and a warning, and the others
        go on.
        """
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], numbers.Integral))
        items = [cast(Prompt, prompts)] if single else list(cast("Seq[Prompt]", prompts))
        outputs: list[RequestOutput] = []
        groups: dict[int, Group] = {}
        try:
            every = zip(items, _spread(params, len(items)), _spread_priority(priority, len(items)))
            for item, item_params, item_priority in every:
                try:
                    group = Group(self, self.requests.make(item, item_params, priority=item_priority))
                except ValueError as error:
                    if single:
                        raise
                    warnings.warn(f"a prompt was refused: {error}", stacklevel=2)
                    outputs.append(_refused(item, str(error)))
                    continue
                outputs.append(group.output)
                groups.update(dict.fromkeys((seq.id for seq in group.sequences), group))
            self._run(groups, on_output)
        finally:
            for seq_id in groups:  # an interrupted run must not leave its rows to the next one
                self.engine.abort(seq_id)
        return outputs

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        priority: int | Seq[int] = 0,
        on_output: Callable[[RequestOutput], None] | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer conversations ({"role", "content"} messages) through the model's chat template."""
        if not messages:
            raise ValueError("there are no messages: give at least one {'role': 'user', 'content': ...}")
        many = not isinstance(messages[0], Mapping)
        chats = cast("Seq[Seq[Message]]", messages if many else [messages])
        prompts = [self.tokenizer.apply_chat_template(list(chat), **template) for chat in chats]
        return self.generate(prompts if many else prompts[0], params, priority=priority, on_output=on_output)

    def add_sink(self, sink: Callable[[StepStats], None]) -> None:
        """`sink` is called with the StepStats of every step."""
        self.engine.sinks.append(sink)

    def add_row_sink(self, sink: Callable[[RowStep], None]) -> None:
        """`sink` is called for every sequence that sampled in a step, with what was decided for it and how it ended;
        its method `aborted`, where it has one, with every sequence that is aborted."""
        self.engine.row_sinks.append(sink)

    def add_policy(self, name: str, policy: LengthPolicy) -> None:
        """A length policy of your own (plan/length.LengthPolicy), for requests with speculation={"policy": name}.

        If it raises or answers nonsense, a warning says so once and its requests go on without drafts. Raises
        ValueError for what is no policy, and for a name that no request can ask for or that there is already.
        """
        RequestSpeculation(policy="" if name is None else name)
        speculator = self.engine.speculator
        if name in speculator.policies:
            raise ValueError(f"there is a policy {name!r} already: choose another name")
        speculator.policies[name] = GuardedPolicy(name, policy, has_costs=speculator.cost is not None)

    def profile(self, path: str | Path) -> AbstractContextManager[None]:
        """`with llm.profile("profile.jsonl"):` writes what is drafted for every answer, and how much of it holds."""
        return recorded(self, path)

    def save_history(self, path: str | Path) -> None:
        """What was learned of acceptance, for `history` in the speculative_config of another run."""
        self.engine.speculator.history.save(path)

    def measure_costs(self) -> dict[str, Any]:
        """Measure again what passes cost here, and keep it for the next start of this model on this machine.

        "target" and, by name, draft models: as PassCost.as_dict (engine/measure). "head": [rows, seconds] of a draft
        pass, for greedy rows and for sampled ones, as measured when this engine started.
        """
        page_size, blocks = self.engine_config.page_size, self.engine.speculator.block_costs
        costs: dict[str, Any] = {"target": self.target.cost(self.engine.runner, page_size=page_size, fresh=True)}
        for (name, *_), draft in self.target.drafts.items():
            for runner in draft.runners.values():
                costs[name] = draft.cost(runner, page_size=page_size, fresh=True)
        found = {name: cost.as_dict() for name, cost in costs.items()}
        if blocks is not None:
            found["head"] = {"greedy": blocks.greedy.points, "sampled": blocks.sampled.points}
        return found

    @property
    def stats(self) -> EngineTotals:
        return self.engine.totals

    def reset_stats(self) -> None:
        """Start counting anew."""
        preempted = self.engine.totals.num_preempted
        self.engine.totals = EngineTotals(num_preempted=preempted)

    def info(self) -> dict[str, Any]:
        """What runs, where and how. `weights`: how they are held; `lossless_against`: whose answers are kept."""
        runner, cache, facts = self.engine.runner, self.engine.cache, self.target.facts
        asked, dtype = self.engine_config.quantization, str(runner.cache_dtype).removeprefix("torch.")
        quantization = facts.quantization or asked
        return {
            "model": self.target.name,
            "path": runner.name,
            "exact": bool(runner.exact),
            "dtype": dtype,
            "device": str(runner.device),
            "quantization": quantization,
            "weights": told(path=runner.name, dtype=dtype, asked=asked, stored=facts.quantization, origin=facts.origin),
            "lossless_against": f"this target in {quantization or dtype}, decoded plainly",
            "max_context": self.engine.max_context,
            "vocab_size": runner.vocab_size,
            "num_layers": runner.num_layers,
            "hidden_size": runner.hidden_size,
            "cache_pages": [pool.num_pages for pool in cache.pools],
            "page_size": cache.page_size,
            "draft": self.speculation.method if self.speculation.model is None else self.speculation.model,
            "draft_quantization": self._draft_quantization(),
            "num_speculative_tokens": self.speculation.num_speculative_tokens,
            "policy": self.speculation.policy,
            "objective": self.engine_config.objective,
        }

    def _draft_quantization(self) -> str | None:
        """As its folder has it, else as asked for."""
        asked = self.speculation.quantization
        drafts = (draft for (name, *_), draft in self.target.drafts.items() if name == self.speculation.model)
        return next((draft.facts.quantization or asked for draft in drafts), asked)

    def _run(self, groups: dict[int, Group], on_output: Callable[[RequestOutput], None] | None) -> None:
        while self.engine.has_work:
            grown = {id(groups[seq.id]): groups[seq.id] for seq in self.engine.step()}
            for group in grown.values():
                if on_output is not None or group.ended:
                    group.update()
                if on_output is not None:
                    on_output(group.output)


class RequestMaker:
    """From a prompt and parameters to queued sequences, with every check at the door."""

    def __init__(self, target: Target, engine: Engine, *, seed: int | None) -> None:
        self.target = target
        self.engine = engine
        self.seed = seed
        self.ids = itertools.count()
        self.seeds = random.Random(seed)
        self.cached_processors: dict[int, tuple[SamplingParams, Processors]] = {}

    def make(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        request_id: str | None = None,
        arrival: float | None = None,
    ) -> Request:
        """A checked request; `request_id` and `arrival` (of time.perf_counter) where the caller has them. Raises
        ValueError for an empty prompt, an unknown token id, a prompt that leaves no room in the context, a grammar that
        cannot be followed, or a policy that the engine does not have."""
        facts, tokenizer = self.target.facts, self.target.tokenizer
        text = prompt if isinstance(prompt, str) else None
        try:
            ids = tokenizer.encode(prompt) if isinstance(prompt, str) else [operator.index(token) for token in prompt]
        except TypeError as error:
            raise ValueError(f"a prompt is a text or a list of token ids: {error}") from error
        if not ids:
            raise ValueError("the prompt is empty: give at least one token")
        if not all(0 <= token < facts.vocab_size for token in ids):
            raise ValueError(f"the prompt has a token id outside 0..{facts.vocab_size - 1}: check the tokenizer")
        if len(ids) >= self.engine.max_context:
            raise ValueError(
                f"the prompt has {len(ids)} tokens and the context holds {self.engine.max_context}: "
                "shorten the prompt, or raise max_model_len or cache_gib where the model allows it"
            )
        policies = self.engine.speculator.policies
        if (policy := params.control.policy) is not None and policy not in policies:
            unmeasured = " (adaptive needs an engine that started with it, as it measures costs)"
            raise ValueError(
                f"speculation.policy={policy!r} is not known here: choose one of {', '.join(policies)}"
                + (unmeasured if policy == "adaptive" else "")
            )
        if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > MAX_PRIORITY:
            raise ValueError(
                f"priority={priority!r} is not usable: give a whole number, at most {MAX_PRIORITY} in size; smaller is "
                "more urgent"
            )
        self.prepare(params)
        return Request(
            id=request_id or f"request-{next(self.ids)}",
            prompt_token_ids=ids,
            params=params,
            prompt=text,
            arrival=time.perf_counter() if arrival is None else arrival,
            priority=priority,
        )

    def prepare(self, params: SamplingParams) -> None:
        """What takes long: compile the grammar, unless it is known. May be called on any thread, before `make`, so that
        the engine's need not wait. Raises ValueError naming what in the grammar cannot be followed."""
        if params.structure is not None:
            self.grammars.compile(params.structure)

    @property
    def grammars(self) -> GrammarCompiler:
        """Shared by the engines over a target."""
        return self.target.grammars(width=self.engine.runner.vocab_size)

    def sequences(self, request: Request) -> list[Sequence]:
        """The n sequences of a request, queued in the engine."""
        params = request.params
        if params.min_tokens_per_second is not None:
            self._need_costs()
        processors = self._processors(params)
        result = []
        for index in range(params.n):
            prompt = request.prompt_token_ids
            seq = Sequence(id=next(self.ids), request=request, index=index, tokens=list(prompt), num_prompt=len(prompt))
            sampler = RowSampler(
                params,
                processors,
                tokens=prompt,
                num_prompt=len(prompt),
                index=index,
                noise=self._noise(params, index),
                grammar=self.grammars.matcher(params.structure) if params.structure is not None else None,
            )
            watcher = StopWatcher(
                self.target.tokenizer.stream(skip_special_tokens=params.skip_special_tokens, prompt_ids=prompt),
                stop=params.stop,
                include_stop=params.include_stop_str_in_output,
            )
            self.engine.add(seq, sampler, watcher)
            result.append(seq)
        return result

    def _need_costs(self) -> None:
        """Floors are kept by what passes cost. An engine that has not measured them does now, if nobody ever has."""
        admission, runner = self.engine.scheduler.admission, self.engine.runner
        if admission.cost is None:
            cost = self.target.cost(runner, page_size=self.engine.cache.page_size).step_cost()
            admission.cost = self.engine.speculator.cost = cost

    def _noise(self, params: SamplingParams, index: int) -> Noise | None:
        """Unseeded answers draw their seed from the engine's, where one is set; else from the system."""
        if params.seed is None and self.seed is not None:
            return Noise(self.seeds.getrandbits(63), coupled=False)
        return None

    def _processors(self, params: SamplingParams) -> Processors:
        known = self.cached_processors.get(id(params))
        if known is None or known[0] is not params:
            if len(self.cached_processors) > 256:
                self.cached_processors.clear()
            facts = self.target.facts
            built = Processors.build(
                params,
                vocab_size=facts.vocab_size,
                num_valid_tokens=facts.num_valid_tokens,
                eos_token_ids=facts.eos_token_ids,
                bad_words_ids=self._bad_words_ids(params),
            )
            known = self.cached_processors[id(params)] = (params, built)
        return known[1]

    def _bad_words_ids(self, params: SamplingParams) -> list[list[int]]:
        """Each bad word as it is spelled at the start of a text and after a space."""
        spellings = [prefix + word for word in params.bad_words for prefix in ("", " ")]
        ids = [self.target.tokenizer.encode(text, add_special_tokens=False) for text in spellings]
        return [list(word) for word in dict.fromkeys(tuple(word) for word in ids if word)]


class Group:
    """The sequences of one request and its growing output."""

    def __init__(self, llm: LLM, request: Request) -> None:
        self.request = request
        self.sequences = llm.requests.sequences(request)
        self.output = RequestOutput(
            request_id=request.id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[],
            finished=False,
        )

    @property
    def ended(self) -> bool:
        """Whether all of its sequences have."""
        return all(seq.finish_reason is not None for seq in self.sequences)

    def update(self) -> None:
        """Bring the output up to date with the sequences."""
        self.output.outputs = [completion(seq) for seq in self.sequences]
        self.output.finished = self.ended
        first = self.sequences[0]
        if self.request.params.prompt_logprobs is not None:
            self.output.prompt_logprobs = list(first.prompt_logprobs)
        self.output.num_cached_prompt_tokens = first.num_prefix_hits
        times = {
            "arrival": self.request.arrival,
            "first_token": min((s.first_token_time for s in self.sequences if s.first_token_time), default=None),
            "finished": max((s.finish_time for s in self.sequences if s.finish_time), default=None),
        }
        self.output.timings = {name: value for name, value in times.items() if value is not None}


def completion(seq: Sequence) -> CompletionOutput:
    """A sequence as its caller sees it: a copy, since a stream's reader may be slower than the engine."""
    return CompletionOutput(
        index=seq.index,
        text=seq.text,
        token_ids=seq.output_token_ids,
        finish_reason=seq.finish_reason,
        stop_reason=seq.stop_reason,
        logprobs=list(seq.logprobs) if seq.params.logprobs is not None else None,
        speculation=seq.record.copy(),
        origins=list(seq.origins),
        text_ends=list(seq.text_ends),
    )


def resolve_speculation(
    draft: str | None, num_tokens: int | None, config: Mapping[str, Any] | SpeculationConfig | None
) -> SpeculationConfig:
    """The three spellings of the same choice, which must not contradict each other."""
    if isinstance(config, SpeculationConfig):
        if draft is not None or num_tokens is not None:
            raise ValueError("draft and num_speculative_tokens are part of the SpeculationConfig given: set them there")
        return config
    values = dict(config or {})
    if num_tokens is not None:
        values["num_speculative_tokens"] = num_tokens
    if draft is not None:
        if "method" in values or "model" in values:
            raise ValueError("draft and speculative_config both name a drafter: give one of them")
        short = SpeculationConfig.from_draft(draft)
        values |= {"method": short.method} if short.model is None else {"method": short.method, "model": short.model}
    config = speculation_config(values)
    if values and not {"method", "model"} & set(values):
        raise ValueError(
            f"{', '.join(sorted(values))} given and no draft to use them: give draft='auto', or a method in "
            "speculative_config, such as {'method': 'auto', ...}"
        )
    return config


def _spread(params: SamplingParams | Seq[SamplingParams] | None, count: int) -> Seq[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling params for {count} prompts: give one, or one for each prompt")
    return params


def _spread_priority(priority: int | Seq[int], count: int) -> Seq[int]:
    if not isinstance(priority, Seq):
        return [priority] * count
    if len(priority) != count:
        raise ValueError(f"{len(priority)} priorities for {count} prompts: give one, or one for each prompt")
    return priority


def _refused(prompt: Prompt, error: str) -> RequestOutput:
    return RequestOutput(
        request_id="",
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=[] if isinstance(prompt, str) else list(prompt),
        outputs=[],
        error=error,
    )
