"""The check of tokens: whether engines make the same tokens of a call as the router does."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvrouter.api.fleet_schema import Model, Worker
from kvrouter.cli.doctor.findings import Check, Compared, NotEnough, NotMade, Outcome, Problem, Severity
from kvrouter.cli.doctor.reading import ANSWERS_COMPARED, Reading, TokenProbe, counted

OTHER_PROMPT_SHARE = 0.1
BLIND_SHARE = 0.5
"""If more than this share of the answers had other tokens, the router's prompt is not the engine's."""

TOKENIZER_WHY = (
    "the router hashes other tokens than the engine caches: it finds no prompt again, and routes by load"
)
TOKENIZER_REMEDY = (
    "give the router the engine's own tokenizer: the folder or the hub name that it was started "
    "with (tokenizer in the fleet file, --model-path, or --tokenizer of its worker)"
)
SHAPE_WHY = "the engine makes another prompt of such calls than the router, which routes them by load"
SHAPE_REMEDY = (
    "look for flags of the engine that change prompts of such calls (--chat-template, "
    "--chat-template-content-format, defaults of template names), and give the router the engine's own "
    "template; or let engines tokenize such calls (--tokenize-fallback engine); report the shape where none "
    "of that helps"
)


class ShapeAnswers(NamedTuple):
    """The answers to calls of one shape, and how many were not found where their engine had them cached."""

    shape: str
    missed: float
    answers: float

    def __str__(self) -> str:
        return f"{self.shape} {self.missed:g} of {self.answers:g}"


def tokenizers(reading: Reading) -> Iterator[Outcome]:
    """Engines that make other tokens of a text than the router does."""
    made = [probe for probe in reading.probes if probe.is_made]
    equal = sum(probe.is_equal for probe in made)
    answers = reading.counts.total("kvrouter_prompt_shape_answers_total")
    missed = reading.counts.total("kvrouter_prompt_shape_answers_total", prediction="missed")
    engines = len({probe.worker_id for probe in made})
    by_router = sum(not worker.takes_calls for worker in reading.fleet.workers)
    yield Compared(
        f"{equal} of {len(made)} prompts equal at {counted(engines, 'engine')}; "
        f"{answers - missed:g} of {answers:g} cached answers as predicted, {reading.period}; "
        f"{counted(by_router, 'worker')} with the router's own tokens"
    )
    for model in reading.fleet.models:
        yield from _model(reading, model)


def _model(reading: Reading, model: Model) -> Iterator[Outcome]:
    if model.routing_reason is not None:
        yield Problem(
            Severity.WARNING,
            f"model {model.model}",
            f"its calls are routed by load and text: {model.routing_reason}",
            "what its workers have cached counts for nothing, and no answer goes on elsewhere when its "
            "engine is lost",
            "name the engine's own tokenizer: its folder or its hub name (tokenizer in the fleet file, "
            "--model-path, or --tokenizer of its worker); or let engines that have /tokenize do it "
            "(--tokenize-fallback engine)",
        )
        return
    if model.tokenized_by == "engine":
        yield Problem(
            Severity.NOTE,
            f"model {model.model}",
            "its prompts, or its chats, are tokenized by its engines",
            "each such call waits for an engine's /tokenize, by --tokenize-engine-wait-s at most",
            "name the engine's own tokenizer to have them tokenized here",
        )
        return
    workers = [worker for worker in reading.fleet.workers_of(model) if worker.takes_calls]
    if workers and not reading.engines_asked:
        yield NotMade(f"model {model.model}", "--no-engines: no engine was asked")
    probes = [probe for probe in reading.probes if probe.model == model.model]
    yield from _probed(model, workers, probes)
    made = [probe for probe in probes if probe.is_made]
    if all(probe.is_equal for probe in made):
        yield from _answered(reading, model, n_equal=len(made), has_engines=bool(workers))
    yield from _unrendered_chats(model)


def _probed(model: Model, workers: Sequence[Worker], probes: Sequence[TokenProbe]) -> Iterator[Outcome]:
    """Yield the engines whose tokens of the probes are others than the router's."""
    by_id = {worker.worker_id: worker for worker in workers}
    for probe in probes:
        worker = by_id.get(probe.worker_id) if probe.worker_id is not None else None
        what = "a chat" if probe.is_chat else "a text"
        if probe.router is None or probe.engine is None:
            subject = f"model {model.model}" if worker is None else f"the engine of worker {worker.worker_id}"
            yield NotMade(subject, f"{what} was not tokenized there: {probe.why}")
        elif not probe.is_equal:
            text_is_equal = any(
                each.worker_id == probe.worker_id and not each.is_chat and each.is_made and each.is_equal
                for each in probes
            )
            remedy = TOKENIZER_REMEDY + (", and the same chat template" if probe.is_chat else "")
            if text_is_equal:
                remedy = (
                    "the router has the engine's tokenizer, as texts are equal: give it the engine's own "
                    "chat template (chat_template.jinja in the folder of its tokenizer)"
                )
            yield Problem(
                Severity.CRITICAL,
                f"model {model.model}" if worker is None else str(worker),
                f"of {what} its engine makes {len(probe.engine)} tokens ({_first_ids(probe.engine)}), the "
                f"router {len(probe.router)} ({_first_ids(probe.router)})",
                TOKENIZER_WHY,
                remedy,
            )


def _answered(reading: Reading, model: Model, *, n_equal: int, has_engines: bool) -> Iterator[Outcome]:
    """Yield the shapes of calls of which engines make another prompt than the router; with ``n_equal``
    probes whose tokens are equal, the tokenizer is not the cause.
    """
    shapes = _shapes(reading, model)
    blind = [each for each in shapes if each.answers >= ANSWERS_COMPARED]
    blind = [each for each in blind if each.missed > BLIND_SHARE * each.answers]
    known = f"the router has the engine's tokenizer ({n_equal} prompts are equal), so it is the shape: "
    for each in blind:
        others = ", ".join(str(other) for other in shapes if other is not each)
        yield Problem(
            Severity.WARNING,
            f"calls of the shape {each.shape!r} ({model.model})",
            f"{each.missed:g} of {each.answers:g} were not found where their engine had them cached, "
            f"{reading.period}" + (f"; other shapes: {others}" if others else ""),
            SHAPE_WHY,
            (known if n_equal else "") + SHAPE_REMEDY,
        )
    if not blind:
        yield from _other_prompts(reading, model, shapes, n_equal=n_equal)
    n_answers = sum(each.answers for each in shapes)
    if has_engines and reading.engines_asked and not n_equal and n_answers < ANSWERS_COMPARED:
        yield NotEnough(f"model {model.model}", f"{n_answers:g} answers had cached blocks to compare")


def _other_prompts(
    reading: Reading, model: Model, shapes: Sequence[ShapeAnswers], *, n_equal: int
) -> Iterator[Outcome]:
    """Yield the workers whose engines count other prompt tokens, with the shapes where that is so."""
    name = "kvrouter_index_predictions_total"
    workers = reading.counts.by(name, "worker", model=model.model, prediction="other_prompt")
    differing = ", ".join(str(each) for each in shapes if each.missed)
    by_shape = f"; by shape of the call: {differing}" if differing else ""
    for worker_id, other in workers.items():
        compared = reading.counts.total(name, model=model.model, worker=worker_id)
        if compared >= ANSWERS_COMPARED and other > OTHER_PROMPT_SHARE * compared:
            yield Problem(
                Severity.WARNING,
                f"worker {worker_id} ({model.model})",
                f"of {other:g} of {compared:g} calls its engine made another number of tokens than the "
                f"router, {reading.period}{by_shape}",
                SHAPE_WHY if n_equal else TOKENIZER_WHY,
                f"the router has the engine's tokenizer ({n_equal} prompts are equal), so it is the shapes: "
                f"{SHAPE_REMEDY}"
                if n_equal
                else f"{TOKENIZER_REMEDY}, and its chat template; where it has both, {SHAPE_REMEDY}",
            )


def _shapes(reading: Reading, model: Model) -> list[ShapeAnswers]:
    name = "kvrouter_prompt_shape_answers_total"
    return [
        ShapeAnswers(
            shape,
            reading.counts.total(name, model=model.model, shape=shape, prediction="missed"),
            answers,
        )
        for shape, answers in reading.counts.by(name, "shape", model=model.model).items()
    ]


def _unrendered_chats(model: Model) -> Iterator[Outcome]:
    for unrendered in model.unrendered_chats:
        if unrendered.chats < ANSWERS_COMPARED:
            continue
        yield Problem(
            Severity.WARNING,
            f"model {model.model}",
            f"{unrendered.chats} chats could not be made into prompts ({unrendered.reason}): "
            f"{unrendered.detail}",
            "such chats are routed by load: what its workers have cached of them counts for nothing",
            "give the router the engine's own chat template (chat_template.jinja in the folder of its "
            "tokenizer); report the template where it is that already",
        )


def _first_ids(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids[:6])) + (" …" if len(ids) > 6 else "")


CHECKS = (Check("tokenizers", "engines make the same tokens as the router", tokenizers),)
